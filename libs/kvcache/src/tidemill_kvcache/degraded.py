"""One step of degraded service: on once a load has stayed above a mark, off again once it has stayed below a lower one.
It lies here because engine, router and gateway have this package in common.

    load   on ------------------ above for on_after_s:  on
           off ----------------- below for off_after_s: off

Between the marks, and while the load only touches one of them, nothing changes. An unknown load counts as none: who
hears nothing serves as usual.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Marks:
    """When a step goes on and off, in SLO load (1 = at the target) and seconds."""

    on: float
    off: float
    on_after_s: float = 2.0
    off_after_s: float = 5.0

    def __post_init__(self) -> None:
        assert self.off < self.on, "a step that goes off where it goes on would flap"


class DegradedStep:
    """Whether the step is on; `changed` is told each time it goes on or off, with the load that decided."""

    def __init__(
        self, name: str, marks: Marks, clock: Callable[[], float], changed: Callable[[bool, float], None]
    ) -> None:
        self.name = name
        self.is_on = False
        self.load = 0.0
        """As last observed."""
        self.times_on = 0
        self._marks = marks
        self._clock = clock
        self._changed = changed
        self._since_s = math.inf
        """Since when the load has been where the step would change."""

    def observe(self, load: float | None) -> bool:
        """Takes the load now; whether the step is on."""
        marks, now_s = self._marks, self._clock()
        self.load = load if load is not None and not math.isnan(load) else 0.0
        would_change = self.load < marks.off if self.is_on else self.load >= marks.on
        if not would_change:
            self._since_s = math.inf
            return self.is_on
        self._since_s = min(self._since_s, now_s)
        if now_s - self._since_s >= (marks.off_after_s if self.is_on else marks.on_after_s):
            self.is_on = not self.is_on
            self.times_on += self.is_on
            self._since_s = math.inf
            self._changed(self.is_on, self.load)
        return self.is_on
