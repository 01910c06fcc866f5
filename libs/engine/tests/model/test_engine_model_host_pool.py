"""L2's slots: what is saved comes back bit for bit, with its snapshot, or not at all."""

from random import Random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tidemill_engine import host_pool
from tidemill_engine.host_pool import HostPool
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.kv_pool import KVPool

LATENT = KVGroupSpec(name="latent", kind="paged", layers=(0, 1), dtype="float32", num_heads=1, head_values=6)
INDEXER = KVGroupSpec(
    name="indexer", kind="paged", layers=(1,), dtype="float32", num_heads=1, head_values=4, sharded=False
)
STATE = KVGroupSpec(
    name="state",
    kind="state",
    layers=(2,),
    dtype="float32",
    num_heads=1,
    head_values=5,
    snapshot_interval_tokens=4,
)
GROUPS = (LATENT, INDEXER, STATE)
BLOCKS = 8


def make_pool(seed: int) -> KVPool:
    pool = KVPool(GROUPS, block_size=2, num_blocks=BLOCKS, num_slots=2, num_snapshots=4)
    generator = torch.Generator().manual_seed(seed)
    for slab in (*pool.slabs.values(), *pool.snapshots.values()):
        slab.copy_(torch.randn(slab.shape, generator=generator))
    return pool


def make_host(pool: KVPool, threads: int = 1) -> HostPool:
    return HostPool(pool, GROUPS, (0, 1), block_size=2, dtype="float32", memory_bytes=4096, threads=threads)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(BLOCKS)), st.permutations(range(4)), st.integers(1, BLOCKS))
def test_saved_blocks_of_every_group_come_back_wherever_they_are_put(
    ids: list[int], snapshots: list[int], count: int
) -> None:
    pool = make_pool(1)
    host = make_host(pool)
    with_snapshot = [snapshots[i] if i < 4 else -1 for i in range(count)]
    slots, snapshot_slots = list(range(count)), [i if i < 4 else -1 for i in range(count)]
    before = pool.gather(ids[:count], 0, 1, -1, with_snapshot, True)
    assert host.save(ids[:count], slots, with_snapshot, snapshot_slots) == before.nbytes
    for slab in (*pool.slabs.values(), *pool.snapshots.values()):
        slab.zero_()
    places, snapshot_places = list(reversed(ids[:count])), with_snapshot
    assert host.load(slots, places, snapshot_slots, snapshot_places) == (count, before.nbytes)
    assert np.array_equal(pool.gather(places, 0, 1, -1, snapshot_places, True), before)
    assert np.array_equal(host.read(slots, snapshot_slots), before)


@settings(max_examples=20, deadline=None)
@given(
    st.permutations(range(BLOCKS)),
    st.lists(st.integers(-1, 3), min_size=1, max_size=4).filter(lambda ids: len(set(ids)) == len(ids)),
    st.sampled_from([1, 2, 4]),
    st.randoms(),
)
def test_slots_filled_by_parts_of_the_heads_hold_what_a_whole_copy_would(
    ids: list[int], snapshot_ids: list[int], num_parts: int, random: Random
) -> None:
    groups = tuple(msgspec.structs.replace(g, num_heads=4 if g.sharded else 1) for g in GROUPS)
    groups += (msgspec.structs.replace(groups[0], name="few", num_heads=2),)
    pool = KVPool(groups, block_size=2, num_blocks=BLOCKS, num_slots=2, num_snapshots=4)
    generator = torch.Generator().manual_seed(1)
    for slab in (*pool.slabs.values(), *pool.snapshots.values()):
        slab.copy_(torch.randn(slab.shape, generator=generator))
    host = HostPool(pool, groups, (0, 4), block_size=2, dtype="float32", memory_bytes=1 << 14)
    blocks, slots = ids[: len(snapshot_ids)], list(range(len(snapshot_ids)))
    parts = [(start, start + 4 // num_parts) for start in range(0, 4, 4 // num_parts)]
    random.shuffle(parts)
    for part in parts:
        host.write(pool.gather(blocks, *part, -1, snapshot_ids, True), slots, snapshot_ids, part)
    assert np.array_equal(host.read(slots, snapshot_ids), pool.gather(blocks, 0, 4, -1, snapshot_ids, True))
    with pytest.raises(ValueError, match="not a part"):
        host.write(pool.gather(blocks, 0, 4, -1, snapshot_ids, True), slots, snapshot_ids, (1, 5))


def test_memory_is_shared_out_as_blocks_and_the_snapshots_that_they_need() -> None:
    host = make_host(make_pool(1))
    assert host.num_blocks == 2 * host.num_snapshots
    used = host.num_blocks * host.block_bytes + host.num_snapshots * host.snapshot_bytes
    assert 0 <= 4096 - used < 2 * host.block_bytes + host.snapshot_bytes


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("part", ["block", "snapshot"])
def test_a_flipped_byte_in_a_slot_ends_the_load_before_it(
    part: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "_PIECE_BYTES", 1)
    pool = make_pool(1)
    host = make_host(pool, threads)
    host.save([0, 1, 2], [0, 1, 2], [-1, 3, -1], [-1, 0, -1])
    damaged = host._blocks[1] if part == "block" else host._snapshots[0]
    damaged[3] ^= 1
    with capture_logs() as logged:
        good, _ = host.load([0, 1, 2], [5, 6, 7], [-1, 0, -1], [-1, 2, -1])
    assert good == 1
    assert [(line["event"], line["slot"]) for line in logged] == [("host_block_damaged", 1)]
    with pytest.raises(ValueError, match="damaged"):
        host.read([0, 1, 2], [-1, 0, -1])


def test_bytes_of_another_shape_are_refused() -> None:
    host = make_host(make_pool(1))
    with pytest.raises(ValueError, match="do not fit"):
        host.write(np.zeros(host.block_bytes + 1, np.uint8), [0], [-1])


def test_a_copy_whose_time_is_over_writes_no_further_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(1)
    host = make_host(pool)
    host.save([0, 1, 2], [0, 1, 2], [-1] * 3, [-1] * 3)
    monkeypatch.setattr(host_pool, "_CHUNK_BYTES", 1)
    before = pool.gather([5, 6, 7], 0, 1)
    parts = iter([True, False])

    def in_time() -> None:
        if not next(parts):
            raise TimeoutError

    with pytest.raises(TimeoutError):
        host.load([0, 1, 2], [5, 6, 7], [-1] * 3, [-1] * 3, in_time)
    after = pool.gather([5, 6, 7], 0, 1)
    assert np.array_equal(after[: host.block_bytes], pool.gather([0], 0, 1))
    assert np.array_equal(after[host.block_bytes :], before[host.block_bytes :])
