"""The index equals sets of paths, whatever order blocks come and go in, and never wastes memory for long."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.index import L1, L2, L3, TIERS, BlockIndex, TierDepth

ROOT = chain_root(b"model", b"")
HOLDERS = ("a", "b", "c")
Path = tuple[int, ...]

_chains: dict[Path, list[bytes]] = {}


def chain(path: Path) -> list[bytes]:
    """Hashes of one-token blocks."""
    if path not in _chains:
        _chains[path] = hash_blocks(ROOT, np.array(path, np.uint32), 1)
    return _chains[path]


class Model:
    """What each (holder, tier) holds, as sets of paths."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], set[Path]] = {(h, t): set() for h in HOLDERS for t in TIERS}
        self.staged: dict[str, set[Path]] = {}

    def depth(self, holder: str, query: Path) -> TierDepth:
        at, depths = 0, []
        for tier in TIERS:
            start = at
            while at < len(query) and query[: at + 1] in self.held[holder, tier]:
                at += 1
            depths.append(at - start)
        return TierDepth(*depths)

    def leading(self, holders: list[str], tier: int, query: Path) -> int:
        """Leading blocks of which each lies with one of the holders."""
        return self.held_from(0, holders, tier, query)

    def held_from(self, first: int, holders: list[str], tier: int, query: Path) -> int:
        """Depth to which each block after the first ones lies with one of the holders."""
        at = first
        while at < len(query) and any(query[: at + 1] in self.held.get((h, tier), ()) for h in holders):
            at += 1
        return at

    def last_within(self, first: int, most: int, holders: list[str], tier: int, query: Path) -> int:
        """The deepest block of (first, most] that lies with one of the holders."""
        ends = range(first + 1, min(most, len(query)) + 1)
        return max((e for e in ends if any(query[:e] in self.held.get((h, tier), ()) for h in holders)), default=first)


paths = st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple)
tiers = st.sampled_from([L1, L1, L2, L3])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.sampled_from(HOLDERS), tiers, paths, st.integers(0, 24)),
        st.tuples(st.just("extended"), st.sampled_from(HOLDERS), tiers, paths, st.integers(1, 3)),
        st.tuples(st.just("removed"), st.sampled_from(HOLDERS), tiers, paths, st.integers(0, 1 << 24)),
        st.tuples(st.just("marked"), st.sampled_from(HOLDERS), tiers, paths, st.integers(0, 1 << 24)),
        st.tuples(st.just("evicted"), st.sampled_from(HOLDERS), tiers, paths, st.integers(1, 6)),
        st.tuples(st.just("dropped"), st.sampled_from(HOLDERS), tiers, paths, st.just(0)),
        st.tuples(st.just("staged"), st.sampled_from(HOLDERS), tiers, paths, st.integers(0, 1)),
    ),
    min_size=10,
    max_size=40,
)


def act(index: BlockIndex, model: Model, kind: str, holder: str, tier: int, path: Path, number: int) -> None:
    held, hashes = model.held[holder, tier], chain(path)
    if kind == "stored":
        start = min(number, len(path) - 1)
        index.stored(holder, hashes[start - 1] if start else b"", hashes[start:], tier)
        held.update(path[:end] for end in range(start + 1, len(path) + 1))
    elif kind == "extended":
        # As a decoding request grows: a block or two at a time behind what is there.
        depth = sum(path[:end] in held for end in range(1, len(path) + 1))
        for end in range(depth + 1, min(depth + number, len(path)) + 1):
            index.stored(holder, hashes[end - 2] if end > 1 else b"", hashes[end - 1 : end], tier)
            held.add(path[:end])
    elif kind == "removed":
        ends = [end for end in range(1, len(path) + 1) if number >> end & 1]
        random.Random(number).shuffle(ends)
        index.removed(holder, [hashes[end - 1] for end in ends], tier)
        held.difference_update(path[:end] for end in ends)
    elif kind == "marked":
        ends = [end for end in range(1, len(path) + 1) if number >> end & 1]
        random.Random(number).shuffle(ends)
        index.mark(holder, [hashes[end - 1] for end in ends], tier)
        held.update(path[:end] for end in ends if any(path[:end] in each for each in model.held.values()))
    elif kind == "evicted":
        depth = max((end for end in range(1, len(path) + 1) if path[:end] in held), default=0)
        ends = list(range(depth, max(0, depth - number), -1))
        index.removed(holder, b"".join(hashes[end - 1] for end in ends), tier)
        held.difference_update(path[:end] for end in ends)
    elif kind == "dropped":
        index.drop(holder)
        for each in TIERS:
            model.held[holder, each].clear()
    else:
        index.stage(holder, b"", hashes, tier)
        for each in TIERS:
            model.held[holder, each].clear()
        if number:
            index.publish(holder)
            held.update(path[:end] for end in range(1, len(path) + 1))
        else:
            index.discard_staged(holder)
            index.drop(holder)


