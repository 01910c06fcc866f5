import asyncio
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill_transfer.agent import TransferAgent, open_agent

PEER = Path(__file__).with_name("transfer_peer.py")
Pattern = Callable[[int, int], np.ndarray]


class Peer:
    """Drives transfer_peer.py; its answers come through a thread, so that it may outlive a test's event loop."""

    def __init__(self, transport: str, num_agents: int = 1) -> None:
        command = [sys.executable, "-W", "error", str(PEER), transport, str(num_agents)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.addresses: list[str] = json.loads(self.process.stdout.readline())
        self._ids = itertools.count()
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def address(self) -> str:
        return self.addresses[0]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            self._answers.pop(answer["id"]).set_result(answer)

    def ask(self, op: str, **fields: Any) -> "asyncio.Future[dict[str, Any]]":
        assert self.process.stdin is not None
        command = {"id": next(self._ids), "op": op, "deadline_s": 120.0, **fields}
        answer: Future[dict[str, Any]] = Future()
        self._answers[command["id"]] = answer
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return asyncio.wrap_future(answer)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Lets the peer close properly; its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        return status


@pytest.fixture(scope="session")
def pattern() -> Pattern:
    """The bytes that the peer sends and expects for (tag, size)."""
    function: Pattern = runpy.run_path(str(PEER))["pattern"]
    return function


@pytest.fixture(scope="session", params=["ucx", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def agent(transport: str) -> AsyncIterator[TransferAgent]:
    opened = await open_agent(transport, "127.0.0.1")  # type: ignore[arg-type]
    yield opened
    await opened.close()
    holds = opened.holds
    assert not any(holds.values()), holds


@pytest.fixture(scope="session")
def peer(transport: str) -> Iterator[Peer]:
    """One peer for all tests that leave it alive."""
    shared = Peer(transport)
    yield shared
    assert shared.end() == 0


@pytest.fixture
def start_peer(transport: str) -> Iterator[Callable[..., Peer]]:
    """Starts peers of the test's own."""
    peers: list[Peer] = []

    def start(num_agents: int = 1) -> Peer:
        peers.append(Peer(transport, num_agents))
        return peers[-1]

    yield start
    for started in peers:
        if started.process.poll() is None:
            started.kill()


@pytest.fixture
def own_peer(start_peer: Callable[..., Peer]) -> Peer:
    """A peer that the test may kill or freeze."""
    return start_peer()
