"""A block is announced in a kv_format exactly while ranks that split the heads in some way can read all of it there,
and with a snapshot while one such way has it in each shard."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_kvcache.kv_format import format_id
from tidemill_kvcache.runs import CacheEvent, DroppedSnapshots, RemovedRun, StoredRun
from tidemill_kvstore.index import Entry, Index
from tidemill_kvstore.record import RecordHeader

FORMATS = {
    "v1/b16/kv:paged:float32:2x4x8": [{"all"}, {"0-2", "2-4"}, {"0-1", "1-2", "2-3", "3-4"}],
    "v1/b16/kv:paged:bfloat16:2x4x8": [{"all"}, {"0-2", "2-4"}, {"0-1", "1-2", "2-3", "3-4"}],
    "v1/b16/kv:paged:float32:2x2x8": [{"all"}, {"0-1", "1-2"}],
    "of another release": [{"all"}],
}
SHARDS = ["all", "0-2", "2-4", "0-1", "1-2", "2-3", "3-4", "0-3"]
steps = st.lists(
    st.tuples(
        st.sampled_from(["comes", "comes with a snapshot", "goes"]),
        st.sampled_from(list(FORMATS)),
        st.sampled_from(SHARDS),
        st.integers(0, 2),
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=100, deadline=None)
def test_blocks_are_announced_where_they_can_be_read(steps: list[tuple[str, str, str, int]]) -> None:
    index, announced = Index(), dict[tuple[int, bytes], bool]()
    held: dict[tuple[str, str, bytes], Entry] = {}
    for kind, kv_format, shard, number in steps:
        key = (kv_format, shard, bytes([number]) * 16)
        if kind != "goes":
            has_snapshot = kind != "comes"
            header = RecordHeader(key[2], b"", kv_format, shard, 10, 0, has_snapshot=has_snapshot, num_tokens=16)
            held[key] = Entry(header, 1, 0)
            index.put(held[key])
        elif key in held:
            assert index.remove(held.pop(key))
        for event in index.take_events():
            follow(event, announced)
        readable = {
            (format_id(name), block_hash): any(all(shard.header.has_snapshot for shard in shards) for shards in found)
            for name, splits in FORMATS.items()
            for block_hash in (bytes([n]) * 16 for n in range(3))
            if (found := whole(held, name, splits, block_hash))
        }
        assert announced == readable
    for entry in held.values():
        index.remove(entry)
    assert len(index) == 0
    assert not any(index.shards(name) for name in FORMATS)


def whole(
    held: dict[tuple[str, str, bytes], Entry], kv_format: str, splits: list[set[str]], block_hash: bytes
) -> list[list[Entry]]:
    """The shards of each split that is there."""
    found = [[held.get((kv_format, part, block_hash)) for part in split] for split in splits]
    return [[shard for shard in shards if shard is not None] for shards in found if all(shards)]


def follow(event: CacheEvent, announced: dict[tuple[int, bytes], bool]) -> None:
    """Keeps what was told, by (format, block) whether with a snapshot; nothing is told twice."""
    if isinstance(event, StoredRun):
        for block_hash, has_snapshot in zip(event.hashes, event.has_snapshot, strict=True):
            told = (event.kv_format_id, block_hash)
            assert announced.get(told) is None or (has_snapshot and not announced[told]), "it is told once"
            announced[told] = has_snapshot
    elif isinstance(event, RemovedRun):
        for block_hash in event.hashes:
            del announced[event.kv_format_id, block_hash]
    elif isinstance(event, DroppedSnapshots):
        for block_hash in event.hashes:
            assert announced[event.kv_format_id, block_hash], "it has none"
            announced[event.kv_format_id, block_hash] = False
