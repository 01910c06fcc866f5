"""Over a bus that drops, repeats, delays and reorders, to workers that restart as a whole or by rank, the index is at
every moment what some worker said last, and after quiet what the workers hold."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.mesh.v1.common_pb2 import TIER_L1, TIER_L2, TIER_L3, DomainRef, Tier
from tidemill.mesh.v1.events_pb2 import BlockStored, KvEvent, KvEventBatch
from tidemill_kvcache.domain_blocks import FormatHolder, SnapshotHolder
from tidemill_kvcache.domain_track import Holder, TrackState, identity_of
from tidemill_kvcache.events import (
    HEARTBEAT_S,
    EventSequencer,
    cleared_event,
    removed_event,
    snapshots_removed_event,
    stored_event,
)
from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.index import TIERS, BlockIndex, TierDepth
from tidemill_kvcache.mirror import BlockMirror
from tidemill_kvcache.tracker import LAST_RETRY_S, EventTracker

ROOT = chain_root(b"m", b"")
TRUNK = hash_blocks(ROOT, range(20), 1)
BRANCHES = [TRUNK[:8] + hash_blocks(TRUNK[7], range(100 * b, 100 * b + 12), 1) for b in (1, 2)]
PROMPTS = [TRUNK, *BRANCHES]
STORE: Holder = ("kv-0", 0)
HOLDERS: list[Holder] = [("p-0", 0), ("p-0", 1), ("d-0", 0), STORE]
FORMATS = (7, 1 << 63)
Block = tuple[int, bytes, int]
"""(tier, block hash, kv_format's number)"""
Held = tuple[frozenset[Block], frozenset[Block]]
"""Blocks, and those of them that have a snapshot."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rank:
    """A domain with its true blocks, by tier, and what they were after each batch of each identity."""

    holder: Holder
    clock: Clock
    incarnation: int = 1
    epoch: int = 0
    held: set[Block] = field(default_factory=set)
    snapshots: set[Block] = field(default_factory=set)
    """Those of the held blocks that have one."""
    past: dict[tuple[str, str, int], Held] = field(default_factory=dict)
    sequencer: EventSequencer = field(init=False)
    mirror: BlockMirror = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    @property
    def domain(self) -> DomainRef:
        return DomainRef(
            instance=self.holder[0], incarnation=f"i{self.incarnation}", domain=self.holder[1], epoch=f"e{self.epoch}"
        )

    def restart(self) -> None:
        self.epoch += 1
        self.held.clear()
        self.snapshots.clear()
        self.sequencer = EventSequencer(self.domain, "rev", self.clock)
        self.mirror = BlockMirror()
        self._remember()

    def rename(self) -> None:
        """The instance lost its lease: same blocks, another incarnation."""
        self.incarnation += 1
        self.sequencer.domain = self.domain
        self._remember()

    def change(self, number: int) -> KvEventBatch | None:
        """Stores, removes, offloads or clears, by a number."""
        prompt, depth = PROMPTS[number % 3], number // 3 % 20 + 1
        inside = [h for h in prompt if (TIER_L1, h, 0) in self.held]
        events: list[KvEvent] = []
        if number % 17 == 0:
            events.append(cleared_event())
            self.held.clear()
            self.snapshots.clear()
        elif number % 7 == 0:
            events += self._lose_snapshots(number)
        elif self.holder == STORE:
            events.append(self._change_store(prompt, depth, FORMATS[number % 2]))
        elif depth > len(inside):
            parent, hashes = inside[-1] if inside else b"", prompt[len(inside) : depth]
            events.append(self._stored(parent, hashes, TIER_L1, 0, number))
        elif number % 5 == 0:
            # Told again, with snapshots that came later.
            events.append(self._stored(b"", prompt[:depth], TIER_L1, 0, number))
        else:
            used = {h for p in PROMPTS if p is not prompt for h in p if (TIER_L1, h, 0) in self.held}
            gone = [h for h in inside[depth:][::-1] if h not in used]
            if gone:
                events.append(self._stored(prompt[prompt.index(gone[-1]) - 1], gone[::-1], TIER_L2, 0, number))
                events.append(removed_event(gone, TIER_L1))
                for kept in (self.held, self.snapshots):
                    kept.difference_update((TIER_L1, h, 0) for h in gone)
        for event in events:
            self.mirror.apply(event)
        batch = self.sequencer.batch(events)
        self._remember()
        return batch

    def _change_store(self, prompt: list[bytes], depth: int, kv_format_id: int) -> KvEvent:
        """Takes a few blocks in a format, or loses them, wherever they lie in their chain."""
        first = depth // 2
        blocks = {(TIER_L3, h, kv_format_id) for h in prompt[first:depth] or prompt[:1]}
        hashes = [h for h in prompt if (TIER_L3, h, kv_format_id) in blocks]
        if blocks <= self.held:
            self.held -= blocks
            self.snapshots -= blocks
            return removed_event(hashes, TIER_L3, kv_format_id)
        return self._stored(prompt[first - 1] if first else b"", hashes, TIER_L3, kv_format_id, depth)

    def _stored(
        self, parent: bytes, hashes: list[bytes], tier: "Tier.ValueType", kv_format_id: int, number: int
    ) -> KvEvent:
        """Blocks come, each second or third of them, all or none with a snapshot."""
        step = (0, 1, 2, 3)[number % 4]
        has_snapshot = [step > 0 and at % step == 0 for at in range(len(hashes))]
        self.held.update((tier, h, kv_format_id) for h in hashes)
        self.snapshots.update((tier, h, kv_format_id) for h, has in zip(hashes, has_snapshot, strict=True) if has)
        return stored_event(parent, hashes, tier, kv_format_id, has_snapshot)

    def _lose_snapshots(self, number: int) -> list[KvEvent]:
        """Each second snapshot of a tier and format goes; the blocks stay."""
        in_tier = sorted(self.snapshots)[number % 2 :: 2]
        if not in_tier:
            return []
        tier, _, kv_format_id = in_tier[0]
        gone = [h for t, h, f in in_tier if (t, f) == (tier, kv_format_id)]
        self.snapshots.difference_update((tier, h, kv_format_id) for h in gone)
        return [snapshots_removed_event(gone, cast("Tier.ValueType", tier), kv_format_id)]

    def answer(self, known: tuple[DomainRef, int] | None) -> "Answer":
        batches = self.sequencer.replay(*known) if known else None
        blocks = list(self.mirror.runs()) if batches is None else []
        return Answer(self.domain, self.sequencer.sequence, blocks, batches)

    def _remember(self) -> None:
        self.past[f"i{self.incarnation}", f"e{self.epoch}", self.sequencer.sequence] = self.now

    @property
    def now(self) -> Held:
        return frozenset(self.held), frozenset(self.snapshots)


@dataclass
class Answer:
    domain: DomainRef
    sequence: int
    blocks: list[BlockStored]
    batches: list[KvEventBatch] | None


class Mesh:
    """Three ranks of two instances, a bus that delivers anything at any time, one fetch of each domain at a time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.index = BlockIndex(1 << 24, segment_slots=256)
        self.tracker = EventTracker(self.index, self.clock)
        self.ranks = {holder: Rank(holder, self.clock) for holder in HOLDERS}
        self.in_flight: list[KvEventBatch] = []
        self.fetches: dict[Holder, tuple[int, Answer]] = {}
        for rank in self.ranks.values():
            self.tracker.register(rank.domain)

    def act(self, kind: str, which: int, number: int) -> None:
        holder = HOLDERS[which]
        rank, position = self.ranks[holder], number % len(self.in_flight) if self.in_flight else 0
        if kind == "change":
            batch = rank.change(number)
            self.in_flight += [batch] if batch else []
        elif kind == "beat":
            beat = rank.sequencer.heartbeat()
            self.in_flight += [beat] if beat else []
        elif kind == "restart":
            rank.restart()
        elif kind == "rename":
            for each in self.ranks.values():
                if each.holder[0] == holder[0]:
                    each.rename()
        elif kind == "membership":
            self.tracker.register(rank.domain)
        elif kind in ("deliver", "repeat") and self.in_flight:
            self.tracker.receive(self.in_flight[position] if kind == "repeat" else self.in_flight.pop(position))
        elif kind == "in_order" and self.in_flight:
            self.tracker.receive(self.in_flight.pop(0))
        elif kind == "drop" and self.in_flight:
            self.in_flight.pop(position)
        elif kind == "begin" and holder in self.tracker.due():
            fetch_id = self.tracker.begin(holder)
            self.fetches[holder] = fetch_id, rank.answer(self.tracker.known(holder))
        elif kind == "finish" and holder in self.fetches:
            self.finish(holder, *self.fetches.pop(holder))
        elif kind == "fail" and holder in self.fetches:
            self.tracker.fail(holder, self.fetches.pop(holder)[0])
        elif kind == "wait":
            self.clock.now += number / 8

    def finish(self, holder: Holder, fetch_id: int, answer: Answer) -> None:
        if answer.batches is not None:
            self.tracker.replay(fetch_id, answer.domain, answer.batches)
            return
        track = self.tracker.get(holder)
        assert track is not None
        is_late = track.fetch_id != fetch_id or track.state is not TrackState.FETCHING
        is_late |= identity_of(answer.domain) in track.retired
        self.tracker.add_snapshot_blocks(holder, fetch_id, answer.blocks)
        self.tracker.complete(fetch_id, answer.domain, answer.sequence)
        # An answer ends the credit of all that was said before it was given.
        assert is_late or (track.identity == identity_of(answer.domain) and track.sequence >= answer.sequence)

    def indexed(self, holder: Holder) -> Held:
        holders: dict[int, Hashable] = {0: holder, **{number: FormatHolder(*holder, number) for number in FORMATS}}
        blocks = [(t, h, f) for f, each in holders.items() for t in TIERS for h in self.index.hashes_of(each, t)]
        snapshots = [
            (t, h, f)
            for f, each in holders.items()
            for t in TIERS
            for h in self.index.hashes_of(SnapshotHolder(each), t)
        ]
        return frozenset(blocks), frozenset(snapshots)

    def settle(self) -> None:
        """The bus is quiet again: what is in flight arrives, heartbeats come, fetches are answered."""
        for batch in self.in_flight:
            self.tracker.receive(batch)
        for holder, rank in self.ranks.items():
            self.tracker.register(rank.domain)
            if holder in self.fetches:
                self.tracker.fail(holder, self.fetches.pop(holder)[0])
        # Heartbeats tell of what was lost; a retry is due after its longest pause; one answer is enough.
        self.clock.now += 2 * HEARTBEAT_S
        for rank in self.ranks.values():
            beat = rank.sequencer.heartbeat()
            assert beat is not None
            self.tracker.receive(beat)
        self.clock.now += LAST_RETRY_S
        for holder in self.tracker.due():
            fetch_id = self.tracker.begin(holder)
            self.finish(holder, fetch_id, self.ranks[holder].answer(self.tracker.known(holder)))

    def check_credit(self, holder: Holder) -> None:
        """Whatever the state, the holder has in the index what it said at one moment of the identity that the tracker
        knows, that of the last batch applied; or nothing while its first list is not there."""
        track = self.tracker.get(holder)
        assert track is not None
        found, said = self.indexed(holder), self.ranks[holder].past.get((*track.identity, track.sequence))
        lacks_list = track.state is not TrackState.LIVE and track.sequence == 0 and not any(found)
        assert lacks_list or found == said, "a request would be credited with blocks that nobody announced"


kinds = ["change"] * 5 + ["in_order"] * 4 + ["deliver", "begin", "finish"] * 2
kinds += ["repeat", "drop", "restart", "rename", "membership", "fail", "wait", "beat"]
actions = st.lists(
    st.tuples(st.sampled_from(kinds), st.integers(0, len(HOLDERS) - 1), st.integers(0, 119)), min_size=25, max_size=80
)


@given(actions=actions)
@settings(max_examples=120, deadline=None)
def test_the_index_is_what_was_said_last_and_after_quiet_what_is_held(actions: list[tuple[str, int, int]]) -> None:
    mesh = Mesh()
    mesh.settle()
    for action in actions:
        mesh.act(*action)
        for holder in mesh.ranks:
            mesh.check_credit(holder)
    mesh.settle()
    mesh.index.check_invariants()
    for holder, rank in mesh.ranks.items():
        track = mesh.tracker.get(holder)
        assert track is not None
        assert (track.state, track.sequence) == (TrackState.LIVE, rank.sequencer.sequence)
        assert mesh.indexed(holder) == rank.now
        assert not track.buffer
        for prompt in PROMPTS:
            depth = mesh.index.match(prompt).get(holder, TierDepth())
            assert depth.l1 == sum((TIER_L1, h, 0) in rank.held for h in prompt)
    held = {FormatHolder(*STORE, number) for _, _, number in mesh.ranks[STORE].held}
    assert {h for h in mesh.index.holders if isinstance(h, FormatHolder)} == held
