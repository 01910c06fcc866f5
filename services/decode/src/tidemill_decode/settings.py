"""Settings of the decode service."""

from dataclasses import dataclass

from tidemill_mesh.config import setting
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.write_down import POLICIES


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """What a decode instance can be told."""

    l3_policy: str = setting("on_eviction", choices=POLICIES)
    """When full blocks go to kvstore (on eviction: by L2 where there is one, otherwise by L1; prefill stores prompts
    already); "off" also means that missing ones are not looked for there."""
