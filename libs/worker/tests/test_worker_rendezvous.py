"""Blocks spread over kvstores, and a store that comes or goes moves only its own share."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tidemill_worker.rendezvous import choose, chunks, lookups, ranked, split

HASHES = [hashlib.blake2b(str(number).encode(), digest_size=16).digest() for number in range(2000)]
NAMES = st.lists(st.text("abc0-", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)


def first_of(block_hash: bytes, names: list[str], choices: int) -> set[str]:
    """The first stores of a block."""
    return {names[place] for place in ranked([block_hash], names)[:choices, 0]}


def asked_of(found: dict[str, list[int]], index: int) -> set[str]:
    """Stores that are asked for a block."""
    return {store for store, indices in found.items() if index in indices}


def test_stores_get_even_shares() -> None:
    shares = split(HASHES, ["kvstore-1", "kvstore-2", "kvstore-3", "kvstore-4"])
    assert sorted(index for indices in shares.values() for index in indices) == list(range(2000))
    assert all(400 < len(indices) < 600 for indices in shares.values())


@given(NAMES)
def test_the_choice_does_not_depend_on_the_order_of_stores(names: list[str]) -> None:
    for block_hash in HASHES[:20]:
        assert choose(block_hash, names) == choose(block_hash, names[::-1])


@given(NAMES.filter(lambda names: len(names) > 1))
def test_a_store_that_goes_moves_only_its_own_blocks(names: list[str]) -> None:
    gone, rest = names[0], names[1:]
    for block_hash in HASHES[:50]:
        before = choose(block_hash, names)
        if before != gone:
            assert choose(block_hash, rest) == before


def test_the_choice_is_the_same_in_every_process() -> None:
    chosen = [choose(block_hash, ["a", "b", "c"]) for block_hash in HASHES[:8]]
    assert "".join(chosen) == "aaacaccc"


@given(NAMES.filter(lambda names: len(names) > 1))
def test_a_block_of_a_store_that_joined_is_looked_for_where_it_was_before(names: list[str]) -> None:
    joined, before = names[0], names[1:]
    for block_hash in HASHES[:50]:
        assert choose(block_hash, before) in first_of(block_hash, names, 2)
        assert first_of(block_hash, names, 1) == {choose(block_hash, names)}
    assert joined in split(HASHES, names)


@given(NAMES, st.integers(1, 3))
def test_a_block_is_looked_for_in_its_first_stores(names: list[str], choices: int) -> None:
    found = lookups(HASHES[:20], names, choices)
    for index, block_hash in enumerate(HASHES[:20]):
        assert asked_of(found, index) == first_of(block_hash, names, choices)
    assert all(indices == sorted(indices) for indices in found.values())


@given(NAMES.filter(lambda names: len(names) > 2), st.data())
def test_a_block_is_found_wherever_stores_that_joined_have_left_it(names: list[str], data: st.DataObject) -> None:
    """Two that join at once can make its store the third choice; the placement names that one."""
    joined = data.draw(st.integers(1, len(names) - 1))
    before = names[joined:]
    found = lookups(HASHES[:50], names, 2, named=set(before), max_named_questions=50 * len(before))
    for index, block_hash in enumerate(HASHES[:50]):
        assert asked_of(found, index) >= {choose(block_hash, before)} | first_of(block_hash, names, 2)
    assert all(indices == sorted(set(indices)) for indices in found.values())


@given(NAMES, st.data())
def test_what_named_stores_are_asked_is_bounded_and_leading_blocks_come_first(
    names: list[str], data: st.DataObject
) -> None:
    named = data.draw(st.lists(st.sampled_from(names), unique=True))
    bound = data.draw(st.integers(0, 300))
    own, found = lookups(HASHES[:100], names, 1), lookups(HASHES[:100], names, 1, [*named, "gone"], bound)
    extra = {store: sorted({*found.get(store, ())} - {*own.get(store, ())}) for store in names}
    assert sum(map(len, extra.values())) <= bound
    leading = bound // len(named) if named else 0
    assert all(set(range(min(leading, 100))) <= set(found.get(store, ())) for store in named)
    assert all(at < leading and store in named for store, indices in extra.items() for at in indices)


@given(st.integers(0, 20), st.integers(1, 6))
def test_parts_cover_a_share_in_order(total: int, size: int) -> None:
    parts = chunks(range(total), size)
    assert [index for part in parts for index in part] == list(range(total))
    assert all(0 < len(part) <= size for part in parts)
