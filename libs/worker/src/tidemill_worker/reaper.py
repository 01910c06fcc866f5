"""Ends what has outlived its deadline, whether or not anything else happens here."""

import structlog

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_worker.moves import stay
from tidemill_worker.worker import Worker

log = structlog.get_logger()


def reap(worker: Worker) -> None:
    """Ends expired tickets, holds that nobody fetched, requests without an owner or that their engine did not end."""
    now = worker.clock()
    for entry in worker.tickets.expire():
        worker.counts.expired("ticket")
        log.warning("ticket expired", request_id=entry.key.request_id)
    for live in worker.table:
        if live.session not in worker.sessions:
            log.warning("a request outlived its gateway's stream", request_id=live.key.request_id)
            worker.counts.forgotten("stream")
            worker.abort(live, "no gateway's stream has it", tell=False)
        elif live.held_until is not None and now >= live.held_until and not live.pulling:
            worker.counts.expired("hold")
            log.warning("held KV was not fetched in time", request_id=live.key.request_id)
            if live.move is None:
                worker.release(live)
            else:
                stay(worker, live, "expired")
        elif live.held_until is None and now >= live.deadline_at + worker.settings.liveness_s:
            # The engine ends requests at their deadline by itself, unless it is stuck.
            worker.counts.expired("request")
            worker.fail(live, MeshError(errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "the request's deadline has passed"))
