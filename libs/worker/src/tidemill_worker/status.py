"""What a worker holds now and has counted, for GetWorkerStatus. Every hold is 0 after load."""

from collections.abc import Mapping, Sequence

from tidemill_engine.messages import LoadSample
from tidemill_worker.worker import Worker


def holds_of(worker: Worker, samples: Sequence[LoadSample], tiers: Mapping[str, int]) -> dict[str, int]:
    """`streams` counts the gateways that have live requests here, since connected ones stay connected."""
    return {
        "requests": len(worker.table),
        "held_requests": worker.table.num_held,
        "tickets": len(worker.tickets),
        "streams": worker.table.num_busy_sessions,
        "transfers": len(worker.transfers),
        "pinned_blocks": sum(sample.pinned_blocks for sample in samples),
        "used_blocks": sum(sample.used_blocks for sample in samples),
        **tiers,
    }


def counters_of(worker: Worker) -> dict[str, int]:
    """Totals since the process started, and what describes its present state."""
    return {
        **worker.counts.totals,
        "gateways_connected": len(worker.sessions),
        "domains_up": sum(domain.up for domain in worker.domains),
        "domain_starts": sum(domain.starts for domain in worker.domains),
        "queued_messages": sum(session.num_queued for session in worker.sessions),
    }
