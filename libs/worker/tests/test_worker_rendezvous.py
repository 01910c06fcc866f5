"""Blocks spread over kvstores, and a store that comes or goes moves only its own share."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tidemill_worker.rendezvous import choose, chunks, lookups, ranked, split

HASHES = [hashlib.blake2b(str(number).encode(), digest_size=16).digest() for number in range(2000)]
NAMES = st.lists(st.text("abc0-", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)


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
    assert "".join(chosen) == "abaababa"


@given(NAMES.filter(lambda names: len(names) > 1))
def test_a_block_of_a_store_that_joined_is_looked_for_where_it_was_before(names: list[str]) -> None:
    joined, before = names[0], names[1:]
    for block_hash in HASHES[:50]:
        assert choose(block_hash, before) in ranked(block_hash, names)[:2]
        assert ranked(block_hash, names)[0] == choose(block_hash, names)
    assert joined in {ranked(block_hash, names)[0] for block_hash in HASHES}


@given(NAMES, st.integers(1, 3))
def test_a_block_is_looked_for_in_its_first_stores(names: list[str], choices: int) -> None:
    found = lookups(HASHES[:20], names, choices)
    for index, block_hash in enumerate(HASHES[:20]):
        in_stores = {name for name, indices in found.items() if index in indices}
        assert in_stores == set(ranked(block_hash, names)[:choices])
    assert all(indices == sorted(indices) for indices in found.values())


@given(NAMES.filter(lambda names: len(names) > 2), st.data())
def test_a_block_is_found_wherever_stores_that_joined_have_left_it(names: list[str], data: st.DataObject) -> None:
    """Two that join at once can make its store the third choice; the placement names that one."""
    joined = data.draw(st.integers(1, len(names) - 1))
    before, holders = names[joined:], {block_hash: choose(block_hash, names[joined:]) for block_hash in HASHES[:50]}
    found = lookups(HASHES[:50], names, 2, named=set(before))
    for index, block_hash in enumerate(HASHES[:50]):
        assert index in found[holders[block_hash]]
        assert {store for store, indices in found.items() if index in indices} >= set(ranked(block_hash, names)[:2])
    assert all(indices == sorted(set(indices)) for indices in found.values())


@given(st.integers(0, 20), st.integers(1, 6))
def test_parts_cover_a_share_in_order(total: int, size: int) -> None:
    parts = chunks(range(total), size)
    assert [index for part in parts for index in part] == list(range(total))
    assert all(0 < len(part) <= size for part in parts)
