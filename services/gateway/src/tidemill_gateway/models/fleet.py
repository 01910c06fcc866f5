"""Questions to the membership records: who serves what."""

from collections.abc import Iterable

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


def is_ready(records: Iterable[MembershipRecord], revision: str) -> bool:
    """Whether a usable pair of prefill and decode instances serves the revision."""
    known = list(records)
    return bool(serving(known, ROLE_PREFILL, revision) and serving(known, ROLE_DECODE, revision))


def largest_pool_tokens(records: Iterable[MembershipRecord], revision: str, block_size: int) -> int:
    """Tokens that fit every role's largest cache domain; 0 when no worker is there to tell."""
    known = list(records)
    largest = [
        max((d.num_blocks * block_size for r in serving(known, role, revision) for d in r.domains), default=0)
        for role in (ROLE_PREFILL, ROLE_DECODE)
    ]
    return min((tokens for tokens in largest if tokens), default=0)
