"""What one request holds of a cache."""

from dataclasses import dataclass, field

from tidemill_kvcache.prefix_tree import NORMAL_PRIORITY, Node


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Cursor and references of one request. After `PrefixCache.free` it may be matched again (preemption).

    block_ids  | matched | committed | allocated, not full or not computed |
    hashes     | matched | committed |
    hash_chain | matched | committed | hashed ahead by a match             | ...
    """

    root: bytes
    generation: int
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of the committed full blocks."""
    hash_chain: list[bytes] = field(default_factory=list)
    """Of all full blocks hashed so far; survives `free`, as the tokens of a request only grow."""
    num_cached_blocks: int = 0
    """Leading blocks that `match_prefix` found."""
    tip: Node | None = None
    """Tree node of the last committed block; referenced."""
    unshared: list[int] = field(default_factory=list)
    """Committed blocks that are not in the tree: duplicates of cached content, or from before a reset."""
    pending_snapshots: dict[int, int] = field(default_factory=dict)
    """Snapshot ids to attach when that many blocks are committed."""
    held_snapshot: Node | None = None
    priority: int = NORMAL_PRIORITY


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What a sequence holds after a match, from its first token on."""

    num_tokens: int
    num_blocks: int
    snapshot_id: int
    """Of the state at the end of the match, referenced until `release_snapshot` or `commit`; -1: none."""
