"""Events of a domain are numbered without holes and its block list can be dumped at any time."""

from tidemill.mesh.v1.common_pb2 import TIER_L1, TIER_L3, DomainRef
from tidemill_kvcache.events import (
    HISTORY_BATCHES,
    HISTORY_BYTES,
    EventSequencer,
    cleared_event,
    removed_event,
    stored_event,
)
from tidemill_kvcache.hashing import chain_root, hash_blocks, split_hashes
from tidemill_kvcache.mirror import BlockMirror

HASHES = hash_blocks(chain_root(b"m", b""), range(6), 1)
DOMAIN = DomainRef(instance="p-0", incarnation="i1", domain=0, epoch="e1")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sequences_rise_by_one_and_heartbeats_repeat_the_latest() -> None:
    clock = Clock()
    sequencer = EventSequencer(DOMAIN, "rev", clock)
    assert sequencer.batch([]) is None
    assert sequencer.heartbeat() is None
    first = sequencer.batch([stored_event(b"", HASHES[:2], TIER_L1)])
    second = sequencer.batch([removed_event(HASHES[1:2], TIER_L1), cleared_event()])
    assert first is not None
    assert second is not None
    assert (first.sequence, second.sequence, second.heartbeat) == (1, 2, False)
    clock.now = 1.0
    beat = sequencer.heartbeat()
    assert beat is not None
    assert (beat.sequence, beat.heartbeat, len(beat.events), beat.domain) == (2, True, 0, DOMAIN)
    assert sequencer.heartbeat() is None


def test_the_history_is_bounded_and_says_what_it_no_longer_has() -> None:
    sequencer = EventSequencer(DOMAIN, "rev", Clock())
    for _ in range(HISTORY_BATCHES + 10):
        sequencer.batch([stored_event(b"", HASHES[:1], TIER_L1)])
    assert sequencer.replay(DOMAIN, 9) is None
    kept = sequencer.replay(DOMAIN, 10)
    assert kept is not None
    assert [batch.sequence for batch in kept] == list(range(11, HISTORY_BATCHES + 11))
    large = stored_event(b"", [bytes(16)] * (HISTORY_BYTES // 16 // 3), TIER_L1)
    for _ in range(4):
        sequencer.batch([large])
    assert sequencer.replay(DOMAIN, sequencer.sequence - 3) is None
    assert len(sequencer.replay(DOMAIN, sequencer.sequence - 2) or []) == 2


def test_a_mirror_dumps_parents_before_children_in_each_tier() -> None:
    mirror = BlockMirror()
    mirror.apply(stored_event(b"", HASHES[:4], TIER_L1))
    mirror.apply(stored_event(HASHES[1], HASHES[4:], TIER_L1))
    mirror.apply(stored_event(b"", HASHES[:1], TIER_L3))
    mirror.apply(stored_event(b"", HASHES[:1], TIER_L1))
    mirror.apply(removed_event(HASHES[3:4], TIER_L1))
    runs = mirror.runs()
    assert len(mirror) == 6
    assert [(run.parent_block_hash, split_hashes(run.block_hashes), run.tier) for run in runs] == [
        (b"", HASHES[:3], TIER_L1),
        (HASHES[1], HASHES[4:], TIER_L1),
        (b"", HASHES[:1], TIER_L3),
    ]
    at_once, late = list(mirror.runs()), mirror.runs()
    mirror.apply(removed_event(HASHES[:1], TIER_L1))
    mirror.apply(stored_event(b"", HASHES[:2], TIER_L3, 7))
    assert list(late) == at_once, "what there was at the call"
    mirror.apply(stored_event(b"", HASHES[:1], TIER_L1))
    mirror.apply(removed_event(HASHES[1:2], TIER_L3, 7))
    mirror.apply(removed_event(HASHES[:1], TIER_L3))
    in_l3 = [run for run in mirror.runs() if run.tier == TIER_L3]
    assert [(split_hashes(run.block_hashes), run.kv_format_id) for run in in_l3] == [(HASHES[:1], 7)]
    mirror.apply(cleared_event())
    assert list(mirror.runs()) == []
