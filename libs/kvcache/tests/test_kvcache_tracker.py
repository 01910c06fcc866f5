"""The index follows its workers over a bad bus: each gap heals by one answer, nothing late is applied."""

from dataclasses import dataclass, field

import pytest

from tidemill.mesh.v1.common_pb2 import TIER_L1, DomainRef
from tidemill.mesh.v1.events_pb2 import BlockStored, KvEventBatch
from tidemill_kvcache.events import EventSequencer, cleared_event, removed_event, stored_event
from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.index import L1, BlockIndex
from tidemill_kvcache.mirror import BlockMirror
from tidemill_kvcache.tracker import EventTracker

HASHES = hash_blocks(chain_root(b"m", b""), range(40), 1)
HOLDER = ("p-0", 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Worker:
    """A domain: a growing and shrinking chain of blocks."""

    clock: Clock
    epoch: int = 1
    length: int = 0
    sequencer: EventSequencer = field(init=False)
    mirror: BlockMirror = field(init=False)

    def __post_init__(self) -> None:
        self.restart(self.epoch)

    @property
    def domain(self) -> DomainRef:
        return DomainRef(instance="p-0", incarnation="i1", domain=0, epoch=f"e{self.epoch}")

    def restart(self, epoch: int) -> None:
        self.epoch, self.length = epoch, 0
        self.sequencer = EventSequencer(self.domain, "rev", self.clock)
        self.mirror = BlockMirror()

    def resize(self, length: int) -> KvEventBatch | None:
        """Stores or removes blocks so that `length` remain; 0 clears."""
        old, self.length = self.length, length
        if length > old:
            parent = HASHES[old - 1] if old else b""
            event = stored_event(parent, HASHES[old:length], TIER_L1)
        elif length == 0:
            event = cleared_event()
        else:
            event = removed_event(HASHES[length:old][::-1], TIER_L1)
        if length == old:
            return None
        self.mirror.apply(event)
        return self.sequencer.batch([event])

    def batch(self, length: int) -> KvEventBatch:
        batch = self.resize(length)
        assert batch is not None
        return batch

    def dump(self) -> tuple[DomainRef, int, list[BlockStored]]:
        return self.domain, self.sequencer.sequence, list(self.mirror.runs())


@dataclass
class Setup:
    clock: Clock = field(default_factory=Clock)
    index: BlockIndex = field(default_factory=lambda: BlockIndex(1 << 20))
    tracker: EventTracker = field(init=False)
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self.tracker = EventTracker(self.index, self.clock)
        self.worker = Worker(self.clock)

    def live(self, length: int = 0) -> "Setup":
        """A registered domain whose first snapshot has been fetched."""
        self.worker.resize(length)
        self.tracker.register(self.worker.domain)
        self.fetch()
        return self

    def fetch(self) -> None:
        assert self.tracker.due() == [HOLDER]
        self.finish(self.tracker.begin(HOLDER), self.worker.dump())

    def finish(self, fetch_id: int, dump: tuple[DomainRef, int, list[BlockStored]]) -> None:
        self.tracker.add_snapshot_blocks(HOLDER, fetch_id, dump[2])
        self.tracker.complete(fetch_id, dump[0], dump[1])

    def held(self) -> int:
        held = self.index.hashes_of(HOLDER, L1)
        assert held == set(HASHES[: len(held)])
        return len(held)

    def resyncs(self) -> int:
        return self.tracker.counters["resyncs"]


def test_events_before_the_first_snapshot_wait_for_it() -> None:
    setup = Setup()
    setup.tracker.receive(setup.worker.batch(3))
    assert setup.tracker.counters["unknown_domain"] == 1
    setup.tracker.register(setup.worker.domain)
    fetch_id = setup.tracker.begin(HOLDER)
    dump = setup.worker.dump()
    setup.tracker.receive(setup.worker.batch(5))
    assert setup.held() == 0
    setup.finish(fetch_id, dump)
    assert setup.held() == 5
    assert setup.resyncs() == 1


def test_a_gap_is_healed_by_the_lacking_batches_alone() -> None:
    setup = Setup().live(2)
    setup.worker.batch(4)
    setup.tracker.receive(setup.worker.batch(6))
    assert setup.held() == 2, "the old content keeps its score until the answer is there"
    late = setup.worker.batch(7)
    fetch_id = setup.tracker.begin(HOLDER)
    known = setup.tracker.known(HOLDER)
    assert known is not None
    batches = setup.worker.sequencer.replay(*known)
    assert batches is not None
    assert [batch.sequence for batch in batches] == [2, 3, 4], "no block list is moved"
    setup.tracker.replay(fetch_id, setup.worker.domain, batches)
    assert setup.held() == 7
    setup.tracker.receive(late)
    for length in range(8, 30):
        setup.tracker.receive(setup.worker.batch(length))
    assert setup.tracker.due() == []
    assert (setup.tracker.counters["replays"], setup.resyncs()) == (1, 1)


def test_a_replay_with_a_hole_or_of_another_epoch_is_refused_and_a_snapshot_asked_for() -> None:
    for spoil in ("hole", "epoch"):
        setup = Setup().live(2)
        batches = [setup.worker.batch(length) for length in (4, 6, 8, 9)]
        setup.tracker.receive(batches.pop())
        fetch_id = setup.tracker.begin(HOLDER)
        domain = setup.worker.domain
        if spoil == "hole":
            del batches[1]
        else:
            domain.epoch = "e9"
        setup.tracker.replay(fetch_id, domain, batches)
        assert setup.held() == 2
        assert setup.tracker.known(HOLDER) is None
        setup.clock.now += 10
        setup.fetch()
        assert setup.held() == 9


@pytest.mark.parametrize(
    "bad", [BlockStored(block_hashes=b"seven b", tier=TIER_L1), BlockStored(block_hashes=HASHES[0], tier=9)]
)
def test_a_batch_that_cannot_be_read_is_not_asked_for_twice(bad: BlockStored) -> None:
    setup = Setup().live(2)
    poison = setup.worker.batch(3)
    poison.events[0].stored.CopyFrom(bad)
    with pytest.raises(ValueError, match=r"hashes|tier"):
        setup.tracker.receive(poison)
    setup.tracker.receive(setup.worker.batch(4))
    fetch_id = setup.tracker.begin(HOLDER)
    with pytest.raises(ValueError, match=r"hashes|tier"):
        setup.tracker.replay(fetch_id, setup.worker.domain, [poison])
    setup.tracker.fail(HOLDER, fetch_id)
    assert setup.tracker.known(HOLDER) is None
    setup.clock.now += 10
    setup.fetch()
    assert setup.held() == 4


def test_a_gap_beyond_what_the_worker_remembers_is_healed_by_exactly_one_snapshot() -> None:
    setup = Setup().live(2)
    setup.worker.batch(4)
    setup.tracker.receive(setup.worker.batch(6))
    assert setup.held() == 2, "the old content keeps its score until the snapshot is there"
    setup.tracker.receive(setup.worker.batch(7))
    setup.fetch()
    assert setup.held() == 7
    for length in range(8, 30):
        setup.tracker.receive(setup.worker.batch(length))
    assert setup.tracker.due() == []
    assert (setup.resyncs(), setup.tracker.counters["gaps"]) == (2, 1)
    track = setup.tracker.get(HOLDER)
    assert track is not None
    assert track.sequence == setup.worker.sequencer.sequence


def test_repeated_and_late_batches_of_the_same_epoch_are_ignored() -> None:
    setup = Setup().live()
    first, second = setup.worker.batch(4), setup.worker.batch(2)
    for batch in (first, second, first, second, first):
        setup.tracker.receive(batch)
    assert setup.held() == 2
    assert setup.tracker.due() == []
    assert setup.tracker.counters["duplicates"] == 3


def test_a_heartbeat_reveals_what_the_last_batches_brought() -> None:
    setup = Setup().live(1)
    setup.worker.batch(5)
    setup.clock.now = 2.0
    beat = setup.worker.sequencer.heartbeat()
    assert beat is not None
    setup.tracker.receive(beat)
    setup.fetch()
    assert setup.held() == 5
    setup.tracker.receive(beat)
    assert setup.tracker.due() == []


def test_an_older_sequence_that_stays_older_is_a_reason_to_ask() -> None:
    setup = Setup().live(1)
    setup.tracker.receive(setup.worker.batch(5))
    old_beat = KvEventBatch(domain=setup.worker.domain, sequence=1, heartbeat=True)
    setup.tracker.receive(old_beat)
    assert setup.tracker.due() == []
    setup.clock.now = 10.0
    setup.tracker.receive(old_beat)
    assert setup.tracker.due() == [HOLDER]


def test_a_late_message_of_an_older_epoch_is_never_applied() -> None:
    setup = Setup().live(1)
    late = setup.worker.batch(0)
    setup.worker.restart(2)
    setup.worker.batch(4)
    setup.tracker.register(setup.worker.domain)
    assert setup.held() == 0, "a cache that started anew is empty"
    setup.fetch()
    setup.tracker.receive(late)
    assert setup.held() == 4
    assert setup.tracker.counters["stale"] == 1


def test_an_epoch_heard_of_before_the_membership_is_settled_by_the_snapshot() -> None:
    setup = Setup().live(1)
    setup.worker.restart(2)
    setup.tracker.receive(setup.worker.batch(4))
    assert setup.held() == 1
    setup.fetch()
    assert setup.held() == 4
    setup.tracker.register(setup.worker.domain)
    assert setup.tracker.due() == []
    assert setup.held() == 4


def test_a_late_epoch_that_a_restarted_router_never_saw_costs_one_snapshot() -> None:
    setup = Setup()
    lates = [setup.worker.batch(3), setup.worker.batch(5)]
    setup.worker.restart(2)
    setup.live(2)
    setup.tracker.receive(lates[0])
    setup.fetch()
    setup.tracker.receive(lates[1])
    assert setup.tracker.due() == []
    assert setup.held() == 2


def test_a_failed_snapshot_is_asked_for_again_after_a_pause_that_grows() -> None:
    setup = Setup().live(1)
    setup.worker.batch(2)
    setup.tracker.receive(setup.worker.batch(3))
    pauses = []
    for _ in range(8):
        start = setup.clock.now
        while setup.tracker.due() == []:
            setup.clock.now += 0.05
        pauses.append(setup.clock.now - start)
        setup.tracker.fail(HOLDER, setup.tracker.begin(HOLDER))
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert max(pauses) < 5.2
    setup.clock.now += 10
    setup.fetch()
    assert setup.held() == 3


def test_parts_of_an_abandoned_fetch_are_ignored() -> None:
    setup = Setup().live(1)
    setup.worker.batch(2)
    setup.tracker.receive(setup.worker.batch(3))
    abandoned = setup.tracker.begin(HOLDER)
    old_dump = setup.worker.dump()
    setup.worker.restart(2)
    setup.worker.batch(7)
    setup.tracker.register(setup.worker.domain)
    fetch_id = setup.tracker.begin(HOLDER)
    setup.finish(abandoned, old_dump)
    assert setup.held() == 0
    setup.finish(fetch_id, setup.worker.dump())
    assert setup.held() == 7


def test_a_snapshot_of_an_older_epoch_is_refused() -> None:
    setup = Setup().live(1)
    dump = setup.worker.dump()
    setup.worker.restart(2)
    setup.tracker.register(setup.worker.domain)
    setup.finish(setup.tracker.begin(HOLDER), dump)
    assert setup.held() == 0
    assert setup.tracker.counters["stale_snapshots"] == 1


def test_a_forgotten_instance_leaves_nothing() -> None:
    setup = Setup().live(3)
    setup.tracker.forget("p-0")
    assert setup.index.num_blocks == 0
    setup.tracker.receive(setup.worker.batch(4))
    assert setup.index.num_blocks == 0
    assert setup.tracker.due() == []


def test_a_publisher_without_snapshots_loses_its_blocks_at_a_gap_and_goes_on() -> None:
    setup = Setup()
    setup.worker.batch(2)
    setup.tracker.register(setup.worker.domain, has_snapshot=False)
    assert setup.tracker.due() == []
    setup.tracker.receive(setup.worker.batch(4))
    setup.tracker.receive(setup.worker.batch(6))
    assert setup.index.hashes_of(HOLDER, L1) == set(HASHES[2:6])
    setup.worker.batch(8)
    setup.tracker.receive(setup.worker.batch(9))
    assert setup.index.hashes_of(HOLDER, L1) == {HASHES[8]}
    assert setup.tracker.due() == []
