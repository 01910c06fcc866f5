"""A worker as a process of its own, with real ranks."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from gateway_rig import GatewayRig

from tidemill_local import processes
from tidemill_local.home import Home
from tidemill_local.spec import flags

# Against hangs only: a slow machine may take minutes to start a worker.
START_S = 540.0
# Small, so that several workers fit beside each other on a test machine; a test that is not run for seconds has not
# fallen silent.
SMALL = {"torch_threads": 1, "num_blocks": 96, "max_num_seqs": 8, "liveness_s": 6.0, "drain_s": 5.0}


@dataclass(frozen=True)
class Servers:
    """Where etcd and NATS are, and the folder of all processes."""

    home: Home
    etcd: str
    nats: str


class WorkerProcess:
    """`python -m tidemill_prefill` or `tidemill_decode`; starts at once, `wait_ready` waits for it."""

    def __init__(self, servers: Servers, service: str, instance: str, *, model: Path, **settings: object) -> None:
        self.instance = instance
        self._home = servers.home
        given = SMALL | settings | {"instance": instance, "model": str(model), "run_dir": str(servers.home.run)}
        given |= {"etcd": servers.etcd, "nats": servers.nats}
        argv = [sys.executable, "-m", f"tidemill_{service}", *flags(given)]  # type: ignore[arg-type]
        self.process = processes.start(instance, argv, run_dir=servers.home.run, log_dir=servers.home.logs)

    def wait_ready(self) -> str:
        """host:port of gRPC, once the worker is ready."""
        run_file = self._home.run / f"{self.instance}.json"
        give_up_at = time.monotonic() + START_S
        while not run_file.exists():
            assert processes.alive(self.process), self.log_tail()
            assert time.monotonic() < give_up_at, self.log_tail()
            time.sleep(0.05)
        return str(json.loads(run_file.read_text())["endpoint"])

    def rank_pids(self) -> list[int]:
        """The worker's rank processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def terminate(self) -> None:
        """Asks it to drain."""
        os.kill(self.process.pid, signal.SIGTERM)

    def wait_gone(self, timeout_s: float = 120.0) -> None:
        """Waits for its end."""
        assert processes.wait_gone(self.process, timeout_s), self.log_tail()

    def kill(self) -> None:
        """Ends it at once; its ranks follow by themselves."""
        processes.kill(self.process)
        self.wait_gone()

    def log_tail(self) -> str:
        """The end of its log."""
        return processes.log_tail(self.process, 60)


StartWorker = Callable[..., WorkerProcess]
Connect = Callable[[WorkerProcess], AbstractAsyncContextManager[GatewayRig]]
