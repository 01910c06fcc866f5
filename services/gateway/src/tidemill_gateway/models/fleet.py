"""Questions to the membership records: who serves what."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL, MembershipRecord, ModelRef, Role

WORKER_ROLES = frozenset({ROLE_PREFILL, ROLE_DECODE})


def is_worker(record: MembershipRecord) -> bool:
    """True for prefill and decode instances."""
    return record.role in WORKER_ROLES


def model_refs(records: Iterable[MembershipRecord]) -> list[ModelRef]:
    """What live workers say they serve, draining ones included."""
    return [ref for record in records if is_worker(record) for ref in record.models]


def serving(records: Iterable[MembershipRecord], role: "Role.ValueType", revision: str) -> list[MembershipRecord]:
    """Instances of a role that take new work for a revision."""
    return [
        record
        for record in records
        if record.role == role
        and not record.draining
        and record.domains
        and any(ref.revision == revision for ref in record.models)
    ]


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """What requests ask of the records, worked out once for each change of them."""

    served_by: Counter[str]
    """Workers by card digest."""
    ready: frozenset[str]
    """Revisions with a usable pair of prefill and decode instances."""
    pool_blocks: dict[str, int]
    """By card digest: blocks of the largest cache domain, of the role that has less; 0 when nobody can tell."""


def summarise(records: Iterable[MembershipRecord]) -> FleetSummary:
    """The summary of all records."""
    known = list(records)
    refs = model_refs(known)
    revisions = {ref.card_digest: ref.revision for ref in refs}
    ready = frozenset(r for r in revisions.values() if all(serving(known, role, r) for role in WORKER_ROLES))
    blocks = {digest: _largest_pool_blocks(known, revision) for digest, revision in revisions.items()}
    return FleetSummary(Counter(ref.card_digest for ref in refs), ready, blocks)


def _largest_pool_blocks(records: list[MembershipRecord], revision: str) -> int:
    largest = [
        max((domain.num_blocks for record in serving(records, role, revision) for domain in record.domains), default=0)
        for role in WORKER_ROLES
    ]
    return min((blocks for blocks in largest if blocks), default=0)
