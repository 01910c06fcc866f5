"""Settings of the autoscaler."""

from dataclasses import dataclass, fields

from tidemill_autoscaler.policy import Bounds, Policy
from tidemill_mesh.config import ServiceSettings, setting
from tidemill_mesh.config_fields import SettingError

ROLES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class AutoscalerSettings(ServiceSettings):
    """What the autoscaler can be told."""

    actuator: str = setting("local", choices=("local", "none"))
    """Who starts and stops workers: processes of this machine, or nobody (decisions are only shown)."""
    templates: str = ""
    """JSON file of command lines by role, from which workers are started; "{instance}" stands for the new id."""
    log_dir: str = ""
    """Folder of the logs of started workers; empty: run_dir."""
    bounds_file: str = ""
    """File in which bounds set at run time outlive a restart; empty: they do not."""
    model: str = ""
    """Only workers that serve this model are counted; empty: all."""
    min_prefill: int = setting(1, minimum=0, maximum=1024)
    """Fewest prefill instances."""
    max_prefill: int = setting(2, minimum=0, maximum=1024)
    """Most prefill instances."""
    min_decode: int = setting(1, minimum=0, maximum=1024)
    """Fewest decode instances."""
    max_decode: int = setting(2, minimum=0, maximum=1024)
    """Most decode instances."""
    tick_s: float = setting(1.0, minimum=0.05, maximum=60.0)
    """Seconds between two decisions."""
    scale_out_load: float = setting(1.0, minimum=0.1, maximum=100.0)
    """SLO load (1 = at the target) whose mean over window_s makes one more start."""
    scale_in_load: float = setting(0.6, minimum=0.01, maximum=100.0)
    """One stops when the rest would have stayed below this SLO load for scale_in_after_s."""
    window_s: float = setting(15.0, minimum=0.1, maximum=3600.0)
    """Look-back of scale-out."""
    scale_in_after_s: float = setting(60.0, minimum=0.1, maximum=86400.0)
    """For so long the load must have been low; at least window_s."""
    cooldown_s: float = setting(30.0, minimum=0.1, maximum=86400.0)
    """Between the end of one change and the next; at least window_s."""
    settle_s: float = setting(10.0, minimum=0.0, maximum=3600.0)
    """After its own start it only watches for so long: workers that start beside it have not registered yet."""
    warmup_s: float = setting(15.0, minimum=0.0, maximum=3600.0)
    """A new instance's load is left out for so long."""
    start_timeout_s: float = setting(120.0, minimum=1.0, maximum=86400.0)
    """A start that has not registered by then is withdrawn."""
    start_backoff_s: float = setting(15.0, minimum=0.1, maximum=3600.0)
    """Wait after a failed start, doubled by each further one."""
    stop_limit_s: float = setting(120.0, minimum=0.1, maximum=86400.0)
    """Seconds that a stopped instance may take to drain before it is killed; at least the workers' drain_s."""

    def __post_init__(self) -> None:
        name, reason = self.policy().problem()
        if name:
            raise SettingError(f"{name}: {reason}")
        for role in ROLES:
            problem = self.bounds(role).problem()
            if problem:
                raise SettingError(f"{role}: {problem}")
        if self.actuator == "local" and not (self.templates and self.run_dir):
            raise SettingError("templates and run_dir: both must be set for actuator=local")

    def policy(self) -> Policy:
        """The decision's thresholds and delays."""
        shared = {item.name for item in fields(Policy)} & {item.name for item in fields(type(self))}
        return Policy(**{name: getattr(self, name) for name in shared}, stale_load_s=max(2.0, self.liveness_s))

    def bounds(self, role: str) -> Bounds:
        """A role's bounds at the start."""
        return Bounds(getattr(self, f"min_{role}"), getattr(self, f"max_{role}"))
