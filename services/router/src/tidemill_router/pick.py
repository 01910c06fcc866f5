"""Of scored targets, one."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Scored(Protocol):
    """Something with a score in seconds, lower is better."""

    @property
    def score_s(self) -> float:
        """Seconds."""


class Crowded(Scored, Protocol):
    """Something that also says how much it has to do."""

    @property
    def crowding(self) -> float:
        """Lower is better."""


S = TypeVar("S", bound=Scored)
C = TypeVar("C", bound=Crowded)


def pick(scored: Sequence[S], tie_fraction: float, rng: random.Random) -> S:
    """One of those within `tie_fraction` of the best, at random.

    So prompts that are cold everywhere spread over the instances, and a short prefix that every prompt shares does
    not draw all of them to the one instance that has it.
    """
    return rng.choice(_near_best(scored, tie_fraction))


def pick_least_crowded(scored: Sequence[C], tie_fraction: float, rng: random.Random) -> C:
    """Of those within `tie_fraction` of the best the one with the least to do: where one request more or less hardly
    shows in the time of a step, chance alone would fill one batch while the other is half empty."""
    near = _near_best(scored, tie_fraction)
    least = min(item.crowding for item in near)
    return rng.choice([item for item in near if item.crowding == least])


def _near_best(scored: Sequence[S], tie_fraction: float) -> list[S]:
    limit = min(item.score_s for item in scored) * (1.0 + tie_fraction)
    return [item for item in scored if item.score_s <= limit]
