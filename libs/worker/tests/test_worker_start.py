"""A worker that cannot start says why in one line, and ends."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill_local.spec import flags

NOBODY = "127.0.0.1:9"
LIMIT_S = 300.0


def run_to_its_end(model: Path, folder: Path, **more: str) -> tuple[int, list[str]]:
    """Exit status and lines of a prefill worker that finds neither etcd nor NATS."""
    given = {"model": str(model), "etcd": NOBODY, "nats": f"nats://{NOBODY}", "run_dir": str(folder / "run")}
    given |= {"log_format": "json", "torch_threads": 1, "restart_backoff_s": 0.01}
    argv = [sys.executable, "-m", "tidemill_prefill", *flags(given)]  # type: ignore[arg-type]
    done = subprocess.run(argv, env=os.environ | more, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.fixture
def without_ucx(tmp_path: Path) -> str:
    """A Python path on which the binding of UCX does not load, as on a machine without its libraries."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "ucxx.py").write_text("raise ImportError('libucp.so.0: cannot open shared object file')\n")
    return str(folder)


def test_without_ucx_a_worker_says_so_in_its_last_line_and_ends(
    checkpoints: Callable[[str], Path], tmp_path: Path, without_ucx: str
) -> None:
    status, lines = run_to_its_end(checkpoints("llama"), tmp_path, PYTHONPATH=without_ucx)
    assert status == 1
    last = json.loads(lines[-1])
    assert last["event"] == "cannot start"
    for named in ("ucx", "libucp.so.0", "transport=tcp"):
        assert named in last["error"]
    of_the_service = [line for line in lines if '"service": "prefill"' in line]
    assert not any("Traceback" in line or "exception" in json.loads(line) for line in of_the_service)
    assert any("transport=tcp" in line for line in of_the_service[:-1]), "each try tells it as well"
