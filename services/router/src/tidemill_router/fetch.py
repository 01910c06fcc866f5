"""What of a prompt an instance had better load than compute, from which source, and the seconds of it."""

from dataclasses import dataclass

from tidemill_router.candidate import Candidate, Costs, ModelFacts, transfer_rate

L2_LATENCY_S = 0.002
"""Of a copy from host memory, beside its bytes."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Leading tokens of the prompt by the slowest source that is needed for them; each at least the one before.

    0        l1        l2        peer          l3
    |--- L1 --|-- own --|-- another |-- kvstore |-- computed
                 L2       instance
    """

    l1: int
    l2: int
    peer: int
    l3: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Tokens by source and seconds; what kvstore sends beside another instance costs what it takes longer."""

    l2_tokens: int = 0
    peer_tokens: int = 0
    l3_tokens: int = 0
    l2_s: float = 0.0
    peer_s: float = 0.0
    l3_s: float = 0.0

    @property
    def tokens(self) -> int:
        """From all sources."""
        return self.l2_tokens + self.peer_tokens + self.l3_tokens

    @property
    def seconds(self) -> float:
        """Until all are there."""
        return self.l2_s + self.peer_s + self.l3_s

    def saved_s(self, tokens_per_s: float) -> float:
        """Seconds less than computing it."""
        return self.tokens / tokens_per_s - self.seconds


def best_fetch(candidate: Candidate, reach: Reach, facts: ModelFacts, costs: Costs, tokens_per_s: float) -> Fetch:
    """Of nothing, own L2, and that with another instance, kvstore or both, what saves most seconds.

    A block is of use only if all before it are there, so L2 is part of whatever goes on after it.
    """
    if not facts.kv_bytes_per_token:
        return Fetch()
    link = transfer_rate(candidate, costs)

    def seconds(tokens: int, latency_s: float, bytes_per_s: float) -> float:
        return latency_s + tokens * facts.kv_bytes_per_token / bytes_per_s if tokens > 0 else 0.0

    in_l2, at_peer, in_l3 = reach.l2 - reach.l1, reach.peer - reach.l2, reach.l3 - reach.l2
    l2_s = seconds(in_l2, L2_LATENCY_S, costs.l2_bytes_per_s)
    peer_s = seconds(at_peer, costs.peer_latency_s, link)
    rest = max(0, reach.l3 - reach.peer)
    options = (
        Fetch(),
        Fetch(in_l2, 0, 0, l2_s),
        Fetch(in_l2, at_peer, 0, l2_s, peer_s),
        Fetch(in_l2, 0, in_l3, l2_s, 0.0, seconds(in_l3, costs.fetch_latency_s, link)),
        Fetch(in_l2, at_peer, rest, l2_s, peer_s, max(0.0, seconds(rest, costs.fetch_latency_s, link) - peer_s)),
    )
    return max(options, key=lambda fetch: fetch.saved_s(tokens_per_s))
