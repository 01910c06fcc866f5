"""The one stream to one incarnation of a worker: submits, aborts and credits go out once a loop tick, outputs come in.

The stream is always read, whatever clients do; a slow client costs only its own request's credit. What comes is handled
where it is read, on the event loop: no task and no thread stands between the socket and a request.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable

import structlog
from grpc.aio import AioRpcError

from tidemill.mesh.v1.common_pb2 import InstanceRef, Target
from tidemill.mesh.v1.worker_pb2 import (
    ConnectRequest,
    ConnectResponse,
    Credit,
    HandOver,
    Hello,
    Output,
    RequestKey,
    RollCall,
    Submit,
    TicketOffer,
)
from tidemill.v1 import errors_pb2
from tidemill_gateway.flow.leg import Key, Leg, key_of
from tidemill_mesh.errors import MeshError, from_rpc_error
from tidemill_mesh.streams.client import ClientStream
from tidemill_mesh.tasks import end, wait_up_to

PINGS_PER_LIVENESS = 3
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

log = structlog.get_logger()


class WorkerLink:
    """Connects, and connects again, until closed; legs of a broken stream are lost at once."""

    def __init__(
        self,
        peer: InstanceRef,
        endpoint: str,
        gateway: Callable[[], InstanceRef],
        dial: Callable[[], Awaitable[ClientStream]],
        liveness_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.up = False
        self.refused = False
        """The worker says that this incarnation is no more."""
        self.legs: dict[Key, Leg] = {}
        self.progress_at: dict[int, float] = {}
        self.stale_outputs = 0
        self.forgotten = 0
        self._gateway = gateway
        self._dial = dial
        self._liveness_s = liveness_s
        self._clock = clock
        self._outbox = ConnectRequest()
        self._roll_call_due = False
        self._unsent = False
        """Whether the outbox holds anything."""
        self._flush_due = False
        self._stream: ClientStream | None = None
        self._loop = asyncio.get_running_loop()
        self._wanted = asyncio.Event()
        self._last_seen = 0.0

    # --- for the owners of legs --------------------------------------------------------------------------------------

    def open(self, leg: Leg, submit: Submit) -> None:
        """Sends a stage; it is lost at once when this incarnation is known to be gone."""
        if self.refused:
            leg.owner.on_lost(leg, self._lost("this incarnation is no more"))
            return
        self.legs[key_of(leg.key)] = leg
        self._outbox.submits.append(submit)
        self._flush()

    def close(self, leg: Leg, *, abort: bool) -> None:
        """Forgets a stage; what still arrives for it is dropped."""
        known = self.legs.pop(key_of(leg.key), None)
        if known is not None and abort:
            self._outbox.aborts.append(leg.key)
            self._flush()

    def credit(self, leg: Leg, tokens: int) -> None:
        """Lets a stage emit more tokens."""
        self._outbox.credits.append(Credit(key=leg.key, tokens=tokens))
        self._flush()

    def hand_over(self, leg: Leg, target: Target) -> None:
        """Says where a prefilled request goes on."""
        self._outbox.hand_overs.append(HandOver(key=leg.key, target=target))
        self._flush()

    def stay(self, leg: Leg) -> None:
        """Says that a stage goes on where it is."""
        self._outbox.stays.append(leg.key)
        self._flush()

    # --- the stream --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the stream until cancelled, or until the worker refuses this incarnation."""
        failures = 0
        try:
            while not self.refused:
                error = await self._session()
                was_up, self.up = self.up, False
                failures = 0 if was_up else failures + 1
                self.refused = error.code == errors_pb2.ERROR_CODE_STALE
                log.info("worker stream ended", worker=self.peer.instance, reason=str(error), legs=len(self.legs))
                self._drop_legs(error)
                await self._pause(failures)
        finally:
            self.up = False
            self._drop_legs(self._lost("the link is closed"))

    async def _session(self) -> MeshError:
        """One stream from hello to its end; why it ended."""
        self._last_seen = self._clock()
        try:
            stream = await self._dial()
        except AioRpcError as error:
            return self._lost(str(error.details()))
        ended = stream.ending()
        stream.on_message = self._take_message
        stream.on_writable = self._send_outbox
        hello = Hello(gateway=self._gateway(), expected_incarnation=self.peer.incarnation)
        stream.send(ConnectRequest(hello=hello).SerializeToString())
        self._stream = stream
        self._send_outbox()
        watch = asyncio.create_task(self._watch(stream), name=f"watch {self.peer.instance}")
        try:
            return self._reason(await ended, silent=watch.done())
        finally:
            self._stream = None
            await end(watch)
            stream.cancel()

    def _reason(self, error: AioRpcError | None, *, silent: bool) -> MeshError:
        if silent:
            return self._lost(f"silent for {self._liveness_s:g} s")
        if error is None:
            return self._lost("the worker ended the stream")
        failure = from_rpc_error(error)
        if failure.code == errors_pb2.ERROR_CODE_STALE:
            return failure
        return self._lost(f"stream broken: {failure.message}")

    def _take_message(self, data: bytes) -> None:
        response = ConnectResponse.FromString(data)
        self._last_seen = self._clock()
        if response.HasField("welcome"):
            self.up = True
        if response.HasField("step"):
            self.progress_at[response.step.domain] = self._last_seen
            self._take_outputs(response.step.outputs)
        for offer in response.tickets:
            self._take_ticket(offer)
        for key in response.missing:
            self._take_missing(key)

    def _take_outputs(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            leg = self.legs.get(key_of(output.key))
            if leg is None:
                self.stale_outputs += 1
                continue
            try:
                leg.owner.on_output(leg, output)
            except Exception:
                self._end_faulty(leg)

    def _take_ticket(self, offer: TicketOffer) -> None:
        leg = self.legs.get(key_of(offer.key))
        if leg is None:
            return
        try:
            leg.owner.on_ticket(leg, offer.ticket)
        except Exception:
            self._end_faulty(leg)

    def _take_missing(self, key: RequestKey) -> None:
        leg = self.legs.get(key_of(key))
        if leg is None or leg.prefilled:
            # Its last output has crossed the roll call.
            return
        self.forgotten += 1
        log.warning("a worker has lost a request", worker=self.peer.instance, request_id=key.request_id)
        try:
            leg.owner.on_forgotten(leg, self._lost("it has lost the request"))
        except Exception:
            self._end_faulty(leg)

    def _end_faulty(self, leg: Leg) -> None:
        """A fault in one request's handling ends that request, not the stream of all."""
        log.exception("a worker's message could not be handled", request_id=leg.key.request_id)
        leg.owner.on_fault(leg, MeshError(errors_pb2.ERROR_CODE_INTERNAL, "the gateway failed on an output"))

    def _send_outbox(self) -> None:
        """Sends what one loop tick has gathered, once the worker takes it."""
        self._flush_due = False
        if self._unsent and self._stream is not None and self._stream.writable:
            message, self._outbox, self._unsent = self._outbox, ConnectRequest(), False
            if self._roll_call_due:
                self._roll_call_due = False
                message.roll_call.CopyFrom(self._roll_call())
            self._stream.send(message.SerializeToString())

    async def _watch(self, stream: ClientStream) -> None:
        """Pings, ends the stream when nothing has come for liveness_s, and compares once in it what each side has."""
        step_s = self._liveness_s / PINGS_PER_LIVENESS
        pings = 0
        while True:
            await asyncio.sleep(step_s)
            if await self._is_silent(step_s):
                self._loop.call_soon(stream.cancel)
                return
            pings += 1
            self._outbox.ping = True
            if pings % PINGS_PER_LIVENESS == 0:
                self._roll_call_due = True
            self._flush()

    def _roll_call(self) -> RollCall:
        """Made when it is sent, so that it fits what has been sent: the worker compares it with what it has then."""
        legs = [leg for leg in self.legs.values() if not leg.prefilled or leg.may_resume]
        return RollCall(keys=[leg.key for leg in legs], emit_until=[leg.out_of_credit_at for leg in legs])

    async def _is_silent(self, step_s: float) -> bool:
        """Judges the peer only by time in which this process itself could read."""
        if self._clock() - self._last_seen <= self._liveness_s:
            return False
        before = self._clock()
        await asyncio.sleep(step_s / 2)
        stood_still = self._clock() - before > step_s
        if stood_still:
            self._last_seen = self._clock() - self._liveness_s
        return self._clock() - self._last_seen > self._liveness_s

    async def _pause(self, failures: int) -> None:
        """Back-off after the end of a stream; cut short when a stage wants to be sent."""
        self._wanted.clear()
        if self.refused:
            return
        delay_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * random.uniform(0.5, 1.5)
        await wait_up_to(self._wanted, delay_s)

    def _flush(self) -> None:
        self._unsent = True
        self._wanted.set()
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._send_outbox)

    def _drop_legs(self, error: MeshError) -> None:
        self._outbox, self._unsent = ConnectRequest(), False
        legs, self.legs = self.legs, {}
        for leg in legs.values():
            leg.owner.on_lost(leg, error)

    def _lost(self, reason: str) -> MeshError:
        return MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, f"worker {self.peer.instance}: {reason}")
