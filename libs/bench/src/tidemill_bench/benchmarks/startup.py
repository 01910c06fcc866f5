"""`make up` from nothing and from warm: seconds and bytes on disk.

Packages come from the configured index each time, so the first figure holds the network's speed of the day.
"""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tidemill_bench.options import Options
from tidemill_bench.report import Row, machine
from tidemill_local.ports import free_port

HOST = "127.0.0.1"
# What would let a fresh clone see this checkout's packages or flags.
NOT_INHERITED = ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")


def _make(target: str, root: Path, home: Path, ports: tuple[int, int]) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    environment["TIDEMILL_HOME"] = str(home)
    arguments = f"ARGS=--http-port={ports[0]} --grpc-port={ports[1]}" if target == "up" else "ARGS="
    start = time.perf_counter()
    subprocess.run(["make", "-C", str(root), target, arguments], env=environment, check=True)
    return time.perf_counter() - start


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def run(options: Options) -> list[Row]:
    """Clones the checkout, brings it up from nothing, again while it runs, and again after `make down`."""
    here = Path(subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip())
    with tempfile.TemporaryDirectory(prefix="tidemill-startup-") as folder:
        root, home = Path(folder) / "clone", Path(folder) / "home"
        subprocess.run(["git", "clone", "-q", str(here), str(root)], check=True)
        ports = free_port(HOST), free_port(HOST)
        try:
            nothing_s = _make("up", root, home, ports)
            again_s = _make("up", root, home, ports)
            _make("down", root, home, ports)
            warm_s = _make("up", root, home, ports)
        finally:
            _make("down", root, home, ports)
        sizes = {name: _bytes(home / name) for name in ("venv", "models", "cache") if (home / name).exists()}
        shutil.rmtree(home)
    workload = "fresh clone, SmolLM2-135M, one instance of each service, question asked"
    rows = [
        Row(metric=f"make up, {name}", unit="s", value=value, higher_is_better=False, workload=workload,
            machine=machine())
        for name, value in (("from nothing", nothing_s), ("while it runs", again_s), ("after make down", warm_s))
    ]  # fmt: skip
    rows += [
        Row(metric=f"on disk, {name}", unit="MiB", value=size / 2**20, higher_is_better=False, workload=workload,
            machine=machine())
        for name, size in sizes.items()
    ]  # fmt: skip
    return rows
