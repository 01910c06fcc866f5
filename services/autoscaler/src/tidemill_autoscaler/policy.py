"""What the decision is told: bounds, thresholds and delays."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Replicas of a role; min = max pins the count."""

    min_replicas: int
    max_replicas: int

    def problem(self) -> str:
        """Why they cannot be used, empty if they can."""
        if self.min_replicas < 0:
            return "min_replicas must be at least 0"
        if self.max_replicas < self.min_replicas:
            return f"max_replicas must be at least min_replicas ({self.min_replicas})"
        return ""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Hysteresis and delays, in SLO load (1 = at the target) and seconds."""

    scale_out_load: float = 1.0
    scale_in_load: float = 0.6
    # Look-back of scale-out; the mean over it must be above scale_out_load.
    window_s: float = 15.0
    # For so long the load that the remaining instances would have must have stayed below scale_in_load.
    scale_in_after_s: float = 60.0
    # Between the end of one change and the next one.
    cooldown_s: float = 30.0
    # After its own start it only watches: workers that start beside it have not registered yet.
    settle_s: float = 10.0
    # A new instance's load says nothing for so long.
    warmup_s: float = 15.0
    start_timeout_s: float = 120.0
    # After a failed start, doubled by each further one.
    start_backoff_s: float = 15.0
    max_backoff_s: float = 600.0
    # An older load report is no report.
    stale_load_s: float = 5.0

    def problem(self) -> tuple[str, str]:
        """(setting, why it cannot be used), empty if all can."""
        if self.cooldown_s < self.window_s:
            return "cooldown_s", f"must be at least window_s ({self.window_s:g}), else replicas would flap"
        if self.scale_in_after_s < self.window_s:
            return "scale_in_after_s", f"must be at least window_s ({self.window_s:g}), else replicas would flap"
        if self.scale_in_load >= self.scale_out_load:
            return "scale_in_load", f"must be below scale_out_load ({self.scale_out_load:g})"
        return "", ""
