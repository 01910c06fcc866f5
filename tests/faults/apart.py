"""A worker whose ranks are elsewhere in the network: `apart.py SERVICE NAMESPACE ADDRESS FLAGS` starts it.

Service and rank stay joined by their unix socket, which no cut reaches; all KV that comes or goes takes the line to the
namespace, while gRPC, NATS and etcd do not.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tidemill_worker import body
from tidemill_worker.launch import RankLaunch, plan_ranks
from tidemill_worker.settings import WorkerSettings


def install(namespace: str, address: str) -> None:
    """From now on ranks start in the namespace, and listen and are reached at this address of it."""

    def plan_apart(
        settings: WorkerSettings, domain: int, run: int, socket_dir: Path, rank_module: Sequence[str]
    ) -> list[RankLaunch]:
        inside = ["ip", "netns", "exec", namespace, *rank_module]
        return plan_ranks(replace(settings, advertise_host=address), domain, run, socket_dir, inside)

    body.plan_ranks = plan_apart


def main() -> int:
    """Starts the service."""
    _, service, namespace, address, *flags = sys.argv
    install(namespace, address)
    sys.argv = [f"tidemill_{service}", *flags]
    status: int = importlib.import_module(f"tidemill_{service}.__main__").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
