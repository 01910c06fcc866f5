"""Blocks of many prompts at many workers, as events and queries that two indexes can be given alike.

A block is 16 random bytes, the same wherever the same prefix occurs. Tidemill takes them as they are; an index of
64-bit hashes takes the first half as the hash of the block's tokens and the second as the hash of its prefix.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Blocks that a worker has stored behind `parent` (empty: from the start); `packed` has 16 bytes a block."""

    worker: int
    parent: bytes
    packed: bytes


@dataclass
class Fleet:
    """Events in order, then queries; `long` is a prompt of its own."""

    events: list[StoredEvent] = field(default_factory=list)
    queries: list[bytes] = field(default_factory=list)
    long: bytes = b""

    @property
    def event_blocks(self) -> int:
        """Blocks of all events."""
        return sum(len(event.packed) for event in self.events) // HASH_BYTES

    def save(self, path: Path) -> None:
        """For a peer in another process, as NumPy arrays."""
        blocks = b"".join(event.packed for event in self.events)
        np.savez(
            path,
            workers=np.array([event.worker for event in self.events]),
            parents=np.frombuffer(b"".join(e.parent or bytes(HASH_BYTES) for e in self.events), "<u8").reshape(-1, 2),
            lengths=np.array([len(event.packed) // HASH_BYTES for event in self.events]),
            blocks=np.frombuffer(blocks, "<u8").reshape(-1, 2),
            query_lengths=np.array([len(query) // HASH_BYTES for query in self.queries]),
            queries=np.frombuffer(b"".join(self.queries), "<u8").reshape(-1, 2),
            long=np.frombuffer(self.long, "<u8").reshape(-1, 2),
        )


def conversations(workers: int, count: int, depth: int, shared: int, queries: int) -> Fleet:
    """Each conversation is one event at one worker; all begin with the same `shared` blocks."""
    rng = np.random.default_rng(depth)
    start = rng.bytes(shared * HASH_BYTES)
    prompts = [start + rng.bytes((depth - shared) * HASH_BYTES) for _ in range(count)]
    events = [StoredEvent(i % workers, b"", prompt) for i, prompt in enumerate(prompts)]
    return Fleet(events, [prompts[i % count] for i in range(queries)])


def long_prompts(workers: int, count: int, queries: int) -> Fleet:
    """Prompts of 8K to 128K tokens (log-uniform, blocks of 16) in 40 groups (Zipf) that share a start.

    A worker announces what it lacked. Queries share most of a prompt that was served, and go on with new blocks.
    """
    rng = np.random.default_rng(13)
    trunks = [rng.bytes(8192 * HASH_BYTES) for _ in range(40)]
    share = 1.0 / np.arange(1, 41)
    fleet = Fleet(long=rng.bytes(8192 * HASH_BYTES))
    held: list[set[bytes]] = [set() for _ in range(workers)]
    prompts = []
    for _ in range(count):
        group, worker = rng.choice(40, p=share / share.sum()), int(rng.integers(workers))
        prompt = _branch(rng, trunks[group], rng.uniform(0.1, 0.9))
        prompts.append(prompt)
        known = 0
        while known < len(prompt) and prompt[known : known + HASH_BYTES] in held[worker]:
            known += HASH_BYTES
        held[worker].update(prompt[i : i + HASH_BYTES] for i in range(known, len(prompt), HASH_BYTES))
        parent = prompt[known - HASH_BYTES : known] if known else b""
        fleet.events.append(StoredEvent(worker, parent, prompt[known:]))
    for _ in range(queries):
        fleet.queries.append(_branch(rng, prompts[rng.integers(count)], rng.uniform(0.5, 1.0)))
    return fleet


def _branch(rng: np.random.Generator, trunk: bytes, share: float) -> bytes:
    """A prompt of 512 to 8,192 blocks whose first `share` comes from the trunk, as far as that goes."""
    blocks = int(np.exp(rng.uniform(np.log(512), np.log(8192))))
    common = trunk[: int(blocks * share) * HASH_BYTES]
    return common + rng.bytes(blocks * HASH_BYTES - len(common))
