"""Of scored targets, one."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Scored(Protocol):
    """Something with a score in seconds, lower is better."""

    @property
    def score_s(self) -> float:
        """Seconds."""


S = TypeVar("S", bound=Scored)


def pick(scored: Sequence[S], tie_fraction: float, rng: random.Random) -> S:
    """One of those within `tie_fraction` of the best, at random.

    So prompts that are cold everywhere spread over the instances, and a short prefix that every prompt shares does
    not draw all of them to the one instance that has it.
    """
    limit = min(item.score_s for item in scored) * (1.0 + tie_fraction)
    return rng.choice([item for item in scored if item.score_s <= limit])
