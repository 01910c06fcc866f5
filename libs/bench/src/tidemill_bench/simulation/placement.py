"""Ways to choose an engine: round robin, and the documented formula of Dynamo's KV mode; the product's is in mesh."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from tidemill_bench.simulation.engine import Job
from tidemill_bench.simulation.index_feed import IndexFeed
from tidemill_bench.simulation.trace import TraceRequest


class Placement(Protocol):
    """Chooses an engine for each request and hears what becomes of it."""

    def place(self, request: TraceRequest, hashes: Sequence[bytes]) -> int:
        """The engine's number."""

    def prefilled(self, job: Job) -> None:
        """The first token is out."""

    def ended(self, job: Job) -> None:
        """The last token is out."""


class RoundRobin:
    """One engine after the other."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._next = 0

    def place(self, request: TraceRequest, hashes: Sequence[bytes]) -> int:
        """The next engine."""
        chosen = self._next % self._num_engines
        self._next += 1
        return chosen

    def prefilled(self, job: Job) -> None:
        """Nothing to learn."""

    def ended(self, job: Job) -> None:
        """Nothing to learn."""


class DynamoFormula:
    """Dynamo's default selector, from its documentation (router concepts, 1.6), with its default weights.

    cost = max(active prefill blocks + prompt blocks - overlap blocks, 0) + decode blocks with this request;
    the lowest wins, ties are drawn. A prefill counts with the tokens that the index did not show as cached, until its
    first token; blocks that active requests share count once.
    """

    def __init__(self, block_size: int, feed: IndexFeed, names: Sequence[str], seed: int) -> None:
        self._block_size = block_size
        self._feed = feed
        self._holders = [(name, 0) for name in names]
        self._rng = random.Random(seed)
        self._prefill_tokens = [0] * len(names)
        self._active_blocks: list[Counter[bytes]] = [Counter() for _ in names]
        self._placed: dict[int, tuple[int, int, Sequence[bytes]]] = {}

    def place(self, request: TraceRequest, hashes: Sequence[bytes]) -> int:
        """The engine of least cost."""
        depths = self._feed.index.match(hashes)
        prompt_blocks = -(-request.input_tokens // self._block_size)
        overlaps = [depths[holder].l1 if holder in depths else 0 for holder in self._holders]
        costs = []
        for engine, overlap in enumerate(overlaps):
            active = self._active_blocks[engine]
            decode_blocks = len(active) + sum(block not in active for block in hashes) + prompt_blocks - len(hashes)
            prefill_blocks = self._prefill_tokens[engine] / self._block_size + prompt_blocks - overlap
            costs.append(max(0.0, prefill_blocks) + decode_blocks)
        least = min(costs)
        chosen = self._rng.choice([engine for engine, cost in enumerate(costs) if cost == least])
        tokens = max(0, request.input_tokens - overlaps[chosen] * self._block_size)
        self._prefill_tokens[chosen] += tokens
        self._active_blocks[chosen].update(hashes)
        self._placed[request.index] = (chosen, tokens, hashes)
        return chosen

    @property
    def is_idle(self) -> bool:
        """No request counts as load."""
        return not self._placed and not any(self._prefill_tokens) and not any(self._active_blocks)

    def prefilled(self, job: Job) -> None:
        """Its prompt is no load any more."""
        chosen, tokens, _ = self._placed[job.request.index]
        self._prefill_tokens[chosen] -= tokens

    def ended(self, job: Job) -> None:
        """Its blocks are not active any more."""
        chosen, _, hashes = self._placed.pop(job.request.index)
        active = self._active_blocks[chosen]
        active.subtract(hashes)
        for block in hashes:
            if not active[block]:
                del active[block]
