"""Which instances have a prompt's blocks in their memory (L1, L2), so that another one may fetch them."""

from collections.abc import Callable, Mapping, Sequence

from tidemill.mesh.v1.common_pb2 import BlockSource, Target
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.index import TierDepth
from tidemill_router.candidate import Candidate
from tidemill_router.loadable import loads_from_peer
from tidemill_router.pairs import takes_from

MAX_SOURCES = 2
"""Other holders of a prompt that a placement names."""


class Sources:
    """Leading blocks of one prompt that each instance could send from its memory, if it were asked for them."""

    def __init__(
        self, instances: Sequence[Candidate], depths: Mapping[Holder, TierDepth], in_l2: Callable[[Candidate], int]
    ) -> None:
        """`depths`: what each has in L1 and then in L2; `in_l2`: leading blocks that one has in L2 alone."""
        self._depths = depths
        # All that an instance sends at once comes from one tier.
        sent = [(c, max(depths[c.key].l1, in_l2(c) if depths[c.key].l2 else 0)) for c in instances if c.key in depths]
        self._best = sorted((item for item in sent if item[1]), key=lambda item: -item[1])

    def beside(self, candidate: Candidate) -> int:
        """Leading blocks that the best other instance has."""
        return next((blocks for other, blocks in self._best if _may_send(other, candidate)), 0)

    def better_than(self, candidate: Candidate) -> list[BlockSource]:
        """Other instances that have more of the prompt than the candidate, best first."""
        depth = self._depths.get(candidate.key, TierDepth())
        own = depth.l1 + depth.l2
        return [
            BlockSource(holder=Target(domain=other.domain, endpoint=other.endpoint), num_blocks=blocks)
            for other, blocks in self._best
            if blocks > own and _may_send(other, candidate)
        ][:MAX_SOURCES]


def _may_send(other: Candidate, candidate: Candidate) -> bool:
    return (
        other.key != candidate.key
        and takes_from(candidate, other.domain)
        and loads_from_peer(other.kv_format, candidate.kv_format)
    )
