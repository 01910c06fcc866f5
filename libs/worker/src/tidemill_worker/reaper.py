"""Ends what has outlived its deadline, whether or not anything else happens here."""

import structlog

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_worker.worker import Worker

log = structlog.get_logger()


def reap(worker: Worker) -> None:
    """Ends expired tickets, holds that nobody fetched, and requests that their engine did not end in time."""
    now = worker.clock()
    for entry in worker.tickets.expire():
        worker.counts.expired("ticket")
        log.warning("ticket expired", request_id=entry.key.request_id)
    for live in worker.table:
        if live.held_until is not None and now >= live.held_until and not live.pulling:
            worker.counts.expired("hold")
            log.warning("held KV was not fetched in time", request_id=live.key.request_id)
            worker.release(live)
        elif live.held_until is None and now >= live.deadline_at + worker.settings.liveness_s:
            # The engine ends requests at their deadline by itself, unless it is stuck.
            worker.counts.expired("request")
            worker.fail(live, MeshError(errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "the request's deadline has passed"))
