"""The tree of cached blocks: reference counts and leaf-first eviction in O(1).

A node's reference count is the number of its holders (sequences, pins) plus the number of its children that are
referenced themselves. A holder therefore takes one reference, on its deepest node, and that keeps the whole path. A
count that falls to zero puts the node at the young end of the eviction order and lets go of its parent, so deeper
nodes come first among equals and a parent never leaves before its child.

There is one such order for each priority, and the lowest that has nodes is evicted from. A node has the highest
priority of the requests that used it; who used a child used its parent, so the parent's is no lower.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from tidemill_kvcache.snapshots import SnapshotHolder

LOWEST_PRIORITY, NORMAL_PRIORITY, HIGHEST_PRIORITY = -1, 0, 1
"""Of cached blocks: those of background work leave first, those worth keeping last."""


class Node(SnapshotHolder):
    """One cached block."""

    __slots__ = ("block_id", "hash", "parent", "priority", "ref_count")

    def __init__(self, block_hash: bytes, parent: "Node | None", block_id: int) -> None:
        super().__init__()
        self.hash = block_hash
        self.parent = parent
        self.block_id = block_id
        self.priority = LOWEST_PRIORITY
        self.ref_count = 0


class PrefixTree:
    """Nodes by hash; a hash names the whole prefix, so the path of a node is present whenever the node is."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._orders: dict[int, OrderedDict[Node, None]] = {
            priority: OrderedDict() for priority in range(LOWEST_PRIORITY, HIGHEST_PRIORITY + 1)
        }

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Parents before children: insertion order, as a child is inserted after its parent and removed before it."""
        return iter(self._nodes.values())

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody references."""
        return sum(map(len, self._orders.values()))

    def get(self, block_hash: bytes) -> Node | None:
        """The node of a hash."""
        return self._nodes.get(block_hash)

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
            self._orders[current.priority].pop(current, None)
            current = current.parent

    def raise_priority(self, node: Node, priority: int) -> None:
        """A request of that priority uses a referenced node and so its path."""
        current: Node | None = node
        while current is not None and current.priority < priority:
            current.priority = priority
            current = current.parent

    def release(self, node: Node) -> list[Node]:
        """Gives a reference back; returns nodes that ended with it, as `detach_all` took them out while in use."""
        ended, nodes, orders = [], self._nodes, self._orders
        current: Node | None = node
        while current is not None:
            assert current.ref_count > 0, "a reference was given back twice"
            current.ref_count -= 1
            if current.ref_count > 0:
                break
            if nodes.get(current.hash) is current:
                orders[current.priority][current] = None
            else:
                ended.append(current)
            current = current.parent
        return ended

    def num_ended_by(self, references: Iterable[Node], enough: int) -> int:
        """Nodes that nobody would reference if these references were given back; counts to `enough` at most."""
        left: dict[Node, int] = {}
        ended = 0
        for node in references:
            current: Node | None = node
            while current is not None and ended < enough:
                left[current] = left.get(current, current.ref_count) - 1
                if left[current] > 0:
                    break
                ended += 1
                current = current.parent
        return ended

    def evict(self) -> Node:
        """Removes the oldest node of the lowest priority that nobody references; it is a leaf."""
        order = next(order for order in self._orders.values() if order)
        node, _ = order.popitem(last=False)
        del self._nodes[node.hash]
        return node

    def coldest(self, count: int) -> list[bytes]:
        """Hashes of the nodes that `evict` would remove next, in order."""
        return [node.hash for node in islice(chain.from_iterable(self._orders.values()), count)]

    def detach_all(self) -> list[Node]:
        """Empties the tree; returns the nodes that nobody references. The others end by `release`."""
        unused = list(chain.from_iterable(self._orders.values()))
        self._nodes.clear()
        for order in self._orders.values():
            order.clear()
        return unused

    def check_invariants(self) -> None:
        """Counts agree with the structure (O(n), for tests)."""
        active_children: dict[Node, int] = {}
        order = {node: i for i, node in enumerate(chain.from_iterable(self._orders.values()))}
        for node in self:
            assert (node.ref_count == 0) == (node in order), "evictable means not referenced"
            if node.parent is None:
                continue
            assert self._nodes.get(node.parent.hash) is node.parent, "a parent left before its child"
            assert node.parent.priority >= node.priority, "a parent is worth less than its child"
            if node.ref_count:
                active_children[node.parent] = active_children.get(node.parent, 0) + 1
            if node.parent in order:
                assert order[node] < order[node.parent], "a parent would leave before its child"
        for node, count in active_children.items():
            assert node.ref_count >= count, "referenced children keep their parent"
