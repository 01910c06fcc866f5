"""Draining: no new work; what decodes moves to where there is room, or ends here, until the deadline; the rest ends by
name."""

import asyncio

import structlog

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_worker.moves import move_away
from tidemill_worker.worker import Worker

log = structlog.get_logger()

FLUSH_S = 2.0


async def finish_running(worker: Worker, deadline_s: float) -> None:
    """Waits for live requests; what is left at the deadline ends with WORKER_LOST, so that gateways place it anew."""
    away = asyncio.create_task(move_away(worker), name="moves of a drain")
    try:
        async with asyncio.timeout(deadline_s):
            await worker.table.idle()
    except TimeoutError:
        log.warning("drain deadline reached", left_requests=len(worker.table))
    finally:
        away.cancel()
    for live in worker.table:
        worker.fail(live, MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "the worker has drained"))
    await flush_sessions(worker)


async def flush_sessions(worker: Worker) -> None:
    """Gives gateways the time to take what is queued for them, then ends their streams."""
    try:
        async with asyncio.timeout(FLUSH_S):
            await asyncio.gather(*(session.flushed() for session in worker.sessions))
    except TimeoutError:
        log.warning("gateways did not read their last messages")
    for session in list(worker.sessions):
        session.close(MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "the worker has drained"))
