"""D's side of a hand-over: fetches the blocks that a request lacks into blocks that its engine has reserved.

A hand-over that fails ends D's leg with WORKER_LOST: only the gateway knows which tokens its client has seen, so only
it can start a fresh attempt from all of them. Recomputing here could disagree with the first token that P sent.
"""

import asyncio
import time

import grpc
import structlog

from tidemill.mesh.v1 import transfer_pb2, transfer_pb2_grpc, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_engine.sampling_params import RequestState
from tidemill_kvcache.kv_format import convertible, keeps_precision
from tidemill_mesh.errors import MeshError, from_rpc_error
from tidemill_transfer.checksum import agree
from tidemill_worker.domain import Domain
from tidemill_worker.hand_over_source import UNDELIVERED_FIELD
from tidemill_worker.requests import LiveRequest
from tidemill_worker.slabs import KVShape, layout_of, shape_of
from tidemill_worker.ticket_offers import to_domain_id
from tidemill_worker.transfers import NotArrived
from tidemill_worker.translate import from_key, to_engine_error, to_state
from tidemill_worker.worker import Worker

log = structlog.get_logger()

# These are the caller's to correct; a new attempt would meet them again.
LASTING = frozenset({errors_pb2.ERROR_CODE_UNSUPPORTED, errors_pb2.ERROR_CODE_INVALID_ARGUMENT})


async def run_fetch(worker: Worker, live: LiveRequest, domain: Domain, wanted: messages.KVWanted) -> None:
    """Fetches a request's KV and tells its engine how that ended, exactly once."""
    started = time.monotonic()
    answer: messages.KVReady | messages.KVFailed
    outcome = "done"
    try:
        answer = messages.KVReady(live.key, await _fetch(worker, live, domain, wanted))
        worker.counts.hand_over_took(time.monotonic() - started)
    except asyncio.CancelledError:
        answer = failed(live, MeshError(errors_pb2.ERROR_CODE_CANCELLED, "the request was ended"))
        outcome = "cancelled"
    except (MeshError, grpc.aio.AioRpcError, ExceptionGroup) as error:
        answer = failed(live, _reason(error))
        outcome = "failed"
        log.warning("hand-over failed", request_id=live.key.request_id, error=answer.error.message)
    live.fetch = None
    live.kv_answered = True
    domain.send(answer)
    worker.counts.hand_over("dest", outcome)
    if outcome == "done" and live.failure is None:
        output = worker_pb2.Output(key=from_key(live.key), hand_over_done=True)
        live.session.push_output(output, live.domain)


def failed(live: LiveRequest, error: MeshError) -> messages.KVFailed:
    """Tells the engine that the KV will not come."""
    if error.code not in LASTING:
        error = MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, f"the hand-over failed: {error.message}")
    return messages.KVFailed(live.key, recompute=False, error=to_engine_error(error))


def _reason(error: Exception) -> MeshError:
    if isinstance(error, ExceptionGroup):
        return _reason(error.exceptions[0])
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)
    if isinstance(error, MeshError):
        return error
    return MeshError(errors_pb2.ERROR_CODE_INTERNAL, f"{type(error).__name__}: {error}")


def _is_undelivered(error: Exception) -> bool:
    """Whether bytes did not arrive, as a rank of ours says, or the source of its own."""
    if isinstance(error, ExceptionGroup):
        return any(_is_undelivered(part) for part in error.exceptions)
    return isinstance(error, NotArrived) or _reason(error).field == UNDELIVERED_FIELD


async def _fetch(worker: Worker, live: LiveRequest, domain: Domain, wanted: messages.KVWanted) -> RequestState:
    assert live.source is not None, "a decode-stage request names its source"
    source = live.source.prefill
    pull = DestPull(worker, domain, wanted, source.domain.instance)
    deadline_s = live.deadline_at - worker.clock()
    request = transfer_pb2.PullRequest(
        ticket=live.source.ticket,
        key=from_key(live.key),
        have_blocks=wanted.have_blocks,
        have_hash=wanted.have_hash,
        layout=layout_of(domain.ready, worker.settings.block_size),
        deadline_s=deadline_s,
    )
    stub = transfer_pb2_grpc.TransferServiceStub(worker.channels.get(source.endpoint))
    call = stub.Pull(request, timeout=max(0.01, deadline_s))
    attempt = worker.silent.begins(worker.domain_id(domain), to_domain_id(source.domain))
    try:
        async with asyncio.TaskGroup() as group:
            async for response in call:
                pull.take(response, group)
        state = pull.finish()
        if pull.has_received:
            worker.silent.arrived(attempt)
        return state
    except (MeshError, grpc.aio.AioRpcError, ExceptionGroup) as error:
        if _is_undelivered(error):
            worker.did_not_arrive(attempt)
        raise
    finally:
        worker.silent.ends(attempt)
        call.cancel()


