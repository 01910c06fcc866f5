"""Back-off of failed cache domains."""

from tidemill_worker.restarts import RestartPolicy


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def policy(clock: Clock) -> RestartPolicy:
    """Three failures in a minute are too many."""
    return RestartPolicy(limit=3, window_s=60, backoff_s=1.0, max_backoff_s=3.0, clock=clock)


def test_the_delay_doubles_up_to_a_bound_and_then_the_domain_stays_down() -> None:
    restarts = policy(Clock())
    assert [restarts.failed() for _ in range(4)] == [1.0, 2.0, 3.0, None]


def test_failures_outside_the_window_are_forgotten() -> None:
    clock = Clock()
    restarts = policy(clock)
    for _ in range(3):
        restarts.failed()
    clock.now = 61.0
    assert restarts.failed() == 1.0
