"""The tree of cached blocks: reference counts and leaf-first eviction in O(1).

A node's reference count is the number of its holders (sequences, pins) plus the number of its children that are
referenced themselves. A holder therefore takes one reference, on its deepest node, and that keeps the whole path. A
count that falls to zero puts the node at the young end of the eviction order and lets go of its parent, so deeper
nodes come first among equals and a parent never leaves before its child.
"""

from collections import OrderedDict
from collections.abc import Iterator

from tidemill_kvcache.snapshots import SnapshotHolder


class Node(SnapshotHolder):
    """One cached block."""

    __slots__ = ("block_id", "hash", "parent", "ref_count")

    def __init__(self, block_hash: bytes, parent: "Node | None", block_id: int) -> None:
        super().__init__()
        self.hash = block_hash
        self.parent = parent
        self.block_id = block_id
        self.ref_count = 0


class PrefixTree:
    """Nodes by hash; a hash names the whole prefix, so the path of a node is present whenever the node is."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._evictable: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Parents before children: insertion order, as a child is inserted after its parent and removed before it."""
        return iter(self._nodes.values())

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody references."""
        return len(self._evictable)

    def get(self, block_hash: bytes) -> Node | None:
        """The node of a hash."""
        return self._nodes.get(block_hash)

    def contains(self, node: Node) -> bool:
        """False for a node that `detach_all` took out while it was in use."""
        return self._nodes.get(node.hash) is node

    def insert(self, block_hash: bytes, parent: Node | None, block_id: int) -> Node:
        """Adds a child of a referenced parent, referenced once by the caller."""
        assert block_hash not in self._nodes, "the block is cached already"
        node = Node(block_hash, parent, block_id)
        self._nodes[block_hash] = node
        self.reference(node)
        return node

    def reference(self, node: Node) -> None:
        """Takes a reference; a path that nobody held leaves the eviction order."""
        current: Node | None = node
        while current is not None:
            current.ref_count += 1
            if current.ref_count > 1:
                return
            self._evictable.pop(current, None)
            current = current.parent

    def release(self, node: Node) -> list[Node]:
        """Gives a reference back; returns nodes that ended with it, having been detached before."""
        ended = []
        current: Node | None = node
        while current is not None:
            assert current.ref_count > 0, "a reference was given back twice"
            current.ref_count -= 1
            if current.ref_count > 0:
                break
            if self.contains(current):
                self._evictable[current] = None
            else:
                ended.append(current)
            current = current.parent
        return ended

    def evict(self) -> Node:
        """Removes the oldest node that nobody references; it is a leaf."""
        node, _ = self._evictable.popitem(last=False)
        del self._nodes[node.hash]
        return node

    def detach_all(self) -> list[Node]:
        """Empties the tree; returns the nodes that nobody references. The others end by `release`."""
        unused = list(self._evictable)
        self._nodes.clear()
        self._evictable.clear()
        return unused

    def check_invariants(self) -> None:
        """Counts agree with the structure (O(n), for tests)."""
        active_children: dict[Node, int] = {}
        order = {node: i for i, node in enumerate(self._evictable)}
        for node in self:
            assert (node.ref_count == 0) == (node in order), "evictable means not referenced"
            if node.parent is None:
                continue
            assert self.contains(node.parent), "a parent left before its child"
            if node.ref_count:
                active_children[node.parent] = active_children.get(node.parent, 0) + 1
            if node.parent in order:
                assert order[node] < order[node.parent], "a parent would leave before its child"
        for node, count in active_children.items():
            assert node.ref_count >= count, "referenced children keep their parent"
