"""Placement without the router: by the membership and this gateway's own streams."""

from collections.abc import Callable, Collection, Iterable, Mapping

from tidemill.mesh.v1.common_pb2 import DomainRef, Target
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL, MembershipRecord, Role
from tidemill.mesh.v1.router_pb2 import PlaceDecodeResponse, PlacePrefillResponse
from tidemill_gateway.models.fleet import serving

LegCount = Callable[[str, str, int], int | None]
"""(instance, incarnation, domain) -> stages that run there; None: its stream is down."""


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
    records: Mapping[str, MembershipRecord], revision: str, excluded: Collection[str], legs: LegCount
) -> PlacePrefillResponse | None:
    """A prefill instance, else a decode instance that does both stages."""
    target = pick_target(records.values(), ROLE_PREFILL, revision, excluded, legs)
    if target is not None and pick_target(records.values(), ROLE_DECODE, revision, excluded, legs) is not None:
        return PlacePrefillResponse(target=target)
    target = pick_target(records.values(), ROLE_DECODE, revision, excluded, legs)
    return None if target is None else PlacePrefillResponse(target=target, whole=True)


def place_decode(
    records: Mapping[str, MembershipRecord], revision: str, excluded: Collection[str], legs: LegCount
) -> PlaceDecodeResponse | None:
    """A decode instance."""
    target = pick_target(records.values(), ROLE_DECODE, revision, excluded, legs)
    return None if target is None else PlaceDecodeResponse(target=target)
