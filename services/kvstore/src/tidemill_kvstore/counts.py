"""The kvstore's metrics."""

from collections.abc import Mapping

from tidemill_kvstore.block_store import BlockStore
from tidemill_mesh.metrics import Metrics

_STORE_COUNTERS = {
    "written_blocks": "Blocks written to disk.",
    "written_bytes": "Bytes written to disk.",
    "evicted_blocks": "Blocks deleted to make room.",
    "kept_blocks": "Blocks that outlived their segment because they were read.",
    "compacted_blocks": "Blocks moved out of segments that were mostly dead.",
    "over_quota_blocks": "Blocks dropped because their tenant has too many.",
    "damaged_blocks": "Blocks whose bytes on disk were not those that were written.",
    "missing_segments": "Segment files that somebody else deleted.",
    "disk_errors": "Writes that the disk refused, reads that failed without a word about the block.",
    "bad_records": "Damaged or cut records met at the start.",
    "truncated_bytes": "Bytes of cut records removed at the start.",
}


class Counts:
    """Counters by call, and gauges and counters of the store at each `show`."""

    def __init__(self, metrics: Metrics) -> None:
        self.totals: dict[str, int] = {}
        self._calls = metrics.counter("calls_total", "Puts and gets, by outcome.", ("call", "outcome"))
        self._blocks = metrics.counter("blocks_total", "Blocks of puts and gets, by outcome.", ("outcome",))
        self._bytes = metrics.counter("bytes_total", "Bytes received and sent.", ("direction",))
        self._seconds = metrics.histogram("call_seconds", "Time of a put, or of a get with its transfer.", ("call",))
        self._store = {name: metrics.counter(f"{name}_total", doc) for name, doc in _STORE_COUNTERS.items()}
        self._used = metrics.gauge("used_bytes", "Bytes on disk.")
        self._capacity = metrics.gauge("capacity_bytes", "Most bytes on disk.")
        self._stored_blocks = metrics.gauge("stored_blocks", "Blocks that can be read.")
        self._inflight = metrics.gauge("inflight_bytes", "Memory held by puts and gets.")
        self._waiting = metrics.gauge("waiting_calls", "Puts and gets that wait for memory.")
        self._shown: dict[str, int] = {}

    def call(self, call: str, outcome: str, seconds: float) -> None:
        """A put or get has ended."""
        self._calls.labels(call=call, outcome=outcome).inc()
        self._seconds.labels(call=call).observe(seconds)
        self._add(f"{call}s_{outcome}", 1)

    def blocks(self, outcome: str, count: int) -> None:
        """Blocks stored, refused, hit or missed."""
        if count:
            self._blocks.labels(outcome=outcome).inc(count)
            self._add(f"blocks_{outcome}", count)

    def moved(self, direction: str, size_bytes: int) -> None:
        """Bytes have been received or sent."""
        self._bytes.labels(direction=direction).inc(size_bytes)
        self._add(f"bytes_{direction}", size_bytes)

    def show(self, store: BlockStore, holds: Mapping[str, int]) -> None:
        """Brings gauges and the store's own counters up to date."""
        for name, counter in self._store.items():
            counter.inc(store.counters[name] - self._shown.get(name, 0))
            self._shown[name] = store.counters[name]
        self._used.set(store.used_bytes)
        self._capacity.set(store.capacity_bytes)
        self._stored_blocks.set(store.num_blocks)
        self._inflight.set(holds["inflight_bytes"])
        self._waiting.set(holds["waiting"])

    def _add(self, name: str, count: int) -> None:
        self.totals[name] = self.totals.get(name, 0) + count
