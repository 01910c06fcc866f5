"""An onboarding's time and failures: what has arrived counts, what fails is planned anew, what is late is computed."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.v1 import errors_pb2
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.messages import LoadHost, OnboardReady, OnboardWanted, RequestKey, TransferDone
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import Metrics
from tidemill_worker import onboard
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.landing import Landing
from tidemill_worker.onboard import Onboarding
from tidemill_worker.source_plan import Offer, Rates
from tidemill_worker.transfers import RankTransfers

BLOCKS = 6
GROUP = KVGroupSpec(name="kv", kind="paged", layers=(0,), dtype="float32", num_heads=1, head_values=2)


class Source:
    """Gives its blocks in order, then does what `ending` says."""

    def __init__(
        self, name: str, blocks: range, *, gives: int = BLOCKS, ending: str = "done", rate: float = 1e9
    ) -> None:
        self.asked: list[list[int]] = []
        self._gives, self._ending = gives, ending
        has = [index in blocks for index in range(BLOCKS)]
        self._offer = Offer(name, has, [False] * BLOCKS, 0.0, rate)

    @property
    def offer(self) -> Offer:
        return self._offer

    async def fetch(self, indices: Sequence[int], landing: Landing, deadline_s: float) -> None:
        self.asked.append(list(indices))
        given = list(indices)[: self._gives]
        landing.landed(given, [-1] * len(given), "l3")
        if self._ending == "hangs":
            await asyncio.Event().wait()
        if self._ending == "fails":
            raise MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "gone")


class CopyingSource(Source):
    """One whose rank copies, and is not told to answer."""

    def __init__(self) -> None:
        super().__init__("a", range(BLOCKS))
        self.transfers = RankTransfers(1.0, lambda *_: None)
        self.domain: Any = SimpleNamespace(index=0, up=True, send_rank=lambda *_: None)

    async def fetch(self, indices: Sequence[int], landing: Landing, deadline_s: float) -> None:
        ids = landing.block_ids(indices)
        command = LoadHost(0, ids, ids, [-1] * len(ids), [-1] * len(ids), deadline_s=30.0)
        await self.transfers.load_host(self.domain, 0, command)


async def run(
    monkeypatch: pytest.MonkeyPatch, *sources: Source, tokens_per_s: float = 0.0, deadline_s: float = 30.0
) -> tuple[OnboardReady, dict[str, int], Rates]:
    """Onboards from these sources; the answer, the counters and the measured rates."""
    counts = WorkerCounts(Metrics("prefill", "p"))
    settings = SimpleNamespace(block_size=16, onboard_choice="predicted", l3_policy="write_through", peer_fetch=False)
    rates = Rates()
    worker: Any = SimpleNamespace(
        settings=settings, counts=counts, rates=rates, domain_ref=lambda _: SimpleNamespace(instance="p")
    )
    ready = SimpleNamespace(kv_groups=[GROUP], kv_dtype="float32")
    tiers: Any = SimpleNamespace(domain=SimpleNamespace(ready=[ready]), l2=SimpleNamespace(enabled=False))

    async def found(*_: Any) -> list[Source]:
        return list(sources)

    monkeypatch.setattr(onboard, "find_in_l3", found)
    hashes = [bytes([n]) * 16 for n in range(BLOCKS)]
    wanted = OnboardWanted(RequestKey("r"), 0, b"", hashes, list(range(BLOCKS)), [], deadline_s)
    stores: Any = None
    onboarding = Onboarding(worker, tiers, stores, wanted, peers=[], prefill_tokens_per_s=tokens_per_s)
    return await onboarding.run(), dict(counts.totals), rates


async def test_a_source_that_fails_is_left_out_and_another_gives_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Source("a", range(BLOCKS), gives=2, ending="fails", rate=1e12)
    second = Source("b", range(BLOCKS))
    answer, counts, _ = await run(monkeypatch, first, second)
    assert answer.num_blocks == BLOCKS
    assert (first.asked, second.asked) == ([[0, 1, 2, 3, 4, 5]], [[2, 3, 4, 5]])
    assert counts["source_failures_l3"] == 1


async def test_a_source_that_gives_less_than_it_offered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Source("a", range(BLOCKS), gives=3)
    answer, counts, _ = await run(monkeypatch, short)
    assert (answer.num_blocks, len(short.asked)) == (3, 1)
    assert counts["l3_blocks_missed"] == 3


async def test_what_arrived_before_a_load_took_too_long_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # Six blocks of 16 tokens compute in 0.2 s; after that waiting was a mistake.
    slow = Source("a", range(BLOCKS), gives=2, ending="hangs")
    answer, counts, rates = await run(monkeypatch, slow, tokens_per_s=480.0)
    assert answer.num_blocks == 2
    assert counts["l3_errors_deadline"] == 1
    assert rates.bytes_per_s("a", 1e9) < 1e6, "the next plan knows better"


async def test_the_engines_deadline_ends_a_load_that_nothing_else_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, _, _ = await run(monkeypatch, Source("a", range(BLOCKS), gives=1, ending="hangs"), deadline_s=0.1)
    assert answer.num_blocks == 1


async def test_the_engine_is_answered_only_once_no_rank_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load's own time ends first, then the onboarding's around it, and the copy goes on."""
    source = CopyingSource()
    onboarding = asyncio.create_task(run(monkeypatch, source, tokens_per_s=480.0, deadline_s=0.3))
    await asyncio.wait([onboarding], timeout=0.6)
    assert not onboarding.done()
    source.transfers.answered(TransferDone(1, 1, 1.0, good_blocks=BLOCKS))
    answer, counts, _ = await onboarding
    assert answer.num_blocks == 0
    assert counts["l3_errors_deadline"] >= 1


async def test_nothing_is_loaded_where_computing_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Source("a", range(BLOCKS), rate=100.0)
    answer, counts, _ = await run(monkeypatch, slow, tokens_per_s=1e6)
    assert (answer.num_blocks, slow.asked) == (0, [])
    assert counts["l3_blocks_missed"] == BLOCKS
