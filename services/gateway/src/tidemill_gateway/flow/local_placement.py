"""Placement without the router: by the membership, this gateway's own streams, and pairs that carry no KV."""

from collections.abc import Callable, Collection, Iterable, Mapping

from tidemill.mesh.v1.common_pb2 import DomainRef, Target
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL, MembershipRecord, Role
from tidemill.mesh.v1.router_pb2 import PlaceDecodeResponse, PlacePrefillResponse
from tidemill_gateway.models.fleet import serving

LegCount = Callable[[str, str, int], int | None]
"""(instance, incarnation, domain) -> stages that run there; None: its stream is down."""
Shunned = Callable[[str], Collection[str]]
"""Decode instance -> instances whose KV does not arrive there, or damaged, as it reports."""


def pick_target(
    records: Iterable[MembershipRecord],
    role: "Role.ValueType",
    revision: str,
    excluded: Collection[str],
    legs: LegCount,
) -> Target | None:
    """The domain with the fewest of our stages among those that can take the request."""
    best: tuple[int, str, int] | None = None
    chosen: Target | None = None
    for record in serving(records, role, revision):
        if record.instance in excluded:
            continue
        for domain in record.domains:
            count = legs(record.instance, record.incarnation, domain.domain)
            if count is None:
                continue
            rank = (count, record.instance, domain.domain)
            if best is None or rank < best:
                best = rank
                ref = DomainRef(
                    instance=record.instance,
                    incarnation=record.incarnation,
                    domain=domain.domain,
                    epoch=domain.epoch,
                )
                chosen = Target(domain=ref, endpoint=record.endpoint)
    return chosen


def place_prefill(
    records: Mapping[str, MembershipRecord],
    revision: str,
    excluded: Collection[str],
    legs: LegCount,
    shunned: Shunned,
) -> PlacePrefillResponse | None:
    """A prefill instance whose KV some decode instance takes, else a decode instance that does both stages."""
    takers = [r.instance for r in serving(records.values(), ROLE_DECODE, revision) if r.instance not in excluded]
    untaken = set.intersection(*(set(shunned(taker)) for taker in takers)) if takers else set()
    target = pick_target(records.values(), ROLE_PREFILL, revision, untaken.union(excluded), legs)
    if target is not None and pick_target(records.values(), ROLE_DECODE, revision, excluded, legs) is not None:
        return PlacePrefillResponse(target=target)
    target = pick_target(records.values(), ROLE_DECODE, revision, excluded, legs)
    return None if target is None else PlacePrefillResponse(target=target, whole=True)


def place_decode(
    records: Mapping[str, MembershipRecord],
    revision: str,
    excluded: Collection[str],
    legs: LegCount,
    shunned: Shunned,
    source: str,
) -> PlaceDecodeResponse | None:
    """A decode instance, one that takes the source's KV if there is any: what is computed is tried once more."""
    refusing = {record.instance for record in records.values() if source in shunned(record.instance)}
    target = pick_target(records.values(), ROLE_DECODE, revision, refusing.union(excluded), legs)
    if target is None and refusing:
        target = pick_target(records.values(), ROLE_DECODE, revision, excluded, legs)
    return None if target is None else PlaceDecodeResponse(target=target)
