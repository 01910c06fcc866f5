"""A tier that takes copies and gives none only costs: found by what goes in, what is asked for and what comes out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from tidemill_mesh.log import RateLimit
from tidemill_worker.counts import WorkerCounts

log = structlog.get_logger()

TIERS = ("l2", "l3")


@dataclass(frozen=True, slots=True)
class Flow:
    """Blocks of one tier, counted since some moment."""

    taken: int = 0
    asked: int = 0
    """Those that prompts lacked when they looked into the tier, and of them"""
    found: int = 0
    """those that it had."""
    given: int = 0


class TierWatch:
    """One tier. It is one-way once it has taken `blocks` blocks and then, for `window_s`, was asked for as many and
    gave none; until it gives one. What was asked for before is no evidence, since little was in it. Pure."""

    def __init__(self, blocks: int, window_s: float, clock: Callable[[], float]) -> None:
        self._blocks = blocks
        self._window_s = window_s
        self._clock = clock
        self._mark = Flow()
        """Totals when it last gave something; of asked and found, when there was enough in it."""
        self._since: float | None = None

    def look(self, totals: Flow) -> Flow | None:
        """Takes in what was counted so far; while the tier is one-way, what has gone in and been asked for since."""
        now = self._clock()
        if totals.given != self._mark.given:
            self._mark, self._since = totals, None
        taken = totals.taken - self._mark.taken
        if self._since is None and taken >= self._blocks:
            self._mark, self._since = replace(self._mark, asked=totals.asked, found=totals.found), now
        asked = totals.asked - self._mark.asked
        if self._since is None or now - self._since < self._window_s or asked < self._blocks:
            return None
        return Flow(taken, asked, totals.found - self._mark.found)


class TierAlarm:
    """Watches both tiers of an instance; tells metrics at each look, and the log once in `window_s`."""

    def __init__(
        self, counts: WorkerCounts, blocks: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counts = counts
        self._window_s = window_s
        self._watches = {tier: TierWatch(blocks, window_s, clock) for tier in TIERS}
        self._limits = {tier: RateLimit(window_s, clock) for tier in TIERS}

    def look(self) -> None:
        """To be called again and again."""
        for tier, watch in self._watches.items():
            one_way = watch.look(flow_of(self._counts, tier))
            self._counts.one_way(tier, one_way is not None)
            if one_way is not None and self._limits[tier].passes() is not None:
                log.warning(
                    "a tier takes blocks and gives none",
                    tier=tier,
                    taken=one_way.taken,
                    asked=one_way.asked,
                    found=one_way.found,
                    within_s=self._window_s,
                )


def flow_of(counts: WorkerCounts, tier: str) -> Flow:
    """What the instance has counted of a tier; prefetched blocks have come out of L3, into L2."""
    totals, taken, from_l3 = counts.totals, {"l2": "saved", "l3": "offloaded"}[tier], 0
    if tier == "l3":
        from_l3 = totals["l2_blocks_prefetched"]
    return Flow(
        totals[f"{tier}_blocks_{taken}"],
        totals[f"{tier}_blocks_asked"],
        totals[f"{tier}_blocks_found"],
        totals[f"{tier}_blocks_onboarded"] + from_l3,
    )
