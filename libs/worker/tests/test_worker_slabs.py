"""What travels next, and whether two KV formats fit."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tidemill_engine.kv_groups import KVGroupSpec, kv_format
from tidemill_kvcache.kv_format import convertible, keeps_precision
from tidemill_worker.slabs import KVShape, next_slab

KV = KVGroupSpec(name="kv", kind="paged", layers=(0, 1), dtype="float32", num_heads=4, head_values=32)
WINDOW = KVGroupSpec(
    name="w", kind="window", layers=(2,), dtype="float32", num_heads=2, head_values=32, window_tokens=8
)
STATE = KVGroupSpec(name="s", kind="state", layers=(2,), dtype="float32", num_heads=2, head_values=16)


def as_type(spec: KVGroupSpec, dtype: str) -> KVGroupSpec:
    """The same group in another dtype."""
    return KVGroupSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"dtype": dtype})


def as_bf16(spec: KVGroupSpec) -> KVGroupSpec:
    """The same group in half the bytes."""
    return as_type(spec, "bfloat16")


@given(
    have=st.integers(0, 10),
    arrivals=st.lists(st.integers(0, 5), max_size=8),
    tail=st.integers(0, 5),
    max_blocks=st.integers(1, 4),
    with_sequence=st.booleans(),
)
def test_slabs_cover_each_block_once_and_the_last_carries_the_state(
    have: int, arrivals: list[int], tail: int, max_blocks: int, with_sequence: bool
) -> None:
    sent, complete, carried = have, 0, 0
    for final, arrived in [*((False, number) for number in arrivals), (True, tail + have)]:
        complete += arrived
        total = complete if final else None
        while (slab := next_slab(sent, complete, total, max_blocks, with_sequence)) is not None:
            assert slab.first_block == sent
            assert slab.num_blocks <= max_blocks
            sent += slab.num_blocks
            carried += slab.with_sequence_state
            assert slab.num_blocks or slab.with_sequence_state
            assert not carried or (final and sent == total)
            if slab.with_sequence_state:
                break
    assert sent == max(have, complete)
    assert carried == int(with_sequence and complete >= have)


def test_formats_fit_when_they_differ_in_the_dtype_of_paged_and_window_groups_only() -> None:
    groups = (KV, WINDOW, STATE)
    fp32 = kv_format(groups, 32)
    assert convertible(fp32, kv_format((as_bf16(KV), as_bf16(WINDOW), STATE), 32))
    assert not convertible(fp32, kv_format((KV, WINDOW, as_bf16(STATE)), 32))
    assert not convertible(fp32, kv_format(groups, 16))
    assert not convertible(fp32, kv_format((KV, STATE), 32))
    assert not convertible(fp32, "")
    assert not convertible(fp32, "nonsense")


def test_only_what_was_rounded_no_further_counts_as_ones_own() -> None:
    forms = [
        kv_format((as_type(KV, one), as_type(WINDOW, one), STATE), 32)
        for one in ("float8_e4m3fn", "bfloat16", "float32")
    ]
    for source, taker in itertools.product(range(3), range(3)):
        assert convertible(forms[source], forms[taker])
        assert keeps_precision(forms[source], forms[taker]) == (source >= taker)
    mixed = kv_format((KV, as_type(WINDOW, "bfloat16"), STATE), 32)
    assert not keeps_precision(mixed, forms[2])
    assert keeps_precision(forms[2], mixed)
    assert not keeps_precision(forms[2], kv_format((KV, STATE), 32))


def test_sizes_count_the_asked_heads_and_keep_the_state_in_its_own_type() -> None:
    shape = KVShape((KV, WINDOW, STATE), 32, "bfloat16")
    assert shape.num_heads == 4
    assert shape.block_bytes == 32 * 2 * 4 * 32 * 2
    half = shape.piece_bytes(1, (0, 2), with_sequence=True)
    assert half == 32 * 2 * 2 * 32 * 2 + 8 * 1 * 32 * 2 + 16 * 4
