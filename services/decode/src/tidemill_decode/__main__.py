"""Starts a decode worker: `python -m tidemill_decode`."""

import sys

from tidemill.mesh.v1 import membership_pb2
from tidemill_decode.settings import DecodeSettings
from tidemill_mesh.config import load_settings
from tidemill_mesh.service import ServiceContext, run_service
from tidemill_worker.body import run_worker


async def run(context: ServiceContext) -> None:
    """Runs the worker in the decode role."""
    await run_worker(context, membership_pb2.ROLE_DECODE)


def main() -> int:
    """Returns the process's exit status."""
    return run_service("decode", load_settings(DecodeSettings, "decode"), run)


if __name__ == "__main__":
    sys.exit(main())
