"""A block list in messages: nothing is lost on the way, and no message is large."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1.common_pb2 import TIER_L1, DomainRef
from tidemill.mesh.v1.events_pb2 import KvEvent
from tidemill_kvcache import snapshot_parts
from tidemill_kvcache.events import stored_event
from tidemill_kvcache.hashing import HASH_BYTES, chain_root, hash_blocks
from tidemill_kvcache.mirror import BlockMirror

DOMAIN = DomainRef(instance="p-0", incarnation="i", epoch="e")
MOST = 16


def mirror_of(events: list[KvEvent]) -> BlockMirror:
    mirror = BlockMirror()
    for event in events:
        mirror.apply(event)
    return mirror


def content(mirror: BlockMirror) -> set[tuple[bytes, bytes, bool]]:
    """(parent, hash, has a snapshot) of all blocks."""
    found = set()
    for run in mirror.runs():
        parent = run.parent_block_hash
        for at in range(0, len(run.block_hashes), HASH_BYTES):
            bit = at // HASH_BYTES
            marked = bool(run.snapshot_bitmap) and bool(run.snapshot_bitmap[bit // 8] >> bit % 8 & 1)
            block_hash = run.block_hashes[at : at + HASH_BYTES]
            found.add((parent, block_hash, marked))
            parent = block_hash
    return found


@given(lists=st.lists(st.lists(st.booleans(), min_size=1, max_size=60), max_size=20))
def test_a_list_comes_back_whole_from_messages_of_bounded_size(lists: list[list[bool]]) -> None:
    mirror = mirror_of(
        [
            stored_event(
                b"", hash_blocks(chain_root(b"m", bytes([at])), range(len(flags)), 1), TIER_L1, has_snapshot=flags
            )
            for at, flags in enumerate(lists)
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_parts, "MAX_HASHES", MOST)
        parts = list(snapshot_parts.snapshot_parts(DOMAIN, 5, mirror.runs(), "r"))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {(part.domain.epoch, part.sequence, part.model_revision) for part in parts} == {("e", 5, "r")}
    sizes = [sum(len(run.block_hashes) for run in part.blocks) // HASH_BYTES for part in parts]
    assert max(sizes) <= MOST
    assert all(first + second > MOST for first, second in itertools.pairwise(sizes)), "none is small for nought"
    received = mirror_of([KvEvent(stored=run) for part in parts for run in part.blocks])
    assert content(received) == content(mirror)


def test_many_short_runs_fill_messages_as_a_long_one_does() -> None:
    """As of a worker that serves prompts of a block each."""
    count = 3 * snapshot_parts.MAX_HASHES
    packed = hash_blocks(chain_root(b"m", b""), range(count), 1)
    runs = [stored_event(b"", [block_hash], TIER_L1).stored for block_hash in packed]
    assert [len(part.blocks) for part in snapshot_parts.snapshot_parts(DOMAIN, 1, runs)] == [count // 3] * 3
