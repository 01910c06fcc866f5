"""The pure parts: head plans, slabs, tags, and who gets which message."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidemill_transfer.buffers import byte_view
from tidemill_transfer.checksum import checksum64
from tidemill_transfer.errors import TransferError
from tidemill_transfer.matching import Dropped, Kept, Mailbox
from tidemill_transfer.plan import plan_pieces
from tidemill_transfer.slabs import POLICIES, cut_slabs
from tidemill_transfer.tags import MAX_TAG, checked_tag, new_tag, new_tags


@dataclass
class Rank:
    rank: int
    head_start: int
    head_end: int


@dataclass
class Ranks:
    ranks: list[Rank]


@st.composite
def splits(draw: st.DrawFn, num_heads: int) -> Ranks:
    """A split of the heads over ranks, some of which may be replicas."""
    cuts = sorted(draw(st.sets(st.integers(1, num_heads - 1), max_size=8))) if num_heads > 1 else []
    bounds = [0, *cuts, num_heads]
    copies = draw(st.integers(1, 3))
    ranges = [(a, b) for a, b in itertools.pairwise(bounds) for _ in range(copies)]
    return Ranks([Rank(rank, a, b) for rank, (a, b) in enumerate(ranges)])


@given(st.data(), st.integers(1, 64))
def test_pieces_tile_each_destination_exactly_and_lie_within_their_source(data, num_heads):
    source, dest = data.draw(splits(num_heads)), data.draw(splits(num_heads))
    pieces = plan_pieces(source, dest)
    for target in dest.ranks:
        mine = sorted((p.head_start, p.head_end) for p in pieces if p.dest_rank == target.rank)
        assert [head for start, end in mine for head in range(start, end)] == list(
            range(target.head_start, target.head_end)
        )
    for piece in pieces:
        holder = source.ranks[piece.source_rank]
        assert holder.head_start <= piece.head_start < piece.head_end <= holder.head_end


def test_replicas_share_the_sending():
    source = Ranks([Rank(0, 0, 2), Rank(1, 0, 2)])
    dest = Ranks([Rank(0, 0, 1), Rank(1, 1, 2)])
    assert {piece.source_rank for piece in plan_pieces(source, dest)} == {0, 1}


def test_a_source_that_lacks_heads_is_refused():
    with pytest.raises(ValueError, match="head 2"):
        plan_pieces(Ranks([Rank(0, 0, 2)]), Ranks([Rank(0, 0, 4)]))


@given(st.integers(0, 100), st.integers(0, 5000), st.integers(1, 1 << 26), st.sampled_from(list(POLICIES.values())))
def test_slabs_cover_all_blocks_once_and_stay_within_their_size(first, num_blocks, block_bytes, policy):
    slabs = list(cut_slabs(first, num_blocks, block_bytes, policy))
    assert [block for start, count in slabs for block in range(start, start + count)] == list(
        range(first, first + num_blocks)
    )
    assert all(count == 1 or count * block_bytes <= policy.target_bytes for _, count in slabs)
    if slabs:
        assert max(count for _, count in slabs) - min(count for _, count in slabs) <= 1


def test_tags_are_fresh_and_ranges_do_not_overlap():
    first = new_tags(100)
    tags = [first + i for i in range(100)] + [new_tag() for _ in range(1000)]
    assert len(set(tags)) == 1100
    assert all(checked_tag(tag) == tag for tag in tags)
    for wrong in (-1, MAX_TAG + 1):
        with pytest.raises(TransferError, match="48 bits"):
            checked_tag(wrong)


def test_buffers_that_transports_would_mistake_are_refused():
    assert byte_view(np.ones((2, 3), np.float32)).nbytes == 24
    with pytest.raises(AssertionError, match="contiguous"):
        byte_view(np.ones((4, 4), np.uint8)[:, ::2])
    with pytest.raises(AssertionError, match="one byte"):
        byte_view(np.ones(0, np.uint8))


def test_the_checksum_is_the_published_xxh3():
    assert checksum64(b"") == 0x2D06800538D394C2
    assert checksum64(np.arange(100, dtype=np.uint8)) == checksum64(bytes(range(100)))


class MailboxMachine(RuleBasedStateMachine):
    """Each message goes to one waiter, or stays, or is dropped: never two of these, never to another key's waiter."""

    keys = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 5))

    def __init__(self) -> None:
        super().__init__()
        self.mailbox: Mailbox[tuple[tuple[str, int], int], tuple[str, int]] = Mailbox(
            max_unclaimed=4, max_unclaimed_bytes=30
        )
        self.waiting: set[tuple[str, int]] = set()
        self.kept: dict[tuple[str, int], int] = {}
        self.spent: set[tuple[str, int]] = set()
        self.serial = 0

    @rule(key=keys)
    def expect(self, key):
        if key in self.waiting:
            return
        got = self.mailbox.expect(key, key)
        if key in self.kept:
            assert got == (key, self.kept.pop(key))
            self.spent.add(key)
        else:
            assert got is None
            self.waiting.add(key)
            self.spent.discard(key)

    @rule(key=keys)
    def arrive(self, key):
        self.serial += 1
        taker = self.mailbox.arrive(key, (key, self.serial), 10, float(self.serial))
        if key in self.waiting:
            assert taker == key
            self.waiting.remove(key)
            self.spent.add(key)
        elif key in self.spent:
            assert isinstance(taker, Dropped)
        else:
            assert isinstance(taker, Kept)
            before = self.kept
            self.kept = {**before, key: self.serial}
            for gone, serial in taker.evicted:
                assert before.pop(gone) == serial
                if gone != key:
                    del self.kept[gone]

    @rule(key=keys)
    def give_up(self, key):
        self.mailbox.give_up(key)
        if key in self.waiting:
            self.waiting.remove(key)
            self.spent.add(key)

    @rule(key=keys)
    def withdraw(self, key):
        message, waiter = self.mailbox.withdraw(key)
        assert message == ((key, self.kept[key]) if key in self.kept else None)
        assert waiter == (key if key in self.waiting else None)
        if self.kept.pop(key, None) is None:
            self.spent.add(key)
        self.waiting.discard(key)

    @rule(peer=st.sampled_from(["a", "b"]))
    def drop_peer(self, peer):
        waiters, messages = self.mailbox.drop_peer(peer)
        assert set(waiters) == {key for key in self.waiting if key[0] == peer}
        assert set(messages) == {(key, serial) for key, serial in self.kept.items() if key[0] == peer}
        self.waiting = {key for key in self.waiting if key[0] != peer}
        self.kept = {key: serial for key, serial in self.kept.items() if key[0] != peer}
        self.spent = {key for key in self.spent if key[0] != peer}

    @invariant()
    def is_bounded(self):
        assert self.mailbox.num_unclaimed == len(self.kept) <= 3
        assert self.mailbox.unclaimed_bytes == 10 * len(self.kept)
        assert self.mailbox.num_waiting == len(self.waiting)


TestMailbox = MailboxMachine.TestCase
