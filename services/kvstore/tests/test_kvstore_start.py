"""A store that cannot start says why in one line, and ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 200.0


def test_without_ucx_a_store_says_so_and_ends(tmp_path: Path) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "ucxx.py").write_text("raise ImportError('libucp.so.0: cannot open shared object file')\n")
    argv = [sys.executable, "-m", "tidemill_kvstore", "--etcd", "127.0.0.1:9", "--nats", "nats://127.0.0.1:9"]
    argv += ["--data-dir", str(tmp_path / "store"), "--run-dir", str(tmp_path / "run"), "--log-format", "json"]
    env = os.environ | {"PYTHONPATH": str(without)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["event"] == "cannot start"
    for named in ("ucx", "libucp.so.0", "transport=tcp"):
        assert named in last["error"]
    assert "Traceback" not in done.stderr
