"""Each part of a block is stored once, whatever the ranks hold, and found however other ranks split the heads."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from emulated_kvstore import bitmap
from emulated_rank import ready

from tidemill.mesh.v1 import kvstore_pb2
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.messages import OnboardWanted, RankReady, RecvKV, RequestKey, TransferDone
from tidemill_engine.settings import EngineSettings
from tidemill_kvcache.hashing import split_hashes
from tidemill_kvcache.shards import splits_of
from tidemill_mesh.metrics import Metrics
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.l3_lookup import look_up
from tidemill_worker.l3_source import find_in_l3
from tidemill_worker.l3_stores import Store, storing_ranks
from tidemill_worker.landing import Landing
from tidemill_worker.rendezvous import ranked
from tidemill_worker.slabs import KVShape
from tidemill_worker.source_plan import Rates

HASHES = [bytes([n]) * 16 for n in range(4)]
PAGED = KVGroupSpec(name="kv", kind="paged", layers=(0,), dtype="float32", num_heads=4, head_values=2)
SHAPE = KVShape((PAGED,), 16, "float32")


def ranks(*heads: tuple[int, int]) -> list[RankReady]:
    one = ready(EngineSettings(model_dir="."))
    return [
        msgspec.structs.replace(one, rank=rank, head_start=start, head_end=end)
        for rank, (start, end) in enumerate(heads)
    ]


class Shelf:
    """A store's Has over block numbers by shard, counting calls."""

    def __init__(self, **blocks: set[int]) -> None:
        self.blocks = {name.replace("from_", "").replace("_", "-"): numbers for name, numbers in blocks.items()}
        self.asked: list[str] = []

    async def Has(self, request: kvstore_pb2.HasRequest, **_: object) -> kvstore_pb2.HasResponse:
        self.asked.append(request.shard)
        held = [h[0] in self.blocks.get(request.shard, ()) for h in split_hashes(request.block_hashes)]
        return kvstore_pb2.HasResponse(present_bitmap=bitmap(held), shards=sorted(self.blocks))

    def store(self, name: str = "s") -> Store:
        """As a worker finds it."""
        stub: Any = self
        return Store(name, "", "there", stub)


def domain(*heads: tuple[int, int]) -> Any:
    return SimpleNamespace(index=0, ready=ranks(*heads))


def test_ranks_that_split_the_heads_store_their_own() -> None:
    assert [rank.rank for rank in storing_ranks(ranks((0, 2), (2, 4)), 4)] == [0, 1]


def test_of_ranks_that_hold_the_same_the_first_stores() -> None:
    assert [rank.rank for rank in storing_ranks(ranks((0, 1), (0, 1), (0, 1)), 1)] == [0]
    assert [rank.rank for rank in storing_ranks(ranks((0, 2), (0, 2), (2, 4), (2, 4)), 4)] == [0, 2]


def test_shards_make_a_split_only_if_they_are_all_heads() -> None:
    assert splits_of(["all", "0-2", "2-4", "0-1", "1-2", "3-4", "?"], 4) == [((0, 4),), ((0, 2), (2, 4))]
    assert splits_of(["0-3", "3-4"], 4) == []


async def test_a_store_is_asked_for_other_splits_only_if_it_has_some_and_blocks_are_missing() -> None:
    alone = domain((0, 4))
    for shelf, asked in (
        (Shelf(all={0, 1, 2, 3}, from_0_2={0}, from_2_4={0}), ["all"]),
        (Shelf(all={0}), ["all"]),
        (Shelf(all={0}, from_0_2={1}, from_2_4={1}), ["all", "0-2", "2-4"]),
    ):
        await look_up(shelf.store(), alone, SHAPE, HASHES, 30.0)
        assert shelf.asked == asked


@pytest.mark.parametrize("heads", [((0, 4),), ((0, 2), (2, 4)), ((0, 1), (1, 2), (2, 3), (3, 4))])
async def test_a_block_counts_as_there_with_all_shards_of_any_one_split(heads: tuple[tuple[int, int], ...]) -> None:
    # Block 2 lacks a half, block 3 is in no split whole though all its heads are there.
    shelf = Shelf(all={0}, from_0_2={1, 2, 3}, from_2_4={1}, from_0_1=set(), from_2_3={3}, from_3_4={3})
    worker: Any = SimpleNamespace(rates=Rates(), counts=WorkerCounts(Metrics("prefill", "p")))
    stores: Any = SimpleNamespace(usable=lambda: {"s": shelf.store()})
    landing = Landing(OnboardWanted(RequestKey("r"), 0, b"", HASHES, list(range(4)), [], 30.0), SHAPE)
    (source,) = await find_in_l3(worker, domain(*heads), stores, landing, 30.0)
    assert list(source.offer.has) == [True, True, False, False]
    assert worker.counts.totals == {"l3_blocks_asked": 4, "l3_blocks_found": 2}


