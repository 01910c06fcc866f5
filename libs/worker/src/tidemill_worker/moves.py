"""Running requests that go on at another instance: offered to their gateways, suspended, fetched like a prompt's KV.

    offered --HandOver--> standing still --Pull--> fetched: released, gone on elsewhere
       |                        |            |
       |                        |            +-- `stays` ends the fetch if that is not complete ---+
       +-- `stays` -------------+-- `stays`, nobody fetched it ---> goes on here, its outputs say so

A request is offered because its domain runs out of blocks or because this instance drains. It goes on until a gateway
has found room for it elsewhere. Only a gateway ends a move that has begun: it alone knows whether the other instance
has taken over.
"""

import asyncio

import structlog

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_worker.requests import LiveRequest, Move, SourceProgress
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.ticket_offers import ticket_for
from tidemill_worker.translate import failed_output, from_key, to_key
from tidemill_worker.worker import Worker

log = structlog.get_logger()

MOST_AT_ONCE = 4
"""Moves of a draining instance that are under way at a time."""
RETRY_S = 1.0
"""Until a draining instance offers a request again that nobody had room for, or that could not be suspended."""
PERIOD_S = 0.1
VERDICT_S = 5.0
"""Longer than KV is held for a fetch, the engine waits for a word about what became of it."""


def offer(worker: Worker, live: LiveRequest, why: str) -> bool:
    """Asks the request's gateway for another instance; False where that makes no sense now."""
    if live.stage == "prefill" or live.move is not None or live.session.closed:
        return False
    worker.num_moves += 1
    live.move = Move(worker.num_moves, worker.clock())
    live.session.push_output(worker_pb2.Output(key=from_key(live.key), move_due=True), live.domain)
    worker.counts.moved("offered")
    log.info("offered to other instances", request_id=live.key.request_id, why=why)
    return True


def wanted(worker: Worker, report: messages.MoveWanted) -> None:
    """A domain runs out of blocks."""
    live = worker.table.get(report.key)
    if live is not None and not offer(worker, live, "the domain has no room"):
        worker.domain_of(live).send(messages.MoveRefused(live.key))


def hand_over(worker: Worker, live: LiveRequest, order: worker_pb2.HandOver) -> None:
    """A gateway has found room: the request stands still, and a ticket or a refusal follows."""
    move = live.move
    if move is None or move.target is not None:
        live.session.push(worker_pb2.ConnectResponse(tickets=[worker_pb2.TicketOffer(key=order.key)]))
        return
    move.target = order.target.domain
    worker.domain_of(live).send(messages.Suspend(live.key, move.move_id, worker.settings.hold_s + VERDICT_S))


def suspended(worker: Worker, report: messages.Suspended) -> None:
    """The request stands still, and its gateway has all its outputs: the other instance may fetch it."""
    live = worker.table.get(report.key)
    if live is None or live.move is None or live.move.move_id != report.move_id or live.move.target is None:
        return
    computed = report.state.computed_tokens
    live.progress = SourceProgress(
        total_tokens=computed,
        computed_tokens=computed,
        block_ids=report.block_ids,
        block_hashes=report.block_hashes,
        sequence_slot=report.sequence_slot,
        final=True,
        state=report.state,
    )
    ttl_s = max(0.0, min(worker.settings.hold_s, live.deadline_at - worker.clock()))
    live.held_until = worker.clock() + ttl_s
    offered = ticket_for(worker, live, live.move.target, ttl_s)
    live.session.push(worker_pb2.ConnectResponse(tickets=[offered]))


def refused(worker: Worker, report: messages.Stays) -> None:
    """The engine could not suspend the request: it waits, or computes its prompt."""
    live = worker.table.get(report.key)
    if live is None or live.move is None or live.move.move_id != report.move_id:
        return
    _over(worker, live, "not_now")
    live.session.push(worker_pb2.ConnectResponse(tickets=[worker_pb2.TicketOffer(key=from_key(live.key))]))


def stays(worker: Worker, session: GatewaySession, key: worker_pb2.RequestKey) -> None:
    """A gateway has found no room, or the other instance has not taken over."""
    live = worker.table.get(to_key(key))
    if live is None:
        # It may have ended, or was fetched although that is not known there: then the gateway needs another attempt.
        error = MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "the request is not here any more", field="stays")
        session.push_output(failed_output(to_key(key), error), 0)
    elif live.move is not None and live.session is session:
        stay(worker, live, "no_room" if live.move.target is None else "failed")


def stay(worker: Worker, live: LiveRequest, outcome: str) -> None:
    """The request goes on here; one that is being fetched just now does so when the fetch has ended incomplete."""
    assert live.move is not None, "only what was offered can stay"
    domain = worker.domain_of(live)
    if live.pulling:
        live.move.called_off = True
        live.changed.set()
        return
    worker.tickets.revoke(live.key)
    live.held_until = None
    domain.send(messages.MoveRefused(live.key) if live.move.target is None else messages.Resume(live.key))
    _over(worker, live, outcome)


def pulled(worker: Worker, live: LiveRequest, outcome: str) -> None:
    """A fetch has ended: "done", and the request has gone on elsewhere, or else it waits for its gateway's word."""
    assert live.move is not None, "a prompt's KV is fetched otherwise"
    live.pulling = False
    called_off = live.move.called_off
    if outcome == "done" and called_off:
        # The other instance has all it needs to go on, and may: here it must not.
        error = MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "its move was called off when it had been fetched")
        worker.fail(live, error)
    elif outcome == "done":
        worker.counts.moved("done")
        worker.release(live)
    elif called_off and worker.table.get(live.key) is live:
        stay(worker, live, "failed")


def _over(worker: Worker, live: LiveRequest, outcome: str) -> None:
    live.move, live.moved_at = None, worker.clock()
    worker.counts.moved(outcome)
    log.info("not moved", request_id=live.key.request_id, outcome=outcome)


async def move_away(worker: Worker) -> None:
    """Offers all that decodes here, a few at a time, until cancelled."""
    while True:
        offer_some(worker)
        await asyncio.sleep(PERIOD_S)


def offer_some(worker: Worker) -> None:
    """Offers as many as may be under way, those first that were not lately."""
    now = worker.clock()
    for live in worker.table:
        if live.move is not None and live.move.target is None and now - live.move.offered_at > RETRY_S:
            # A gateway of an earlier release does not answer.
            live.move, live.moved_at = None, now
    room = MOST_AT_ONCE - sum(live.move is not None for live in worker.table)
    idle = [
        live for live in worker.table if live.move is None and live.fetch is None and now - live.moved_at >= RETRY_S
    ]
    for live in sorted(idle, key=lambda live: live.moved_at):
        if room <= 0:
            break
        room -= offer(worker, live, "the instance drains")
