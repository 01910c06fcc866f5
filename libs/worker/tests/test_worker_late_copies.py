"""A rank that writes is waited for, and what was asked of one epoch's ranks never reaches the next."""

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ready_rank import RANK

from tidemill.mesh.v1 import membership_pb2, transfer_pb2
from tidemill_engine import messages
from tidemill_mesh.channels import Channels
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import Metrics
from tidemill_worker import onboard
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.domain_tiers import DomainTiers
from tidemill_worker.l3_stores import KvStores
from tidemill_worker.landing import Landing
from tidemill_worker.peer_serve import serve_blocks
from tidemill_worker.pins import DomainPins
from tidemill_worker.residents import Tenants
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.slabs import layout_of
from tidemill_worker.source_plan import Offer
from tidemill_worker.tickets import TicketBook
from tidemill_worker.tiers import Tiers
from tidemill_worker.transfers import RankTransferError, RankTransfers
from tidemill_worker.worker import Worker

COPY = messages.LoadHost(0, [1], [5], [-1], [-1], deadline_s=30.0)
FAILED = messages.EngineError("DEADLINE_EXCEEDED", "too late")

HASHES = [bytes([n]) * 16 for n in range(2)]


class Ranks:
    """A domain whose ranks answer when the test says so."""

    def __init__(self) -> None:
        self.index, self.up, self.epoch = 0, True, "e1"
        self.ready = [RANK]
        self.sent: list[Any] = []

    def send(self, *commands: Any) -> None:
        """To the leader."""
        if self.up:
            self.sent += commands

    def restart(self) -> None:
        """The ranks are replaced; what is sent from now on is the new ones'."""
        self.epoch, self.up = "e2", True
        self.sent.clear()

    def send_rank(self, _: int, *commands: Any) -> None:
        """To one rank."""
        self.send(*commands)


async def turns(count: int = 20) -> None:
    """Lets everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("answer", ["done", "failed"])
async def test_a_copy_that_is_cancelled_twice_ends_with_the_ranks_answer(answer: str) -> None:
    """A load's own timeout cancels, then the one around the onboarding does."""
    transfers, ranks = RankTransfers(1.0, lambda *_: None), Ranks()
    domain: Any = ranks
    copy = asyncio.create_task(transfers.load_host(domain, 0, COPY))
    await turns()
    for _ in range(3):
        copy.cancel()
        await turns()
        assert not copy.done(), "the rank writes still"
    transfer_id = ranks.sent[0].transfer_id
    report = (
        messages.TransferDone(transfer_id, 1, 1.0) if answer == "done" else messages.TransferFailed(transfer_id, FAILED)
    )
    transfers.answered(report)
    with pytest.raises(asyncio.CancelledError):
        await copy
    assert not len(transfers)


async def test_a_cancelled_copy_whose_ranks_are_gone_ends() -> None:
    transfers, ranks = RankTransfers(1.0, lambda *_: None), Ranks()
    domain: Any = ranks
    copy = asyncio.create_task(transfers.load_host(domain, 0, COPY))
    await turns()
    copy.cancel()
    await turns()
    ranks.up = False
    transfers.domain_down(0)
    with pytest.raises(asyncio.CancelledError):
        await copy
    with pytest.raises(RankTransferError):
        await transfers.load_host(domain, 0, COPY)


def make_worker(domain: Any) -> Worker:
    """A worker of one domain."""
    settings, counts = WorkerSettings(onboard_choice="always"), WorkerCounts(Metrics("prefill", "p"))
    return Worker(
        settings=settings,
        role=membership_pb2.ROLE_PREFILL,
        instance="p",
        channels=Channels(settings),
        counts=counts,
        tickets=TicketBook(time.monotonic),
        transfers=RankTransfers(1.0, counts.transferred),
        clock=time.monotonic,
        incarnation="i",
        domains=[domain],
    )


async def test_pins_of_an_epoch_are_given_back_to_that_epoch_only() -> None:
    """Each epoch counts its pins from one: the pin of the same number is another copy's."""
    ranks = Ranks()
    domain: Any = ranks
    pins = DomainPins(domain)

    async def hold() -> None:
        async with pins.hold(HASHES):
            pass

    held = asyncio.create_task(hold())
    await turns()
    assert [type(command) for command in ranks.sent] == [messages.PinBlocks]
    ranks.restart()
    held.cancel()
    await asyncio.wait([held])
    assert ranks.sent == []


async def test_an_onboarding_ends_with_the_epoch_whose_blocks_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, answers = Ranks(), asyncio.Event()
    domain: Any = ranks
    worker = make_worker(domain)
    instances: Any = SimpleNamespace(records={})

    class Store:
        """Answers when the domain has restarted."""

        offer = Offer("s", [True, True], [False, False], 0.0, 1e9)

        async def fetch(self, indices: Sequence[int], landing: Landing, deadline_s: float) -> None:
            ids = landing.block_ids(indices)
            piece = messages.PieceSpec("there", 1, 0, 1, 8)
            await worker.transfers.recv_kv(domain, 0, messages.RecvKV(0, ids, piece, 30.0, "float32"))

    async def found(*_: Any) -> list[Store]:
        await answers.wait()
        return [Store()]

    monkeypatch.setattr(onboard, "find_in_l3", found)
    tiers = Tiers(worker, instances, lambda *_: None, lambda _: None)
    tiers.domain_up(domain)
    tiers.wanted(domain, messages.OnboardWanted(messages.RequestKey("r"), 0, b"", HASHES, [5, 6], [], 60.0))
    await turns()
    assert tiers.holds()["onboards"] == 1
    ranks.up = False
    worker.transfers.domain_down(0)
    tiers.domain_down(domain)
    ranks.restart()
    tiers.domain_up(domain)
    answers.set()
    await turns(100)
    assert ranks.sent == []
    assert tiers.holds()["onboards"] == 0
    await tiers.close()


async def test_blocks_of_an_ended_epoch_are_not_sent_to_a_peer() -> None:
    """A taker that was slow to listen would get what the next epoch keeps under the same ids."""
    ranks = Ranks()
    domain: Any = ranks
    worker, stores = make_worker(domain), KvStores(SimpleNamespace(records={}), Channels(WorkerSettings()))
    held = DomainTiers(worker, domain, stores, Tenants(), lambda *_: None)
    held.residents.stored(messages.BlocksStored(b"", HASHES, [False, False]))
    layout = layout_of([RANK], worker.settings.block_size)
    request = transfer_pb2.FetchBlocksRequest(block_hashes=b"".join(HASHES), layout=layout, deadline_s=30.0)
    responses = serve_blocks(worker, [held], request)
    first = asyncio.ensure_future(anext(responses))
    await turns()
    held.pins.pinned(messages.BlocksPinned(ranks.sent[0].pin_id, [3, 4], [-1, -1]))
    assert (await first).num_blocks == 2
    ranks.restart()
    rest = asyncio.ensure_future(anext(responses))
    await turns()
    sent = list(ranks.sent)
    rest.cancel()
    with pytest.raises(MeshError):
        await rest
    assert sent == []
    await held.close()
