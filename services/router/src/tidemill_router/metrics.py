"""What the router measures."""

from collections import Counter

from tidemill_kvcache.index import BlockIndex
from tidemill_kvcache.tracker import EventTracker
from tidemill_mesh.metrics import Metrics
from tidemill_router.fences import Fences
from tidemill_router.kv_feed import KvFeed
from tidemill_router.replicas import Replicas
from tidemill_router.reservations import Reservations
from tidemill_router.snapshot_fetcher import SnapshotFetcher

PLACEMENT_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2)


class RouterMetrics:
    """Observed by the servicer, and copied from the parts' own counts by `collect`."""

    def __init__(self, metrics: Metrics) -> None:
        self.placements = metrics.counter("placements_total", "Placements, by stage and outcome.", ("stage", "outcome"))
        self.placement_seconds = metrics.histogram(
            "placement_seconds", "Time to decide a placement.", ("stage",), PLACEMENT_BUCKETS
        )
        self.prompt_tokens = metrics.counter("prompt_tokens_total", "Prompt tokens placed.")
        self.expected_cached = metrics.counter(
            "expected_cached_tokens_total", "Prompt tokens that the chosen instance should not compute.", ("tier",)
        )
        self.measured_ttft = metrics.histogram("measured_ttft_seconds", "Prefill seconds that gateways measured.")
        self.ttft_error = metrics.histogram(
            "ttft_prediction_error_seconds", "Absolute difference of predicted and measured prefill seconds."
        )
        self.fenced = metrics.gauge("fenced_instances", "Incarnations that placements avoid.")
        self.quarantined_pairs = metrics.gauge("quarantined_pairs", "Pairs of instances that KV does not take now.")
        self.degraded = metrics.gauge("degraded", "Models for which a step of degraded service is on.", ("step",))
        self.reservations = metrics.gauge("reservations", "Live reservations.", ("kind",))
        self.index_blocks = metrics.gauge("index_blocks", "Entries of the block index.")
        self.index_bytes = metrics.gauge("index_bytes", "Memory of the block index.")
        self.queued_batches = metrics.gauge("kv_batches_queued", "KV event batches that wait to be applied.")
        self.running_snapshots = metrics.gauge("snapshots_running", "Snapshots being fetched.")
        self.replicas_followed = metrics.gauge("replicas_followed", "Other routers whose reservations are known.")
        self._replicas = metrics.counter(
            "replica_batches_total", "What other routers told of reservations, by what became of it.", ("outcome",)
        )
        self.etcd_connected = metrics.gauge("etcd_connected", "1 while etcd confirms the view of the mesh.")
        self._kv_events = metrics.counter("kv_batches_total", "KV event batches, by what became of them.", ("outcome",))
        self._ended = metrics.counter("reservations_ended_total", "Reservations ended, by reason.", ("reason",))
        self._evicted = metrics.counter("index_evicted_blocks_total", "Entries forgotten to keep the index's bound.")
        self._snapshot_blocks = metrics.counter("snapshot_blocks_total", "Blocks received in snapshots.")
        self._seen: Counter[tuple[str, str]] = Counter()

    def collect(
        self,
        index: BlockIndex,
        tracker: EventTracker,
        reservations: Reservations,
        fences: Fences,
        feed: KvFeed,
        fetcher: SnapshotFetcher,
        replicas: Replicas,
        *,
        etcd_connected: bool,
    ) -> None:
        """Copies what the parts count."""
        self.fenced.set(len(fences))
        self.index_blocks.set(index.num_blocks)
        self.index_bytes.set(index.bytes_used)
        self.queued_batches.set(feed.queued)
        self.running_snapshots.set(fetcher.running)
        self.etcd_connected.set(etcd_connected)
        self.replicas_followed.set(replicas.num_live)
        for outcome, total in replicas.counters.items():
            self._replicas.labels(outcome=outcome).inc(self._new("replica", outcome, total))
        for kind, count in reservations.count_by_kind().items():
            self.reservations.labels(kind=kind).set(count)
        outcomes = {**tracker.counters, "dropped": feed.dropped, "unreadable": feed.unreadable}
        for outcome, total in outcomes.items():
            self._kv_events.labels(outcome=outcome).inc(self._new("kv", outcome, total))
        for reason, total in reservations.ended.items():
            self._ended.labels(reason=reason).inc(self._new("ended", reason, total))
        self._evicted.inc(self._new("index", "evicted", index.evicted_blocks))
        self._snapshot_blocks.inc(self._new("index", "snapshot", fetcher.blocks))

    def _new(self, group: str, name: str, total: int) -> int:
        """What a count that only grows has gained since the last time."""
        gained = total - self._seen[(group, name)]
        self._seen[(group, name)] = total
        return gained