def check_along(index: BlockIndex, model: Model, group: list[str], tier: int, asked: Path) -> None:
    found = index.find(chain(asked))
    along, bits, end = index.along(found), index.bits(group, tier), found[1]
    for first, most in ((0, 24), (1, 3), (len(asked) // 2, len(asked)), (7, 20), (9, 9)):
        expected = model.held_from(first, group, tier, asked) if first < end else first
        assert along.held_from(first, bits) == expected
        # Of what lies behind a block that nobody has ever told of nothing is known.
        assert along.last_within(first, most, bits) == model.last_within(first, min(most, end), group, tier, asked)


def check_holding(index: BlockIndex, model: Model, group: list[str], tier: int, asked: Path) -> None:
    found = index.find(chain(asked))
    known = [asked[:end] for end in range(1, found[1] + 1)]
    expected = [h for h in HOLDERS if h in group and any(path in model.held[h, tier] for path in known)]
    assert index.holding(found, index.bits(group, tier)) == index.bits(expected, tier)


@given(actions=actions, query=paths)
@settings(max_examples=150, deadline=None)
def test_the_index_equals_sets_of_paths_in_any_order(
    actions: list[tuple[str, str, int, Path, int]], query: Path
) -> None:
    index, model = BlockIndex(1 << 24, segment_slots=16), Model()
    for action in actions:
        act(index, model, *action)
    index.check_invariants()
    for (holder, tier), held in model.held.items():
        assert index.hashes_of(holder, tier) == {chain(path)[-1] for path in held}
    for asked in [query, *(action[3] for action in actions[-4:])]:
        found = index.match(b"".join(chain(asked)))
        for holder in HOLDERS:
            assert found.get(holder, TierDepth()) == model.depth(holder, asked)
        groups = [[], ["a"], ["a", "c"], ["b", "b", "nobody"], list(HOLDERS)]
        for tier in TIERS:
            for group in groups:
                assert index.leading(index.find(chain(asked)), group, tier) == model.leading(group, tier, asked)
                check_along(index, model, group, tier, asked)
                check_holding(index, model, group, tier, asked)
            assert set(index.holders_in(tier)) == {holder for holder in HOLDERS if model.held[holder, tier]}
    assert index.num_blocks == sum(map(len, model.held.values()))
    for holder in HOLDERS:
        index.drop(holder)
    index.check_invariants()
    assert index.num_blocks == 0


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=12, deadline=None)
def test_an_index_at_its_bound_forgets_but_never_invents(seed: int) -> None:
    rng = random.Random(seed)
    index, held = BlockIndex(40_000), {holder: set[bytes]() for holder in HOLDERS}
    trunks = [[rng.randbytes(16) for _ in range(40)] for _ in range(4)]
    prompts: list[list[bytes]] = [[] for _ in range(60)]
    for step in range(400):
        holder, at = rng.choice(HOLDERS), step % len(prompts)
        if rng.random() < 0.75:
            trunk = rng.choice(trunks)[: rng.randrange(40)]
            prompts[at] = trunk + [rng.randbytes(16) for _ in range(rng.choice([1, 1, 2, 30]))]
            index.stored(holder, b"", prompts[at], L1)
            held[holder].update(prompts[at])
        elif prompts[at]:
            gone = prompts[at][rng.randrange(len(prompts[at])) :][::-1]
            index.removed(holder, gone, L1)
            held[holder].difference_update(gone)
        index.touch(holder, trunks[0])
        assert index.bytes_used <= index.max_bytes
    index.check_invariants()
    assert index.evicted_blocks > 0
    for holder in HOLDERS:
        assert index.hashes_of(holder, L1) <= held[holder]
    for asked in prompts:
        for holder, depth in index.match(asked).items():
            assert set(asked[: depth.total]) <= held[holder]
