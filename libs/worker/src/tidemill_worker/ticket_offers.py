"""What a HandOver is answered with: a ticket for the target, bound to both cache domains and a deadline."""

from tidemill.mesh.v1 import common_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_worker.requests import LiveRequest
from tidemill_worker.tickets import DomainId
from tidemill_worker.translate import from_key, to_key
from tidemill_worker.worker import Worker


def offer_ticket(worker: Worker, hand_over: worker_pb2.HandOver) -> worker_pb2.TicketOffer:
    """Answers a HandOver; NOT_FOUND when the request has ended, STALE when its KV is being fetched already."""
    key = to_key(hand_over.key)
    live = worker.table.get(key)
    if live is None or live.stage != "prefill" or live.released:
        raise MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "no such request is computed or held here", field="key")
    if live.pulling:
        raise MeshError(errors_pb2.ERROR_CODE_STALE, "the request's KV is being fetched already", field="key")
    ttl_s = min(worker.settings.hold_s, live.deadline_at - worker.clock())
    return ticket_for(worker, live, hand_over.target.domain, ttl_s)


def ticket_for(worker: Worker, live: LiveRequest, target: common_pb2.DomainRef, ttl_s: float) -> worker_pb2.TicketOffer:
    """A ticket with which the target may fetch the request's KV for so long."""
    source = worker.domain_of(live)
    entry = worker.tickets.mint(live.key, worker.domain_id(source), to_domain_id(target), ttl_s)
    ticket = worker_pb2.Ticket(secret=entry.secret, prefill=worker.domain_ref(source), decode=target, deadline_s=ttl_s)
    return worker_pb2.TicketOffer(key=from_key(live.key), ticket=ticket)


def to_domain_id(ref: common_pb2.DomainRef) -> DomainId:
    """A DomainRef as a plain value."""
    return DomainId(ref.instance, ref.incarnation, ref.domain, ref.epoch)


def from_domain_id(domain: DomainId) -> common_pb2.DomainRef:
    """The same as it travels."""
    return common_pb2.DomainRef(
        instance=domain.instance, incarnation=domain.incarnation, domain=domain.domain, epoch=domain.epoch
    )
