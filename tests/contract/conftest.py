"""A client in another language: Node with the packages of node/package.json, which know nothing of Tidemill."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PROTO = REPOSITORY / "proto"
FILES = ("package.json", "client.js")


@dataclass(frozen=True)
class NodeAnswer:
    """What Node got: the responses as JSON objects, the gRPC status, and the ErrorDetail if there was one."""

    responses: list[dict[str, Any]]
    status: int
    details: str
    error: dict[str, Any] | None


def install(cache: Path) -> Path:
    """The folder with client.js and its packages; installs them at the first use, safely beside other runs."""
    folder = cache / "node-contract"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = (HERE / "node" / "package.json").read_text()
        done = folder / ".installed"
        for name in FILES:
            shutil.copy(HERE / "node" / name, folder / name)
        if not (done.exists() and done.read_text() == wanted):
            argv = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
            subprocess.run(argv, cwd=folder, check=True, timeout=300)
            done.write_text(wanted)
    return folder


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """Where the Node client is installed."""
    if shutil.which("node") is None:
        pytest.skip("Node is not installed on this machine")
    home = os.environ.get("TIDEMILL_HOME") or str(REPOSITORY / ".tidemill")
    return install(Path(home) / "cache")


@pytest.fixture
def node_call(node_folder: Path) -> Callable[[str, str, dict[str, Any]], Awaitable[NodeAnswer]]:
    """Calls a method of InferenceService at an address from Node."""

    async def call(address: str, method: str, request: dict[str, Any]) -> NodeAnswer:
        process = await asyncio.create_subprocess_exec(
            "node",
            str(node_folder / "client.js"),
            address,
            str(PROTO),
            method,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate(json.dumps(request).encode())
        assert process.returncode == 0
        *responses, last = [json.loads(line) for line in output.decode().splitlines()]
        return NodeAnswer(responses, last["status"], last["details"], last["error"])

    return call
