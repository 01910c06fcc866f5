"""Temporary folders that have an owner: what a killed process leaves behind, the next one removes.

The owner holds a lock on a file in its folder for as long as it lives, however it ends: the kernel lets go of it. So
neither process ids, which come again, nor times are asked whether a folder is still somebody's.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

PREFIX = "tidemill-"
LOCK = "owner.lock"

log = structlog.get_logger()


@contextlib.contextmanager
def owned_folder() -> Iterator[Path]:
    """A new folder for the length of the block, with a short path as unix sockets need; others' left-overs go first."""
    sweep()
    root = Path(tempfile.gettempdir())
    draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
    with (draft / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under this name others look at it: not before it is locked.
        folder = draft.rename(root / draft.name.removeprefix("."))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> int:
    """Removes this user's folders whose owners are gone; how many."""
    removed = sum(_remove_if_left(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"))
    if removed:
        log.info("removed what killed processes left behind", folders=removed)
    return removed


def _remove_if_left(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(handle, "wb", closefd=True) as lock:
        if os.fstat(handle).st_uid != os.geteuid():
            return False
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
            return not path.exists()
    return False
