"""The one stream to one incarnation of a worker: submits, aborts and credits go out once a loop tick, outputs come in.

The stream is always read, whatever clients do; a slow client costs only its own request's credit.
"""

import asyncio
import random
from collections.abc import Callable, Iterable

import grpc
import structlog

from tidemill.mesh.v1.common_pb2 import InstanceRef, Target
from tidemill.mesh.v1.worker_pb2 import (
    ConnectRequest,
    ConnectResponse,
    Credit,
    HandOver,
    Hello,
    Output,
    Submit,
    TicketOffer,
)
from tidemill.mesh.v1.worker_pb2_grpc import WorkerServiceStub
from tidemill.v1 import errors_pb2
from tidemill_gateway.flow.leg import Key, Leg, key_of
from tidemill_mesh.errors import MeshError, from_rpc_error
from tidemill_mesh.tasks import wait_up_to

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

log = structlog.get_logger()


class WorkerLink:
    """Connects, and connects again, until closed; legs of a broken stream are lost at once."""

    def __init__(
        self,
        peer: InstanceRef,
        endpoint: str,
        gateway: Callable[[], InstanceRef],
        channel: grpc.aio.Channel,
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
        self._gateway = gateway
        self._channel = channel
        self._liveness_s = liveness_s
        self._clock = clock
        self._outbox = ConnectRequest()
        self._wake = asyncio.Event()
        self._wanted = asyncio.Event()
        self._last_seen = 0.0
        self._ping_due = 0.0

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
        call = WorkerServiceStub(self._channel).Connect()
        writer = asyncio.create_task(self._write(call), name=f"write to {self.peer.instance}")
        watch = asyncio.create_task(self._watch(call), name=f"watch {self.peer.instance}")
        try:
            await self._read(call)
            return self._lost("the worker ended the stream")
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if failure.code == errors_pb2.ERROR_CODE_STALE:
                return failure
            return self._lost(f"stream broken: {failure.message}")
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled():
                # The watch has cancelled the call, not somebody this task.
                return self._lost(f"silent for {self._liveness_s:g} s")
            raise
        finally:
            call.cancel()
            writer.cancel()
            watch.cancel()
            await asyncio.wait([writer, watch])

    async def _read(self, call: grpc.aio.StreamStreamCall[ConnectRequest, ConnectResponse]) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                return
            assert isinstance(response, ConnectResponse), "a stream gives messages or EOF"
            self._last_seen = self._clock()
            if response.HasField("welcome"):
                self.up = True
            if response.HasField("step"):
                self.progress_at[response.step.domain] = self._last_seen
                self._take_outputs(response.step.outputs)
            for offer in response.tickets:
                self._take_ticket(offer)

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

    def _end_faulty(self, leg: Leg) -> None:
        """A fault in one request's handling ends that request, not the stream of all."""
        log.exception("a worker's message could not be handled", request_id=leg.key.request_id)
        leg.owner.on_lost(leg, MeshError(errors_pb2.ERROR_CODE_INTERNAL, "the gateway failed on an output"))

    async def _write(self, call: grpc.aio.StreamStreamCall[ConnectRequest, ConnectResponse]) -> None:
        hello = Hello(gateway=self._gateway(), expected_incarnation=self.peer.incarnation)
        try:
            await call.write(ConnectRequest(hello=hello))
            while True:
                await self._wake.wait()
                self._wake.clear()
                message, self._outbox = self._outbox, ConnectRequest()
                await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader sees the same end, with its reason.
            return

    async def _watch(self, call: grpc.aio.StreamStreamCall[ConnectRequest, ConnectResponse]) -> None:
        """Pings, and ends the call when nothing has come for liveness_s."""
        step_s = self._liveness_s / 3
        while True:
            await asyncio.sleep(step_s)
            if await self._is_silent(step_s):
                call.cancel()
                return
            self._outbox.ping = True
            self._flush()

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
        await wait_up_to(self._wanted.wait(), delay_s)

    def _flush(self) -> None:
        self._wake.set()
        self._wanted.set()

    def _drop_legs(self, error: MeshError) -> None:
        self._outbox = ConnectRequest()
        self._wake.clear()
        legs, self.legs = self.legs, {}
        for leg in legs.values():
            leg.owner.on_lost(leg, error)

    def _lost(self, reason: str) -> MeshError:
        return MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, f"worker {self.peer.instance}: {reason}")
