"""Blocks spread over kvstores, and a store that comes or goes moves only its own share."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tidemill_worker.rendezvous import choose, chunks, leading_of_chunks, leading_run, split

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


@given(NAMES, st.integers(0, 40), st.data())
def test_the_leading_run_ends_at_the_first_block_that_any_store_lacks(
    names: list[str], total: int, data: st.DataObject
) -> None:
    shares = split(HASHES[:total], names)
    found = {name: data.draw(st.integers(0, len(indices))) for name, indices in shares.items()}
    present = {index for name, indices in shares.items() for index in indices[: found[name]]}
    expected = next((index for index in range(total) if index not in present), total)
    assert leading_run(found, shares, total) == expected


def test_a_store_that_did_not_answer_has_nothing() -> None:
    assert leading_run({}, {"a": [0, 1]}, 2) == 0


@given(st.integers(0, 20), st.integers(1, 6), st.data())
def test_parts_cover_a_share_in_order_and_count_up_to_the_first_gap(total: int, size: int, data: st.DataObject) -> None:
    parts = chunks(range(total), size)
    assert [index for part in parts for index in part] == list(range(total))
    found = [data.draw(st.integers(0, len(part))) for part in parts]
    present = {index for part, count in zip(parts, found, strict=True) for index in part[:count]}
    assert leading_of_chunks(parts, found) == next((i for i in range(total) if i not in present), total)
