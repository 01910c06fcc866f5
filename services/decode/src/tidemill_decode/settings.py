"""Settings of the decode service."""

from dataclasses import dataclass

from tidemill_mesh.config import setting
from tidemill_worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """What a decode instance can be told."""

    l3_policy: str = setting("off", choices=("write_through", "off"))
    """Whether full blocks go to kvstore as they are computed, and missing ones are looked for there; prefill stores
    prompts already."""
