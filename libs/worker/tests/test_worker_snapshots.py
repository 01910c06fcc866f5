"""Snapshots count as loaded only where every rank has got its part, whatever the ages of the stored shards."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.mesh.v1 import kvstore_pb2
from tidemill_engine import messages
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_kvcache.hashing import hash_blocks, split_hashes
from tidemill_kvcache.shards import shard_name
from tidemill_mesh.metrics import Metrics
from tidemill_worker import prefetch
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.l2_slots import L2Slots
from tidemill_worker.l3_source import L3Source
from tidemill_worker.l3_stores import Store, heads_of
from tidemill_worker.landing import Landing
from tidemill_worker.prefetch import Prefetcher
from tidemill_worker.slabs import KVShape
from tidemill_worker.source_plan import Offer, Rates

BLOCK = 16
PAGED = KVGroupSpec(name="kv", kind="paged", layers=(0,), dtype="float32", num_heads=2, head_values=2)
STATE = KVGroupSpec(
    name="state",
    kind="state",
    layers=(1,),
    dtype="float32",
    num_heads=2,
    head_values=2,
    snapshot_interval_tokens=2 * BLOCK,
)
GROUPS = (PAGED, STATE)
SUBMIT_TOKENS = list(range(2 * BLOCK + 1))
HASHES = hash_blocks(b"r" * 16, SUBMIT_TOKENS[: 2 * BLOCK], BLOCK)


class TwoRanks:
    """A worker of two ranks beside a store that has two blocks; each rank's shard of the second may have a snapshot."""

    def __init__(self, of_first: bool, of_second: bool) -> None:
        self.ready = [
            SimpleNamespace(
                rank=rank,
                head_start=rank,
                head_end=rank + 1,
                kv_format="f",
                kv_dtype="float32",
                transfer_address="here",
                kv_groups=list(GROUPS),
            )
            for rank in (0, 1)
        ]
        ready: list[Any] = self.ready
        self.snapshots = {
            shard_name(heads_of(rank), 2): [False, has] for rank, has in zip(ready, (of_first, of_second), strict=True)
        }
        self.domain: Any = SimpleNamespace(index=0, ready=self.ready)
        settings = SimpleNamespace(block_size=BLOCK, slabs_in_flight=4, l3_timeout_s=30.0, onboard_choice="always")
        self.worker: Any = SimpleNamespace(
            settings=settings,
            rates=Rates(),
            counts=WorkerCounts(Metrics("prefill", "p")),
            transfers=SimpleNamespace(recv_kv=self._recv_kv),
            table={},
        )
        stub: Any = SimpleNamespace(Get=self._get)
        stores: Any = None
        offer = Offer("s", [True, True], [False, True], 0.0, 1e9)
        self.source = L3Source(self.worker, self.domain, stores, Store("s", "", "there", stub), offer)

    async def _get(self, request: kvstore_pb2.GetRequest, **_: object) -> kvstore_pb2.GetResponse:
        headers = [
            kvstore_pb2.BlockHeader(block_hash=block_hash, has_snapshot=has_snapshot)
            for block_hash, has_snapshot in zip(
                split_hashes(request.block_hashes), self.snapshots[request.shard], strict=True
            )
        ]
        return kvstore_pb2.GetResponse(blocks=headers, size_bytes=1)

    async def _recv_kv(self, *args: Any) -> messages.TransferDone:
        return messages.TransferDone(0, 1, 1.0, good_blocks=len(args[2].block_ids))


@pytest.mark.parametrize(
    ("of_first", "of_second", "boundary"), [(True, True, 2), (True, False, 0), (False, True, 0), (False, False, 0)]
)
async def test_a_state_is_used_only_if_both_ranks_have_it(of_first: bool, of_second: bool, boundary: int) -> None:
    ranks = TwoRanks(of_first, of_second)
    wanted = messages.OnboardWanted(messages.RequestKey("r"), 0, b"", HASHES, [0, 1], [-1, 7], 30.0)
    landing = Landing(wanted, KVShape(GROUPS, BLOCK, "float32"))
    await ranks.source.fetch([0, 1], landing, 30.0)
    answer = landing.answer()
    assert (answer.num_blocks, answer.snapshot_boundary_blocks) == (boundary, boundary)


@pytest.mark.parametrize("of_second", [True, False])
async def test_a_prefetched_block_keeps_a_snapshot_slot_only_if_it_was_filled(
    of_second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an unfilled slot has is another block's state, intact by its own checksum."""
    ranks = TwoRanks(True, of_second)

    async def found(*_: Any) -> list[L3Source]:
        return [ranks.source]

    monkeypatch.setattr(prefetch, "find_in_l3", found)
    slots = L2Slots(4, 1)
    l2 = SimpleNamespace(slots=slots, enabled=True, publish=lambda: None)
    tiers: Any = SimpleNamespace(domain=ranks.domain, l2=l2, depth=lambda _: 0)
    stores: Any = None
    prefetcher = Prefetcher(ranks.worker, tiers, stores)
    submit: Any = SimpleNamespace(
        key=messages.RequestKey("r"), hash_salt=b"r" * 16, token_ids=SUBMIT_TOKENS, tenant="t", stores=()
    )
    ranks.worker.table[submit.key] = submit
    async with asyncio.timeout(300):
        await prefetcher._run(submit, 0.0)
    held = [slots.get(block_hash) for block_hash in HASHES]
    assert [block is not None and block.snapshot_slot >= 0 for block in held] == [False, of_second]
    assert all(held)
    assert len(slots._free_snapshots) == int(not of_second)
