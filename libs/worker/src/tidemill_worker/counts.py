"""Counters and gauges of a worker: one place names them all, for Prometheus and for GetWorkerStatus."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tidemill_mesh.metrics import Metrics


class WorkerCounts:
    """What happened here since the process started."""

    def __init__(self, metrics: Metrics) -> None:
        self.totals: Counter[str] = Counter()
        self._requests = metrics.counter("requests_total", "Requests ended.", ("stage", "outcome"))
        self._refused = metrics.counter("submits_refused_total", "Submits refused, by error code.", ("code",))
        self._tokens = metrics.counter("output_tokens_total", "Tokens sent to gateways.")
        self._bytes = metrics.counter("transfer_bytes_total", "KV bytes moved by the ranks.", ("direction",))
        self._hand_overs = metrics.counter("hand_overs_total", "Hand-overs, by side and outcome.", ("side", "outcome"))
        self._hand_over_s = metrics.histogram("hand_over_seconds", "Time from KVWanted to KVReady on decode.")
        self._restarts = metrics.counter("domain_failures_total", "Failures of cache domains.", ("domain",))
        self._events = metrics.counter("kv_event_batches_total", "KV event batches published.")
        self._l3 = metrics.counter("l3_blocks_total", "Blocks offloaded to and onboarded from kvstore.", ("outcome",))
        self._l3_errors = metrics.counter("l3_errors_total", "Failed calls to kvstore.", ("operation",))
        self._expired = metrics.counter("expired_total", "Holds and tickets ended by their deadline.", ("kind",))
        self._gateways = metrics.gauge("gateways_connected", "Connected gateways.")
        self._holds = metrics.gauge("holds", "What is held now, by kind; all 0 when nothing runs.", ("kind",))
        self._slo_load = metrics.gauge("slo_load", "Time over its target; 1 = at the target.", ("domain",))
        self._up = metrics.gauge("domain_up", "1 while the cache domain's ranks are ready.", ("domain",))

    def finished(self, stage: str, outcome: str) -> None:
        """A request ended here."""
        self.totals[f"requests_{stage}_{outcome}"] += 1
        self._requests.labels(stage, outcome).inc()

    def refused(self, code: str) -> None:
        """A submit was refused."""
        self.totals[f"submits_refused_{code.lower()}"] += 1
        self._refused.labels(code).inc()

    def tokens(self, count: int) -> None:
        """Tokens went to a gateway."""
        self.totals["output_tokens"] += count
        self._tokens.inc(count)

    def transferred(self, direction: str, size_bytes: int) -> None:
        """A rank sent or received a piece."""
        self.totals[f"transfer_bytes_{direction}"] += size_bytes
        self._bytes.labels(direction).inc(size_bytes)

    def hand_over(self, side: str, outcome: str) -> None:
        """A hand-over ended on one side."""
        self.totals[f"hand_overs_{side}_{outcome}"] += 1
        self._hand_overs.labels(side, outcome).inc()

    def hand_over_took(self, seconds: float) -> None:
        """Time that a decode request waited for its KV."""
        self._hand_over_s.observe(seconds)

    def domain_failed(self, domain: int) -> None:
        """A cache domain failed."""
        self.totals["domain_failures"] += 1
        self._restarts.labels(str(domain)).inc()

    def event_batch(self) -> None:
        """A batch of KV events was published."""
        self.totals["kv_event_batches"] += 1
        self._events.inc()

    def l3_blocks(self, outcome: str, blocks: int) -> None:
        """Blocks were stored, present, dropped, failed, onboarded or missed."""
        if blocks:
            self.totals[f"l3_blocks_{outcome}"] += blocks
            self._l3.labels(outcome).inc(blocks)

    def l3_error(self, operation: str) -> None:
        """A call to a kvstore failed."""
        self.totals[f"l3_errors_{operation}"] += 1
        self._l3_errors.labels(operation).inc()

    def expired(self, kind: str) -> None:
        """A hold, ticket or request was ended by its deadline."""
        self.totals[f"expired_{kind}"] += 1
        self._expired.labels(kind).inc()

    def state(self, holds: Mapping[str, int], domains_up: Sequence[bool], slo_loads: Mapping[int, float]) -> None:
        """What the gauges show."""
        for kind, count in holds.items():
            self._holds.labels(kind).set(count)
        for index, up in enumerate(domains_up):
            self._up.labels(str(index)).set(up)
        for index, slo_load in slo_loads.items():
            self._slo_load.labels(str(index)).set(slo_load)

    def gateways(self, count: int) -> None:
        """So many gateways are connected now."""
        self._gateways.set(count)
