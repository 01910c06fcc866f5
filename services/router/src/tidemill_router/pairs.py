"""Pairs of instances between which KV arrives, and whole, as those who take it report. Pure."""

from collections.abc import Sequence

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill_router.candidate import Candidate


def takes_from(taker: Candidate, source: DomainRef) -> bool:
    """Whether bytes of that domain arrive there, and undamaged."""
    return source.instance not in taker.load.quarantined and source not in taker.load.silent


def takers(decodes: Sequence[Candidate], source: DomainRef) -> list[Candidate]:
    """Decode targets that take KV of that domain."""
    return [decode for decode in decodes if takes_from(decode, source)]


def with_a_taker(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> list[Candidate]:
    """Prefill targets whose KV some decode target takes: the work of any other would be for nothing."""
    choosy = [decode for decode in decodes if decode.load.quarantined or decode.load.silent]
    if len(choosy) < len(decodes):
        return list(prefills)
    return [prefill for prefill in prefills if takers(choosy, prefill.domain)]
