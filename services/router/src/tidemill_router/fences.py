"""Instances that a gateway saw die: not chosen again until they prove to be alive."""

from collections.abc import Callable

IN_FLIGHT_S = 0.1
"""A load report that arrives so soon after the fence may have been sent before it."""

Incarnation = tuple[str, str]
"""(instance, incarnation)."""


class Fences:
    """Fenced incarnations and since when; a new incarnation of the same instance is not fenced."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._since: dict[Incarnation, float] = {}
        self._clock = clock

    def __len__(self) -> int:
        return len(self._since)

    def fence(self, instance: str, incarnation: str) -> None:
        """No more placements there."""
        self._since[(instance, incarnation)] = self._clock()

    def heard_from(self, instance: str, incarnation: str) -> bool:
        """A load report of that incarnation arrived now; True if it lifts the fence."""
        since = self._since.get((instance, incarnation))
        if since is None or self._clock() < since + IN_FLIGHT_S:
            return False
        del self._since[(instance, incarnation)]
        return True

    def forget(self, instance: str, *, keep_incarnation: str = "") -> None:
        """The instance left, or came back as another incarnation."""
        for key in [k for k in self._since if k[0] == instance and k[1] != keep_incarnation]:
            del self._since[key]

    def is_fenced(self, instance: str, incarnation: str) -> bool:
        """Whether placements must avoid it."""
        return (instance, incarnation) in self._since
