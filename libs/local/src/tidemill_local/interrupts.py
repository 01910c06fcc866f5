"""Steps that an interrupt must not split: a signal that comes meanwhile is acted upon after them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred() -> Iterator[None]:
    """For the length of the block no handler of an ending signal runs; only the main thread ever runs any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    # What is ignored stays so, also in what the block starts; None is a handler that Python cannot put back.
    handlers = {number: signal.getsignal(number) for number in ENDING}
    replaced = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in replaced:
            signal.signal(number, keep)
        yield
    finally:
        # One that comes while they are put back must not keep the others from it.
        signal.pthread_sigmask(signal.SIG_BLOCK, replaced)
        for number, handler in replaced.items():
            signal.signal(number, handler)
        for caught_number in caught:
            os.kill(os.getpid(), caught_number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, replaced)
