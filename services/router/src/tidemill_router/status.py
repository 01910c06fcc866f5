"""GetRouterStatus: the router's view, for operators and tests."""

from tidemill.mesh.v1.common_pb2 import InstanceRef
from tidemill.mesh.v1.membership_pb2 import DomainRecord, MembershipRecord, Role
from tidemill.mesh.v1.router_pb2 import GetRouterStatusResponse, InstanceView
from tidemill_router.app import RouterParts


def router_status(parts: RouterParts, me: InstanceRef) -> GetRouterStatusResponse:
    """Everything at this moment."""
    index, tracker = parts.index, parts.tracker
    instances = [
        _instance(parts, record, domain)
        for record in sorted(parts.view.workers(), key=lambda record: record.instance)
        for domain in record.domains
    ]
    return GetRouterStatusResponse(
        instance=me,
        instances=instances,
        holds={
            **{f"reservations_{kind}": count for kind, count in parts.reservations.count_by_kind().items()},
            "pending_prefix_blocks": len(parts.reservations.pending),
            "snapshots_running": parts.fetcher.running,
            "kv_batches_queued": parts.feed.queued,
        },
        counters={
            **tracker.counters,
            **{f"reservations_ended_{reason}": count for reason, count in parts.reservations.ended.items()},
            "replicas_known": len(parts.replicas),
            "replicas_followed": parts.replicas.num_live,
            **{f"replica_{name}": count for name, count in parts.replicas.counters.items()},
            "index_evicted_blocks": index.evicted_blocks,
            "index_orphan_runs": index.orphan_runs,
            "kv_batches_dropped": parts.feed.dropped,
            "kv_batches_unreadable": parts.feed.unreadable,
            "fenced_instances": len(parts.fences),
            "quarantined_pairs": parts.view.num_quarantined_pairs,
            "degraded_local_prefill": parts.router.local_prefill.num_on,
            "degraded_no_hand_overs": parts.no_hand_overs.num_on,
        },
        index_blocks=index.num_blocks,
        index_bytes=index.bytes_used,
        etcd_connected=parts.instances.connected,
        nats_connected=parts.bus.connected,
    )


def _instance(parts: RouterParts, record: MembershipRecord, domain: DomainRecord) -> InstanceView:
    holder = (record.instance, domain.domain)
    ref, report = parts.view.domain_of(record, domain)
    track = parts.tracker.get(holder)
    view = InstanceView(
        domain=ref,
        endpoint=record.endpoint,
        role=Role.Name(record.role).removeprefix("ROLE_").lower(),
        model=record.models[0].name if record.models else "",
        load_age_s=parts.clock() - parts.view.reported_at(holder),
        reservations=parts.reservations.on_target(holder),
        index_blocks=parts.index.blocks_of(holder),
        event_sequence=track.sequence if track else 0,
        resyncs=track.resyncs if track else 0,
        fenced=parts.fences.is_fenced(record.instance, record.incarnation),
        draining=record.draining,
        total_blocks=domain.num_blocks,
    )
    if report is not None:
        view.slo_load = report.slo_load
        view.draining = view.draining or report.draining
        view.free_blocks, view.total_blocks = report.free_blocks, report.total_blocks
        view.running_requests, view.waiting_requests = report.running_requests, report.waiting_requests
    return view
