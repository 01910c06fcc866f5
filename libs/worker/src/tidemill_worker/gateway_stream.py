"""Connect: one long-lived stream for each gateway, and what its messages do."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress

import structlog

from tidemill.mesh.v1 import common_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError
from tidemill_worker import moves
from tidemill_worker.domain import Domain
from tidemill_worker.roll_calls import take_roll_call
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.submits import take_submits
from tidemill_worker.ticket_offers import offer_ticket
from tidemill_worker.translate import failed_output, invalid, to_key
from tidemill_worker.worker import Worker

LOOK_AGAIN = 8
"""So many parts of liveness_s: one of them passes between the end of that time and the verdict of silence."""

log = structlog.get_logger()


async def serve_gateway(
    worker: Worker, requests: AsyncIterator[worker_pb2.ConnectRequest], submitted: Callable[[Domain], None]
) -> AsyncGenerator[worker_pb2.ConnectResponse, None]:
    """The stream of one gateway; its end, from either side, aborts the gateway's requests here."""
    first = await _next(worker, requests)
    if first is None:
        return
    session = GatewaySession(_checked_hello(worker, first).gateway, worker.settings.outbox_messages)
    worker.sessions.add(session)
    worker.counts.gateways(len(worker.sessions))
    log.info("gateway connected", gateway=session.gateway.instance)
    reader = asyncio.create_task(_read(worker, session, first, requests, submitted), name="gateway stream")
    try:
        yield worker_pb2.ConnectResponse(welcome=welcome(worker))
        async for message in session.messages():
            yield message
    finally:
        session.close()
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
        end_session(worker, session)


def welcome(worker: Worker) -> worker_pb2.Welcome:
    """Who answers, with which domains and model."""
    return worker_pb2.Welcome(
        instance=common_pb2.InstanceRef(instance=worker.instance, incarnation=worker.incarnation),
        domains=worker.domain_records(),
        model=worker.model,
        liveness_s=worker.settings.liveness_s,
    )


def end_session(worker: Worker, session: GatewaySession) -> None:
    """Aborts what the gateway still had here."""
    worker.sessions.discard(session)
    worker.counts.gateways(len(worker.sessions))
    live = worker.table.of_session(session)
    for request in live:
        worker.abort(request, "the gateway's stream has ended", tell=False)
    log.info("gateway gone", gateway=session.gateway.instance, aborted_requests=len(live))


async def _read(
    worker: Worker,
    session: GatewaySession,
    first: worker_pb2.ConnectRequest,
    requests: AsyncIterator[worker_pb2.ConnectRequest],
    submitted: Callable[[Domain], None],
) -> None:
    """Takes the gateway's messages until it ends, fails or falls silent."""
    message: worker_pb2.ConnectRequest | None = first
    failure: MeshError | None = None
    try:
        while message is not None and not session.closed:
            take_message(worker, session, message, submitted)
            message = await _next(worker, requests)
    except MeshError as error:
        failure = error
    except Exception as error:
        log.error("gateway stream failed unexpectedly", gateway=session.gateway.instance, exc_info=error)
        failure = MeshError(errors_pb2.ERROR_CODE_INTERNAL, "the worker failed to read the stream")
    session.close(failure)


def take_message(
    worker: Worker,
    session: GatewaySession,
    message: worker_pb2.ConnectRequest,
    submitted: Callable[[Domain], None],
) -> None:
    """Acts on one message."""
    if message.ping:
        session.push(worker_pb2.ConnectResponse(pong=True))
    for key in message.aborts:
        live = worker.table.get(to_key(key))
        if live is not None and live.session is session:
            worker.abort(live, "aborted by the gateway", tell=True)
    if message.submits:
        take_submits(worker, session, list(message.submits))
        for index in {submit.domain for submit in message.submits if 0 <= submit.domain < len(worker.domains)}:
            if worker.domains[index].up:
                submitted(worker.domains[index])
    for credit in message.credits:
        live = worker.table.get(to_key(credit.key))
        if live is not None and live.session is session and credit.tokens > 0:
            worker.domain_of(live).send(messages.AddCredit(live.key, credit.tokens))
    for hand_over in message.hand_overs:
        _take_hand_over(worker, session, hand_over)
    for key in message.stays:
        moves.stays(worker, session, key)
    if message.HasField("roll_call"):
        take_roll_call(worker, session, message.roll_call)


def _take_hand_over(worker: Worker, session: GatewaySession, hand_over: worker_pb2.HandOver) -> None:
    live = worker.table.get(to_key(hand_over.key))
    if live is not None and live.stage != "prefill":
        moves.hand_over(worker, live, hand_over)
        return
    try:
        offer = offer_ticket(worker, hand_over)
    except MeshError as error:
        session.push_output(failed_output(to_key(hand_over.key), error), hand_over.target.domain.domain)
    else:
        session.push(worker_pb2.ConnectResponse(tickets=[offer]))


def _checked_hello(worker: Worker, first: worker_pb2.ConnectRequest) -> worker_pb2.Hello:
    if not first.HasField("hello") or not first.hello.gateway.instance:
        raise invalid("the first message says who connects", "hello")
    expected = first.hello.expected_incarnation
    if expected and expected != worker.incarnation:
        raise MeshError(
            errors_pb2.ERROR_CODE_STALE, f"incarnation {expected} has ended", field="hello.expected_incarnation"
        )
    return first.hello


async def _next(worker: Worker, requests: AsyncIterator[worker_pb2.ConnectRequest]) -> worker_pb2.ConnectRequest | None:
    """The next message, None at the stream's end; DEADLINE_EXCEEDED when the gateway falls silent."""
    loop, liveness_s = asyncio.get_running_loop(), worker.settings.liveness_s
    try:
        async with asyncio.timeout(None) as limit:
            # What came while this process itself stood still is read before it judges.
            look = loop.call_later(liveness_s, lambda: limit.reschedule(loop.time() + liveness_s / LOOK_AGAIN))
            try:
                return await anext(requests, None)
            finally:
                look.cancel()
    except TimeoutError:
        raise MeshError(
            errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
            "the gateway has fallen silent",
            limit=f"{liveness_s:g} s",
        ) from None
