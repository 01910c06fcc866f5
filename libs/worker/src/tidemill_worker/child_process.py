"""A child process on an event loop that also runs gRPC.

asyncio's own subprocesses fork, and with uvloop that runs gRPC's fork handlers beside its live threads: children then
die now and then before they reach exec. `subprocess` uses vfork, which runs none; a pidfd tells of the exit.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class ChildProcess:
    """A started process, in a session of its own so that a terminal's Ctrl-C reaches its parent only."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path | None) -> None:
        """Starts it; blocks for the milliseconds until exec. stdout and stderr go to the log, or to our stderr."""
        log = log_path.open("ab") if log_path else None
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log or sys.stderr.fileno(),
                stderr=log or sys.stderr.fileno(),
                env=dict(env),
                start_new_session=True,
            )
        finally:
            if log:
                log.close()
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Of the process, also after its end."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    @property
    def exit_words(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        assert code is not None, "the process has ended"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    async def wait(self) -> None:
        """Waits for its end."""
        await self._exited.wait()

    def kill(self) -> None:
        """Ends it at once."""
        if self.running:
            self._process.kill()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._exited.set()
