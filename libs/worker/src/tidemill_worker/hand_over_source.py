"""P's side of a hand-over: sends blocks behind the compute of later ones.

A slab is announced twice: before its pieces are sent, so that D can receive them, and again with their checksums once
they are out. The KV is gathered into messages before it leaves, so the hold ends as soon as all pieces are out.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from tidemill.mesh.v1 import transfer_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.kv_format import convertible
from tidemill_mesh.errors import MeshError
from tidemill_transfer.agent import new_tag
from tidemill_transfer.plan import plan_pieces
from tidemill_worker import moves
from tidemill_worker.domain import Domain
from tidemill_worker.requests import LiveRequest
from tidemill_worker.slabs import KVShape, SlabRange, layout_of, next_slab, shape_of
from tidemill_worker.ticket_offers import to_domain_id
from tidemill_worker.transfers import NotArrived
from tidemill_worker.translate import from_state, to_key
from tidemill_worker.worker import Worker

log = structlog.get_logger()

UNDELIVERED_FIELD = "slab"
"""Field of the error of a Pull whose bytes the other side did not take."""


async def serve_pull(worker: Worker, request: transfer_pb2.PullRequest) -> AsyncIterator[transfer_pb2.PullResponse]:
    """The answer to Pull; however it ends, a prompt's hold ends with it, and a running request's move is told of it."""
    live = accept_pull(worker, request)
    live.pulling = True
    pull = SourcePull(worker, live, request)
    outcome = "failed"
    try:
        async for response in pull.responses():
            yield response
        outcome = "done"
    finally:
        await pull.cancel()
        if live.move is None:
            worker.release(live)
        else:
            moves.pulled(worker, live, outcome)
        worker.counts.hand_over("source", outcome)
        log.debug("hand-over left", request_id=live.key.request_id, outcome=outcome, slabs=pull.num_slabs)


def accept_pull(worker: Worker, request: transfer_pb2.PullRequest) -> LiveRequest:
    """The request whose KV may be fetched; spends the ticket, also when the layouts do not fit."""
    ticket, key = request.ticket, to_key(request.key)
    worker.tickets.redeem(ticket.secret, key, to_domain_id(ticket.prefill), to_domain_id(ticket.decode))
    live = worker.table.get(key)
    if live is None:
        raise MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "the request has ended here", field="key")
    domain = worker.domain_of(live)
    if to_domain_id(ticket.prefill) != worker.domain_id(domain):
        raise MeshError(errors_pb2.ERROR_CODE_STALE, "the ticket is of an earlier incarnation or epoch", field="ticket")
    own_format = domain.ready[0].kv_format
    if not convertible(own_format, request.layout.kv_format):
        raise MeshError(
            errors_pb2.ERROR_CODE_UNSUPPORTED,
            f"KV of format {own_format!r} cannot become {request.layout.kv_format!r}",
            field="layout.kv_format",
        )
    return live


@dataclass
class StartedSlab:
    """An announced slab whose pieces are on their way."""

    slab: transfer_pb2.Slab
    sends: "asyncio.Task[list[messages.TransferDone]]"
    has_full_time: bool
    """The longest time of a message, and not only what its request has left."""


class SourcePull:
    """One fetch of one request's KV."""

    def __init__(self, worker: Worker, live: LiveRequest, request: transfer_pb2.PullRequest) -> None:
        self.num_slabs = 0
        self._worker = worker
        self._live = live
        self._request = request
        self._domain: Domain = worker.domain_of(live)
        block_size = worker.settings.block_size
        self._layout = layout_of(self._domain.ready, block_size)
        self._shape: KVShape = shape_of(self._domain.ready[0], block_size)
        self._addresses = {rank.rank: rank.transfer_address for rank in request.layout.ranks}
        self._pieces = plan_pieces(self._layout, request.layout)
        self._max_blocks = max(1, worker.settings.slab_bytes // max(1, self._shape.block_bytes))
        self._deadline_at = worker.clock() + request.deadline_s
        self._sent_blocks = request.have_blocks
        self._last_started = False
        self._in_flight: deque[StartedSlab] = deque()

    async def responses(self) -> AsyncIterator[transfer_pb2.PullResponse]:
        """Layout, slabs as they become ready, then the state."""
        yield transfer_pb2.PullResponse(source_layout=self._layout)
        self._domain.send(messages.ExportState(self._live.key))
        while not self._complete():
            self._live.changed.clear()
            self._check()
            slab = self._start_next() or self._take_sent()
            if slab is not None:
                yield transfer_pb2.PullResponse(slab=slab)
            elif not self._complete():
                await self._wait()
        yield transfer_pb2.PullResponse(state=self._state())

    async def cancel(self) -> None:
        """Ends sends that are still under way."""
        for started in self._in_flight:
            started.sends.cancel()
        await asyncio.gather(*(started.sends for started in self._in_flight), return_exceptions=True)
        self._in_flight.clear()

    def _complete(self) -> bool:
        return self._last_started and not self._in_flight and self._live.progress.state is not None

    def _remaining_s(self) -> float:
        end = self._deadline_at if self._live.held_until is None else min(self._deadline_at, self._live.held_until)
        return end - self._worker.clock()

    def _check(self) -> None:
        """Raises what ended the request or its move, the deadline, or a prefix that D holds of something else."""
        if self._live.failure is not None:
            raise self._live.failure
        if self._live.move is not None and self._live.move.called_off:
            raise MeshError(errors_pb2.ERROR_CODE_STALE, "the request goes on where it was")
        if self._remaining_s() <= 0:
            raise MeshError(errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "the KV was not fetched in time")
        have, hashes = self._request.have_blocks, self._live.progress.block_hashes
        if have and len(hashes) >= have and hashes[have - 1] != self._request.have_hash:
            raise MeshError(
                errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "decode holds blocks of another prefix", field="have_hash"
            )

    def _start_next(self) -> transfer_pb2.Slab | None:
        """Announces the next slab and starts to send it, if one is ready and few are in flight."""
        progress = self._live.progress
        if self._last_started or len(self._in_flight) >= self._worker.settings.slabs_in_flight:
            return None
        total = len(progress.block_ids) if progress.final else None
        found = next_slab(
            self._sent_blocks, len(progress.block_ids), total, self._max_blocks, self._shape.has_sequence_state
        )
        self._sent_blocks += found.num_blocks if found else 0
        self._last_started = total is not None and self._sent_blocks >= total
        return self._start(found) if found else None

    def _start(self, found: SlabRange) -> transfer_pb2.Slab:
        pieces = [
            transfer_pb2.Piece(
                source_rank=source_rank,
                dest_rank=dest_rank,
                tag=new_tag(),
                size_bytes=self._shape.piece_bytes(
                    found.num_blocks, (head_start, head_end), with_sequence=found.with_sequence_state
                ),
                head_start=head_start,
                head_end=head_end,
            )
            for source_rank, dest_rank, head_start, head_end in self._pieces
        ]
        slab = transfer_pb2.Slab(
            first_block=found.first_block,
            num_blocks=found.num_blocks,
            with_sequence_state=found.with_sequence_state,
            pieces=pieces,
        )
        limit_s, left_s = self._worker.settings.transfer_timeout_s, self._remaining_s()
        deadline_s = max(0.01, min(limit_s, left_s))
        sends = asyncio.create_task(self._send(slab, deadline_s), name=f"slab of {self._live.key.request_id}")
        sends.add_done_callback(lambda _: self._live.changed.set())
        self._in_flight.append(StartedSlab(slab, sends, has_full_time=left_s >= limit_s))
        self.num_slabs += 1
        return slab

    async def _send(self, slab: transfer_pb2.Slab, deadline_s: float) -> list[messages.TransferDone]:
        progress = self._live.progress
        block_ids = progress.block_ids[slab.first_block : slab.first_block + slab.num_blocks]
        sequence_slot = progress.sequence_slot if slab.with_sequence_state else -1
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._worker.transfers.send_kv(
                        self._domain,
                        piece.source_rank,
                        messages.SendKV(
                            transfer_id=0,
                            block_ids=block_ids,
                            piece=messages.PieceSpec(
                                peer_address=self._addresses[piece.dest_rank],
                                tag=piece.tag,
                                head_start=piece.head_start,
                                head_end=piece.head_end,
                                size_bytes=piece.size_bytes,
                            ),
                            deadline_s=deadline_s,
                            sequence_slot=sequence_slot,
                        ),
                    )
                )
                for piece in slab.pieces
            ]
        return [task.result() for task in tasks]

    def _take_sent(self) -> transfer_pb2.Slab | None:
        """The oldest slab again, with its checksums, once all its pieces are out."""
        if not self._in_flight or not self._in_flight[0].sends.done():
            return None
        started = self._in_flight.popleft()
        try:
            sent = started.sends.result()
        except ExceptionGroup as group:
            error = group.exceptions[0]
            # Of a send that was cut short by its request's own end nothing can be told.
            undelivered = UNDELIVERED_FIELD if started.has_full_time and isinstance(error, NotArrived) else ""
            text = f"sending KV failed: {error}"
            raise MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, text, field=undelivered) from group
        started.slab.checksums.extend(done.checksum for done in sent)
        return started.slab

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(max(0.0, self._remaining_s())):
                await self._live.changed.wait()
        except TimeoutError:
            self._live.changed.set()

    def _state(self) -> worker_pb2.RequestState:
        state = self._live.progress.state
        assert state is not None, "complete means that the state was exported"
        ready = self._domain.ready[0]
        return from_state(
            self._live.key, state, ready.kv_format, self._shape.block_size, self._live.progress.block_hashes
        )
