"""Blocks kept for a reader outside the scheduler: an offload, a peer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from tidemill_kvcache.prefix_tree import Node


@dataclass(frozen=True, slots=True)
class Pin:
    """Nodes of one pin, and those of them whose snapshot is kept too."""

    nodes: tuple[Node, ...]
    snapshot_nodes: tuple[Node, ...]

    @property
    def path_ends(self) -> list[Node]:
        """The nodes to reference: the last one of each run of parents and children."""
        return [n for n, after in zip_longest(self.nodes, self.nodes[1:]) if after is None or after.parent is not n]


class Pins:
    """Pins by id."""

    def __init__(self) -> None:
        self._pins: dict[int, Pin] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks under pins, once for each pin."""
        return sum(len(pin.nodes) for pin in self._pins.values())

    def references(self) -> Iterator[Node]:
        """One node for each reference that all pins hold."""
        return chain.from_iterable(pin.path_ends for pin in self._pins.values())

    def add(self, pin_id: int, nodes: Sequence[Node]) -> Pin:
        """A pin of nodes that the caller now references."""
        assert pin_id not in self._pins, f"pin {pin_id} is in use"
        pin = Pin(tuple(nodes), tuple(node for node in nodes if node.snapshot_id >= 0))
        self._pins[pin_id] = pin
        return pin

    def remove(self, pin_id: int) -> Pin | None:
        """The pin whose references the caller now gives back; None for an unknown id."""
        return self._pins.pop(pin_id, None)
