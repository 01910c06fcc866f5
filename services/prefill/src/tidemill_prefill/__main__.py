"""Starts a prefill worker: `python -m tidemill_prefill`."""

import sys

from tidemill.mesh.v1 import membership_pb2
from tidemill_mesh.config import load_settings
from tidemill_mesh.service import ServiceContext, run_service
from tidemill_prefill.settings import PrefillSettings
from tidemill_worker.body import run_worker


async def run(context: ServiceContext) -> None:
    """Runs the worker in the prefill role."""
    await run_worker(context, membership_pb2.ROLE_PREFILL)


def main() -> int:
    """Returns the process's exit status."""
    return run_service("prefill", load_settings(PrefillSettings, "prefill"), run)


if __name__ == "__main__":
    sys.exit(main())
