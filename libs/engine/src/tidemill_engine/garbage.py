"""Python's garbage collector in a process that serves: what loading made is never looked at again, what serving makes
seldom."""

import gc

_THRESHOLDS = (10_000, 20, 50)
"""A full collection takes some 50 ms, which every request of an engine waits for. Requests leave no cycles behind, so
that there is little to find."""


def settle_garbage() -> None:
    """To be called once, when everything that lives as long as the process is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
