"""What this service, its ranks and its gateways each have, compared once in each liveness_s.

A domain that makes progress says nothing of a single request: one that was dropped on the way, by a fault of ours,
would wait until its deadline. Each side therefore names all that it has; streams keep their order, so a difference is a
fault and not a message under way. Nothing is done for each token.
"""

import structlog

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_worker.domain import Domain
from tidemill_worker.requests import LiveRequest
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.translate import from_key, to_key
from tidemill_worker.worker import Worker

log = structlog.get_logger()


class RollCalls:
    """Asks the leaders of all domains, and acts on what they answer."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._called_at = worker.clock()

    def call_due(self) -> None:
        """Asks, if it is time."""
        worker, now = self._worker, self._worker.clock()
        if now - self._called_at < worker.settings.liveness_s:
            return
        self._called_at = now
        for domain in worker.domains:
            live = worker.table.of_domain(domain.index)
            for request in live:
                request.kv_answered_at_call = request.kv_answered
            domain.send(messages.RollCall([request.key for request in live]))

    def answered(self, domain: Domain, answer: messages.RollAnswer) -> None:
        """Ends what the domain has lost, what waits there for KV that nobody fetches, and what it has told in vain."""
        if answer.num_unowned:
            log.warning("a rank had requests that its service did not have", requests=answer.num_unowned)
            self._worker.counts.forgotten("service", answer.num_unowned)
        if answer.num_uncredited:
            log.warning("credit of a gateway was lost", requests=answer.num_uncredited)
            self._worker.counts.forgotten("credit", answer.num_uncredited)
        for key in answer.missing:
            self._end(self._worker.table.get(key), "a rank has lost the request")
        for key in answer.receiving:
            live = self._worker.table.get(key)
            if live is not None and live.fetch is None and (live.kv_answered_at_call or not live.kv_answered):
                self._end(live, "a rank waits for KV that is not on its way")
                # Nothing is written into its blocks any more: they need not wait for a transfer's longest time.
                domain.send(messages.KVFailed(key, recompute=False, error=messages.EngineError("CANCELLED", "")))
        for key in answer.held:
            live = self._worker.table.get(key)
            if live is not None and live.stage == "prefill" and live.held_until is None:
                self._end(live, "the last output of a rank was lost")

    def _end(self, live: LiveRequest | None, why: str) -> None:
        if live is not None:
            self._worker.counts.forgotten("rank")
            self._worker.fail(live, MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, why))


def take_roll_call(worker: Worker, session: GatewaySession, call: worker_pb2.RollCall) -> None:
    """Ends what the gateway does not have, says of what it will hear no more, and passes on what may be emitted."""
    keys = {to_key(key) for key in call.keys}
    for live in worker.table.of_session(session):
        # Of what is held, for decode or for a move, the gateway expects nothing, and the hold has its own end.
        if live.key not in keys and live.held_until is None:
            log.warning("a gateway had forgotten a request", request_id=live.key.request_id)
            worker.counts.forgotten("gateway")
            worker.abort(live, "its gateway does not have it", tell=False)
    missing = [key for key in keys if not _will_tell(worker.table.get(key), session)]
    if missing:
        # Lost, or just ended: only the gateway knows, which has seen all outputs before this.
        session.push(worker_pb2.ConnectResponse(missing=[from_key(key) for key in missing]))
    _pass_on_credit(worker, session, call)


def _pass_on_credit(worker: Worker, session: GatewaySession, call: worker_pb2.RollCall) -> None:
    """Tells leaders the totals of credit, after all credit that came before."""
    by_domain: dict[int, messages.EmitUntil] = {}
    # A gateway of an older release gives none.
    for key, total in zip(call.keys, call.emit_until, strict=False):
        live = worker.table.get(to_key(key))
        if total > 0 and live is not None and live.session is session:
            until = by_domain.setdefault(live.domain, messages.EmitUntil([], []))
            until.keys.append(live.key)
            until.totals.append(total)
    for index, until in by_domain.items():
        worker.domains[index].send(until)


def _will_tell(live: LiveRequest | None, session: GatewaySession) -> bool:
    return live is not None and live.session is session and not live.is_told
