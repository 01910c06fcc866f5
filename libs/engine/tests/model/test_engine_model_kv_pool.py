"""Canonical bytes: what one pool gathers, any pool of the same model can take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.kv_pool import KVPool

PAGED = KVGroupSpec(name="kv", kind="paged", layers=(0, 2), dtype="float32", num_heads=4, head_values=6)
INDEX = KVGroupSpec(name="index", kind="paged", layers=(0,), dtype="float32", num_heads=1, head_values=4, sharded=False)
WINDOW = KVGroupSpec(
    name="window", kind="window", layers=(1,), dtype="float32", num_heads=2, head_values=4, window_tokens=3
)
STATE = KVGroupSpec(name="state", kind="state", layers=(3, 4), dtype="float32", num_heads=4, head_values=5)
GROUPS = (PAGED, INDEX, WINDOW, STATE)


def make_pool(dtype: str = "float32", heads: tuple[int, int] = (0, 4), fill: bool = False) -> KVPool:
    groups = tuple(g if g.kind == "state" else msgspec.structs.replace(g, dtype=dtype) for g in GROUPS)
    pool = KVPool(groups, block_size=2, num_blocks=6, num_slots=3, num_snapshots=4, head_range=heads)
    if fill:
        generator = torch.Generator().manual_seed(0)
        for slab in (*pool.slabs.values(), *pool.snapshots.values()):
            slab.copy_(torch.randn(slab.shape, generator=generator).bfloat16())
    return pool


def test_the_order_is_block_by_block_then_slot_then_snapshots() -> None:
    pool = make_pool(fill=True)
    data = pool.gather([4, 1], 1, 3, sequence_slot=2, snapshot_ids=[3]).view(np.float32)
    parts = []
    for block in (4, 1):
        parts += [pool.slabs["kv"][block, ..., 1:3, :], pool.slabs["index"][block]]
    for name, row in (("slabs", 2), ("snapshots", 3)):
        kept = getattr(pool, name)
        # The range [1, 3) of 4 heads is the half-open half of the window group's 2.
        parts += [kept["window"][row, ..., 0:1, :], kept["state"][row, :, 1:3]]
    expected = np.concatenate([part.flatten().numpy() for part in parts])
    assert np.array_equal(data, expected)


def test_each_block_is_followed_by_its_own_snapshot_when_asked() -> None:
    pool = make_pool(fill=True)
    data = pool.gather([4, 1], 0, 4, snapshot_ids=[-1, 2], per_block_snapshots=True)
    plain = pool.gather([4, 1], 0, 4, snapshot_ids=[2])
    assert np.array_equal(data, plain)
    swapped = pool.gather([1, 4], 0, 4, snapshot_ids=[2, -1], per_block_snapshots=True)
    block = pool.gather([1], 0, 4)
    snapshot = pool.gather([], 0, 4, snapshot_ids=[2])
    assert np.array_equal(swapped, np.concatenate([block, snapshot, pool.gather([4], 0, 4)]))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3)), max_size=4),
    st.sampled_from([((0, 4), (0, 2)), ((0, 4), (2, 4)), ((0, 4), (1, 2)), ((2, 4), (3, 4)), ((0, 2), (0, 2))]),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_a_part_of_the_heads_is_what_would_have_been_gathered_for_it(
    blocks: list[tuple[int, int]], cut: tuple[tuple[int, int], tuple[int, int]], dtype: str
) -> None:
    pool, (heads, part) = make_pool(dtype, fill=True), cut
    block_ids, snapshot_ids = [block for block, _ in blocks], [snapshot for _, snapshot in blocks]
    data = pool.gather(block_ids, *heads, snapshot_ids=snapshot_ids, per_block_snapshots=True)
    wanted = pool.gather(block_ids, *part, snapshot_ids=snapshot_ids, per_block_snapshots=True)
    has_snapshot = [snapshot >= 0 for snapshot in snapshot_ids]
    assert np.array_equal(pool.cut_heads(data, heads, part, dtype, has_snapshot), wanted)


def test_a_cut_of_other_sizes_or_heads_is_refused() -> None:
    pool = make_pool(fill=True)
    data = pool.gather([1, 2], 0, 4)
    for count, part in ((1, (0, 2)), (3, (0, 2)), (2, (2, 5))):
        with pytest.raises(ValueError, match=r"bytes are too|not a part"):
            pool.cut_heads(data, (0, 4), part, "float32", [False] * count)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    st.sampled_from([(0, 4), (0, 2), (2, 4)]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
)
def test_scatter_undoes_gather_between_dtypes_and_head_ranges(
    blocks: list[int], heads: tuple[int, int], source_dtype: str, target_dtype: str, with_slot: bool
) -> None:
    source, target = make_pool(source_dtype, fill=True), make_pool(target_dtype, heads)
    slot, places = (1 if with_slot else -1), list(range(len(blocks)))
    data = source.gather(blocks, *heads, sequence_slot=slot)
    assert data.nbytes == source.canonical_bytes(len(blocks), *heads, source_dtype, with_slot)
    target.scatter(data, places, *heads, source_dtype, sequence_slot=slot)
    # The filled values are bfloat16 numbers, so no conversion rounds them (state values pass unchanged anyway).
    again = target.gather(places, *heads, sequence_slot=slot)
    back = make_pool("float32", heads)
    back.scatter(again, places, *heads, target_dtype, sequence_slot=slot)
    expected = make_pool("float32", fill=True).gather(blocks, *heads, sequence_slot=slot)
    assert np.array_equal(back.gather(places, *heads, sequence_slot=slot), expected)


def test_float32_is_rounded_to_the_nearest_bfloat16() -> None:
    source, target = make_pool(), make_pool("bfloat16")
    values = torch.randn(source.slabs["kv"][0].shape)
    values.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 1 + 2**-9])
    source.slabs["kv"][0] = values
    target.scatter(source.gather([0], 0, 4), [5], 0, 4, "float32")
    assert torch.equal(target.slabs["kv"][5].view(torch.int16), values.bfloat16().view(torch.int16))


@pytest.mark.parametrize("extra", [-4, 4])
def test_bytes_of_a_wrong_size_are_refused_and_change_nothing(extra: int) -> None:
    pool = make_pool()
    size = pool.canonical_bytes(2, 0, 4, "float32", False)
    with pytest.raises(ValueError, match="do not fit"):
        pool.scatter(np.full(size + extra, 1, np.uint8), [0, 1], 0, 4, "float32")
    assert not any(slab.any() for slab in pool.slabs.values())


def test_heads_of_another_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heads \[0, 2\)"):
        make_pool(heads=(2, 4)).gather([0], 0, 2)


def test_a_slot_comes_back_from_its_snapshot() -> None:
    pool = make_pool(fill=True)
    before = pool.gather([], 0, 4, sequence_slot=1)
    pool.save_snapshot(1, 2)
    pool.reset_slot(1)
    assert not pool.gather([], 0, 4, sequence_slot=1).any()
    pool.restore_snapshot(1, 2)
    assert np.array_equal(pool.gather([], 0, 4, sequence_slot=1), before)


def test_a_runner_sizes_its_pool_from_bytes(tiny: Callable[..., Path], start_runner: Callable[..., Any]) -> None:
    driver = start_runner(tiny("llama"), num_blocks=0, kv_memory_bytes=100_000, block_size=4)
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    assert driver.runner.kv_bytes_per_token == bytes_per_token
    assert driver.runner.num_blocks == 100_000 // (4 * bytes_per_token)
