"""Starts prefill workers with emulated ranks by fork, each in milliseconds: a line of settings in, a process id out."""

import json
import os
import sys
from functools import partial
from pathlib import Path

from tidemill.mesh.v1.membership_pb2 import ROLE_PREFILL
from tidemill_mesh.service import run_service
from tidemill_worker.body import run_worker
from tidemill_worker.settings import WorkerSettings

RANK = (sys.executable, str(Path(__file__).with_name("emulated_owner.py")))


def main() -> None:
    """Until its input ends."""
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os.dup2(log, 1)
            os.dup2(log, 2)
            worker = partial(run_worker, role=ROLE_PREFILL, rank_module=RANK)
            os._exit(run_service("prefill", WorkerSettings(**json.loads(line)), worker))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
