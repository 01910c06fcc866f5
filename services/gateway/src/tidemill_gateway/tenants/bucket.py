"""A budget that fills again with time."""

MINUTE_S = 60.0


class Bucket:
    """Filled at a rate up to a minute's worth; may be overdrawn, and then fills from below nothing."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._filled_at = now

    def level(self, now: float, share: float = 1.0) -> float:
        """What is left; `share` of the rate has been ours since the last look."""
        gained = max(0.0, now - self._filled_at) * self.per_minute * share / MINUTE_S
        self._filled_at = max(now, self._filled_at)
        self._level = min(self.per_minute, self._level + gained)
        return self._level

    def take(self, amount: float) -> None:
        """Uses some."""
        self._level -= amount

    def take_elsewhere(self, amount: float) -> None:
        """Others used some. A minute's debt is the most that they leave: what is told late was used long ago."""
        self._level = max(self._level - amount, min(self._level, -self.per_minute))

    def at_most(self, level: float, now: float, share: float = 1.0) -> None:
        """Somebody who has counted for longer knows that no more is left."""
        self._level = min(self.level(now, share), level)

    def wait_s(self, needed: float, share: float = 1.0) -> float:
        """Seconds until so much is there, when nothing else is used."""
        return max(0.0, needed - self._level) * MINUTE_S / (self.per_minute * share)
