"""P's side of a hand-over, step by step: what has been computed leaves before the rest is."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from ready_rank import RANK

from tidemill.mesh.v1 import common_pb2, membership_pb2, transfer_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_engine.sampling_params import RequestState
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import Metrics
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.hand_over_source import SourcePull
from tidemill_worker.requests import LiveRequest, SourceProgress
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.slabs import layout_of, shape_of
from tidemill_worker.tickets import TicketBook
from tidemill_worker.transfers import RankTransfers
from tidemill_worker.translate import from_key
from tidemill_worker.worker import Worker

KEY = messages.RequestKey("r", 0, 1)
BLOCK_SIZE = 16
SLAB_BLOCKS = 4
STATE = RequestState(
    prompt_tokens=160,
    committed_token_ids=[*range(160), 7],
    pending_token_id=7,
    computed_tokens=160,
    sampler_position=1,
    seed=5,
)


@dataclass
class Domain:
    """A domain whose rank sends when the test says so."""

    index: int = 0
    epoch: str = "e1"
    up: bool = True
    ready: list[messages.RankReady] = field(default_factory=lambda: [RANK])
    sent: list[Any] = field(default_factory=list)

    def send(self, *commands: Any) -> None:
        self.sent += commands

    def send_rank(self, _rank: int, *commands: Any) -> None:
        self.sent += commands


class Prefilling:
    """A prefill worker with one request of ten blocks, which a decode worker fetches."""

    def __init__(self) -> None:
        self.domain = Domain()
        block_bytes = shape_of(RANK, BLOCK_SIZE).block_bytes
        self.worker = Worker(
            settings=WorkerSettings(block_size=BLOCK_SIZE, slab_bytes=SLAB_BLOCKS * block_bytes, slabs_in_flight=2),
            role=membership_pb2.ROLE_PREFILL,
            instance="p-1",
            channels=None,  # type: ignore[arg-type]
            counts=WorkerCounts(Metrics("prefill", "p-1")),
            tickets=TicketBook(lambda: 100.0),
            transfers=RankTransfers(1e9, lambda *_: None),
            clock=lambda: 100.0,
            incarnation="i1",
            domains=[self.domain],  # type: ignore[list-item]
        )
        session = GatewaySession(common_pb2.InstanceRef(instance="g-1"), 1000)
        progress = SourceProgress(total_tokens=160)
        self.live = LiveRequest(KEY, session, 0, "prefill", deadline_at=1000.0, progress=progress)
        self.worker.table.add(self.live)
        request = transfer_pb2.PullRequest(key=from_key(KEY), layout=layout_of([RANK], BLOCK_SIZE), deadline_s=100.0)
        self.pull = SourcePull(self.worker, self.live, request)
        self.responses = self.pull.responses()

    async def next(self) -> transfer_pb2.PullResponse:
        async with asyncio.timeout(300):
            return await anext(self.responses)

    def computed(self, blocks: int, *, final: bool = False) -> None:
        """A chunk of so many blocks is done."""
        first = len(self.live.progress.block_ids)
        self.live.progress.take(
            messages.PrefillProgress(
                KEY,
                computed_tokens=(first + blocks) * BLOCK_SIZE,
                total_tokens=160,
                first_block=first,
                block_ids=[40 + i for i in range(first, first + blocks)],
                block_hashes=[bytes([i]) * 16 for i in range(first, first + blocks)],
                remaining_s=0.0,
                final=final,
            )
        )
        self.live.changed.set()

    def orders(self) -> list[messages.SendKV]:
        """What the rank was told to send since the last call."""
        found = [command for command in self.domain.sent if isinstance(command, messages.SendKV)]
        self.domain.sent.clear()
        return found

    async def ordered(self) -> list[messages.SendKV]:
        """The same, at least one piece."""
        async with asyncio.timeout(300):
            while not (found := self.orders()):
                await asyncio.sleep(0)
        return found

    def answer(self, command: messages.SendKV, failure: str = "") -> None:
        """The rank's answer to an order."""
        if failure:
            error = messages.EngineError("UNAVAILABLE", failure)
            self.worker.transfers.answered(messages.TransferFailed(command.transfer_id, error))
            return
        done = messages.TransferDone(command.transfer_id, command.piece.size_bytes, 0.001, 1000 + command.block_ids[0])
        self.worker.transfers.answered(done)


async def test_the_first_chunk_is_sent_whole_while_the_rest_is_not_computed() -> None:
    world = Prefilling()
    assert (await world.next()).source_layout == layout_of([RANK], BLOCK_SIZE)
    world.computed(4)
    announced = (await world.next()).slab
    assert (announced.first_block, announced.num_blocks, list(announced.checksums)) == (0, 4, [])
    # The next response is wanted at once, as by a stream that goes on.
    arriving = asyncio.ensure_future(world.next())
    [order] = await world.ordered()
    assert order.block_ids == [40, 41, 42, 43]
    assert not arriving.done()
    world.answer(order)
    sent = (await arriving).slab
    assert (sent.first_block, sent.num_blocks, list(sent.checksums)) == (0, 4, [1040])
    assert not world.live.progress.final, "all this while prefill computes"
    assert world.live.progress.computed_tokens == 64


async def test_chunks_leave_in_order_each_block_once_and_the_state_comes_last() -> None:
    world = Prefilling()
    await world.next()
    announced: list[tuple[int, int]] = []
    confirmed: list[tuple[int, int]] = []

    async def read() -> transfer_pb2.PullResponse:
        while not (response := await world.next()).HasField("state"):
            slab = response.slab
            (confirmed if slab.checksums else announced).append((slab.first_block, slab.num_blocks))
        return response

    reading = asyncio.ensure_future(read())
    for blocks, last in ((1, False), (5, False), (4, True)):
        world.computed(blocks, final=last)
        computed = len(world.live.progress.block_ids)
        while sum(count for _, count in confirmed) < computed:
            for order in world.orders():
                world.answer(order)
            await asyncio.sleep(0)
            assert not reading.done(), "the state is not exported yet"
    world.live.progress.state = STATE
    world.live.changed.set()
    assert (await reading).state.pending_token_id == 7
    assert announced == confirmed
    assert [block for first, count in confirmed for block in range(first, first + count)] == list(range(10))
    assert max(count for _, count in confirmed) == SLAB_BLOCKS


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_a_piece_that_cannot_be_sent_ends_the_pull_at_once_and_nothing_is_under_way(failing: int) -> None:
    world = Prefilling()
    await world.next()
    world.computed(10)

    async def read() -> None:
        while True:
            await world.next()

    reading = asyncio.ensure_future(read())
    answered = 0
    while answered <= failing:
        for order in await world.ordered():
            world.answer(order, "no memory could be registered" if answered == failing else "")
            answered += 1
    with pytest.raises(MeshError) as caught:
        await reading
    assert caught.value.code == errors_pb2.ERROR_CODE_WORKER_LOST
    assert "no memory could be registered" in caught.value.message
    await world.pull.cancel()
    assert len(world.worker.transfers) == 0