class DestPull:
    """One fetch of one request's KV."""

    def __init__(self, worker: Worker, domain: Domain, wanted: messages.KVWanted, source_instance: str) -> None:
        self._worker = worker
        self._source_instance = source_instance
        self._domain = domain
        self._wanted = wanted
        self._source: transfer_pb2.KVLayout | None = None
        self._own_format = domain.ready[0].kv_format
        self._shape: KVShape = shape_of(domain.ready[0], worker.settings.block_size)
        self._received: dict[tuple[int, bool], list[asyncio.Task[messages.TransferDone]]] = {}
        self._checksums: dict[tuple[int, bool], list[int]] = {}
        self._next_block = wanted.have_blocks
        self._state: worker_pb2.RequestState | None = None

    @property
    def has_received(self) -> bool:
        """Whether any bytes came: the domain may have had all of the KV."""
        return any(self._received.values())

    def take(self, response: transfer_pb2.PullResponse, group: asyncio.TaskGroup) -> None:
        """One message of P's; receives start in the group."""
        if response.HasField("error"):
            raise MeshError.from_detail(response.error)
        if response.HasField("source_layout"):
            self._take_layout(response.source_layout)
        if response.HasField("slab"):
            self._take_slab(response.slab, group)
        if response.HasField("state"):
            self._state = response.state

    def _take_layout(self, layout: transfer_pb2.KVLayout) -> None:
        if not convertible(layout.kv_format, self._own_format):
            raise MeshError(
                errors_pb2.ERROR_CODE_UNSUPPORTED,
                f"KV of format {layout.kv_format!r} cannot become {self._own_format!r}",
                field="source_layout.kv_format",
            )
        self._source = layout
        self._shape = KVShape(self._shape.groups, self._shape.block_size, layout.dtype)

    def _take_slab(self, slab: transfer_pb2.Slab, group: asyncio.TaskGroup) -> None:
        name = (slab.first_block, slab.with_sequence_state)
        if slab.checksums:
            self._checksums[name] = list(slab.checksums)
            return
        if self._source is None or slab.first_block != self._next_block:
            raise _broken("its slabs are out of order")
        self._next_block += slab.num_blocks
        first = slab.first_block - self._wanted.have_blocks
        block_ids = self._wanted.block_ids[first : first + slab.num_blocks]
        if len(block_ids) != slab.num_blocks:
            raise _broken("it sends blocks that nobody wants")
        self._received[name] = [group.create_task(self._receive(slab, piece, block_ids)) for piece in slab.pieces]

    async def _receive(
        self, slab: transfer_pb2.Slab, piece: transfer_pb2.Piece, block_ids: list[int]
    ) -> messages.TransferDone:
        assert self._source is not None, "slabs come after the layout"
        heads = (piece.head_start, piece.head_end)
        size_bytes = self._shape.piece_bytes(slab.num_blocks, heads, with_sequence=slab.with_sequence_state)
        if size_bytes != piece.size_bytes:
            raise _broken(f"a piece has {piece.size_bytes} bytes instead of {size_bytes}")
        addresses = {rank.rank: rank.transfer_address for rank in self._source.ranks}
        command = messages.RecvKV(
            transfer_id=0,
            block_ids=block_ids,
            piece=messages.PieceSpec(
                peer_address=addresses[piece.source_rank],
                tag=piece.tag,
                head_start=piece.head_start,
                head_end=piece.head_end,
                size_bytes=size_bytes,
            ),
            deadline_s=self._worker.settings.transfer_timeout_s,
            source_dtype=self._source.dtype,
            sequence_slot=self._wanted.sequence_slot if slab.with_sequence_state else -1,
        )
        return await self._worker.transfers.recv_kv(self._domain, piece.dest_rank, command)

    def finish(self) -> RequestState:
        """The state, after all pieces are in and equal what was sent."""
        if self._state is None or self._source is None:
            raise _broken("it ended without the request's layout and state")
        for name, tasks in self._received.items():
            if not agree(self._checksums.get(name, []), [task.result().checksum for task in tasks]):
                raise self._worker.arrived_damaged(self._source_instance)
        state = to_state(self._state)
        state.rounded_kv = state.rounded_kv or not keeps_precision(self._source.kv_format, self._own_format)
        if self._next_block * self._shape.block_size < state.computed_tokens:
            raise _broken("blocks are missing")
        if self._shape.has_sequence_state and not any(with_state for _, with_state in self._received):
            raise _broken("the sequence state is missing")
        return state


def _broken(what: str) -> MeshError:
    return MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, f"prefill's transfer is broken: {what}")
