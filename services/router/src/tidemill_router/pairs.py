"""Pairs of instances between which KV arrives whole, as those who take it report. Pure."""

from collections.abc import Sequence

from tidemill_router.candidate import Candidate


def takes_from(taker: Candidate, source: str) -> bool:
    """Whether bytes of that instance arrive undamaged there."""
    return source not in taker.load.quarantined


def takers(decodes: Sequence[Candidate], source: str) -> list[Candidate]:
    """Decode targets that take KV of that instance."""
    return [decode for decode in decodes if takes_from(decode, source)]


def with_a_taker(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> list[Candidate]:
    """Prefill targets whose KV some decode target takes: the work of any other would be for nothing."""
    shunned = set.intersection(*(set(decode.load.quarantined) for decode in decodes)) if decodes else set()
    return [prefill for prefill in prefills if prefill.domain.instance not in shunned]
