"""Settings of the prefill service."""

from dataclasses import dataclass

from tidemill_worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """What a prefill instance can be told."""