@pytest.mark.parametrize(
    ("heads", "pieces"),
    [
        # Rank 0 needs both halves, each in whole.
        (((0, 4),), [("0-2", 0, (0, 2), None), ("2-4", 0, (2, 4), None)]),
        # Of a half each rank keeps one head.
        (
            ((0, 1), (1, 2), (2, 3), (3, 4)),
            [
                ("0-2", 0, (0, 2), (0, 1)),
                ("0-2", 1, (0, 2), (1, 2)),
                ("2-4", 2, (2, 4), (2, 3)),
                ("2-4", 3, (2, 4), (3, 4)),
            ],
        ),
    ],
)
async def test_each_rank_gets_the_shards_that_have_its_heads(
    heads: tuple[tuple[int, int], ...], pieces: list[tuple[str, int, tuple[int, int], tuple[int, int] | None]]
) -> None:
    shelf = Shelf(all={0}, from_0_2={1, 2}, from_2_4={1, 2})
    asked: dict[int, kvstore_pb2.GetRequest] = {}
    received = []

    async def get(request: kvstore_pb2.GetRequest, **_: object) -> kvstore_pb2.GetResponse:
        asked[request.tag] = request
        blocks = [kvstore_pb2.BlockHeader(block_hash=h) for h in split_hashes(request.block_hashes)]
        return kvstore_pb2.GetResponse(blocks=blocks, size_bytes=request.max_bytes)

    async def recv_kv(_: Any, rank: int, command: RecvKV) -> TransferDone:
        piece, shard = command.piece, asked[command.piece.tag].shard
        received.append((shard, rank, (piece.head_start, piece.head_end), command.keep_heads))
        # Of one shard the second block is damaged.
        return TransferDone(0, 1, 1.0, good_blocks=1 if shard == "2-4" else len(command.block_ids))

    shelf.Get = get  # type: ignore[attr-defined]
    worker: Any = SimpleNamespace(
        rates=Rates(),
        settings=SimpleNamespace(slabs_in_flight=4),
        counts=WorkerCounts(Metrics("prefill", "p")),
        transfers=SimpleNamespace(recv_kv=recv_kv),
    )
    stores: Any = SimpleNamespace(usable=lambda: {"s": shelf.store()})
    landing = Landing(OnboardWanted(RequestKey("r"), 0, b"", HASHES, list(range(4)), [], 30.0), SHAPE)
    (source,) = await find_in_l3(worker, domain(*heads), stores, landing, 30.0)
    await source.fetch([1, 2], landing, 30.0)
    assert sorted(received) == pieces
    assert [landing.has_landed([index]) for index in range(4)] == [False, True, False, False]


@pytest.mark.parametrize("is_named", [True, False])
async def test_blocks_in_a_store_that_others_have_overtaken_are_found_if_it_is_named(is_named: bool) -> None:
    """Of three stores two are looked in for each block; the placement knows that the third has some."""
    names = ("a", "b", "c")
    last = {index: names[place] for index, place in enumerate(ranked(HASHES, names)[-1])}
    shelves = {name: Shelf(all={at for at, store in last.items() if store == name}) for name in names}
    worker: Any = SimpleNamespace(rates=Rates(), counts=WorkerCounts(Metrics("prefill", "p")))
    stores: Any = SimpleNamespace(usable=lambda: {name: shelf.store(name) for name, shelf in shelves.items()})
    landing = Landing(OnboardWanted(RequestKey("r"), 0, b"", HASHES, list(range(4)), [], 30.0), SHAPE)
    # One that is gone by now is not missed.
    named = [*set(last.values()), "gone"] if is_named else []
    sources = await find_in_l3(worker, domain((0, 4)), stores, landing, 30.0, named)
    assert len(set(last.values())) > 1, "the blocks lie in several stores"
    found = {at for source in sources for at, has in enumerate(source.offer.has) if has}
    assert found == (set(range(4)) if is_named else set())
