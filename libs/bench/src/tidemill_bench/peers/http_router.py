"""Public HTTP routers as peers of the gateway, before a canned OpenAI server."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill_bench.openai_load import closed_loop
from tidemill_bench.peers import canned_server
from tidemill_bench.peers.vllm_cpu import free_port

MODULES = {"sglang-router": "sglang_router.launch_router", "vllm-router": "vllm_router.launch_router"}


@dataclass(frozen=True)
class PeerRouter:
    """Where a peer listens and which process it is."""

    port: int
    pid: int


@contextmanager
def canned(log: Path) -> Iterator[PeerRouter]:
    """Runs one canned server alone: what a client pays without any router."""
    port = free_port()
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, canned_server.__file__, str(port)], stdout=sink, stderr=sink)
    try:
        _wait_usable(port, process, log)
        yield PeerRouter(port, process.pid)
    finally:
        process.kill()
        process.wait()


@contextmanager
def peer_router(venv: Path, name: str, log: Path) -> Iterator[PeerRouter | None]:
    """Runs the router with two canned servers behind it; None, with a word about it, where it is not installed."""
    python = venv / "bin" / "python"
    module = MODULES[name]
    found = (
        python.exists()
        and not subprocess.run(
            [python, "-c", f"import {module.partition('.')[0]}"], capture_output=True, check=False
        ).returncode
    )
    if not found:
        print(f"{name} is not installed in {venv}: `make bench-deps` installs it; rows stand without it")
        yield None
        return
    servers = [free_port() for _ in range(2)]
    port = free_port()
    processes = []
    with log.open("wb") as sink:
        for server in servers:
            argv = [sys.executable, canned_server.__file__, str(server)]
            processes.append(subprocess.Popen(argv, stdout=sink, stderr=sink))
        argv = [str(python), "-m", module, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        argv += ["--worker-urls", *(f"http://127.0.0.1:{server}" for server in servers)]
        argv += ["--prometheus-port", str(free_port())]
        router = subprocess.Popen(argv, stdout=sink, stderr=sink, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        processes.append(router)
    try:
        _wait_usable(port, router, log)
        yield PeerRouter(port, router.pid)
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def _wait_usable(port: int, router: subprocess.Popen[bytes], log: Path) -> None:
    body = {"model": "peer", "prompt": "ready?", "max_tokens": 1}
    deadline = time.monotonic() + 60
    while True:
        try:
            asyncio.run(closed_loop("127.0.0.1", port, [body], 1))
            return
        except* (OSError, RuntimeError, IndexError):
            if router.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not start; see {log}") from None
        time.sleep(0.5)
