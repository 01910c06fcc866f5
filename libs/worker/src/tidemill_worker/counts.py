"""Counters and gauges of a worker: one place names them all, for Prometheus and for GetWorkerStatus."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tidemill.mesh.v1 import events_pb2
from tidemill_mesh.metrics import Metrics


class WorkerCounts:
    """What happened here since the process started."""

    def __init__(self, metrics: Metrics) -> None:
        self.totals: Counter[str] = Counter()
        self._requests = metrics.counter("requests_total", "Requests ended.", ("stage", "outcome"))
        self._refused = metrics.counter("submits_refused_total", "Submits refused, by error code.", ("code",))
        self._tokens = metrics.counter("output_tokens_total", "Tokens sent to gateways.")
        self._prompt = metrics.counter("prompt_tokens_total", "Prompt tokens of requests that were scheduled here.")
        self._cached = metrics.counter("cached_tokens_total", "Prompt tokens that were not computed again.", ("tier",))
        self._bytes = metrics.counter("transfer_bytes_total", "KV bytes moved by the ranks.", ("direction",))
        self._hand_overs = metrics.counter("hand_overs_total", "Hand-overs, by side and outcome.", ("side", "outcome"))
        self._hand_over_s = metrics.histogram("hand_over_seconds", "Time from KVWanted to KVReady on decode.")
        self._damaged = metrics.counter(
            "damaged_transfers_total", "Transfers that came with other bytes than were sent."
        )
        self._quarantined = metrics.gauge("quarantined_sources", "Instances from which nothing should come for now.")
        self._undelivered = metrics.counter(
            "undelivered_transfers_total", "Hand-overs whose bytes did not arrive here in time."
        )
        self._silent = metrics.gauge("silent_sources", "Domains whose bytes do not arrive here, which are left alone.")
        self._restarts = metrics.counter("domain_failures_total", "Failures of cache domains.", ("domain",))
        self._events = metrics.counter("kv_event_batches_total", "KV event batches published.")
        self._l3 = metrics.counter("l3_blocks_total", "Blocks offloaded to and onboarded from kvstore.", ("outcome",))
        self._l3_errors = metrics.counter("l3_errors_total", "Failed calls to kvstore.", ("operation",))
        self._l2 = metrics.counter("l2_blocks_total", "Blocks of L2, by what became of them.", ("outcome",))
        self._one_way = metrics.gauge("one_way_tier", "1 while a tier takes blocks and gives none.", ("tier",))
        self._peer = metrics.counter(
            "peer_blocks_total", "Blocks sent to and fetched from other instances.", ("outcome",)
        )
        self._onboard_s = metrics.histogram("onboard_seconds", "Time of an onboarding that brought blocks.")
        self._sources = metrics.counter("source_failures_total", "Sources that failed to give blocks.", ("source",))
        self._l2_blocks = metrics.gauge("l2_used_blocks", "Blocks in L2.", ("domain",))
        self._l2_slots = metrics.gauge("l2_capacity_blocks", "Blocks that L2 has room for.", ("domain",))
        self._expired = metrics.counter("expired_total", "Holds and tickets ended by their deadline.", ("kind",))
        self._forgotten = metrics.counter(
            "forgotten_total", "Requests that one side had and the other did not, by who had lost them.", ("by",)
        )
        self._gateways = metrics.gauge("gateways_connected", "Connected gateways.")
        self._holds = metrics.gauge("holds", "What is held now, by kind; all 0 when nothing runs.", ("kind",))
        self._slo_load = metrics.gauge("slo_load", "Time over its target; 1 = at the target.", ("domain",))
        self._side_load = metrics.gauge(
            "side_slo_load", "Time to first token and time per output token over their targets.", ("domain", "side")
        )
        self._paused = metrics.gauge(
            "admission_paused", "1 while the pool is past its high-water mark: routers send elsewhere.", ("domain",)
        )
        self._degraded = metrics.gauge("degraded", "1 while a step of degraded service is on.", ("domain", "step"))
        self._runaways = metrics.counter("runaways_total", "Outputs that repeat themselves or far outgrow their class.")
        self._moves = metrics.counter("moves_total", "Running requests offered to others, and the end.", ("outcome",))
        self._up = metrics.gauge("domain_up", "1 while the cache domain's ranks are ready.", ("domain",))
        self._backend = metrics.gauge("backend_info", "1; names what the ranks compute by.", ("domain", "backend"))

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

    def scheduled(self, prompt_tokens: int, cached: Mapping[str, int]) -> None:
        """A prompt was scheduled, with so many tokens cached by tier."""
        self.totals["prompt_tokens"] += prompt_tokens
        self._prompt.inc(prompt_tokens)
        for tier, tokens in cached.items():
            if tokens:
                self.totals[f"cached_tokens_{tier}"] += tokens
                self._cached.labels(tier).inc(tokens)

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

    def damaged_transfer(self) -> None:
        """Bytes of another instance were not the ones it sent."""
        self.totals["damaged_transfers"] += 1
        self._damaged.inc()

    def quarantined(self, sources: int) -> None:
        """So many instances are in quarantine here now."""
        self._quarantined.set(sources)

    def undelivered_transfer(self) -> None:
        """Bytes of another instance did not arrive."""
        self.totals["undelivered_transfers"] += 1
        self._undelivered.inc()

    def silent(self, sources: int) -> None:
        """The bytes of so many domains do not arrive here now."""
        self._silent.set(sources)

    def domain_failed(self, domain: int) -> None:
        """A cache domain failed."""
        self.totals["domain_failures"] += 1
        self._restarts.labels(str(domain)).inc()

    def event_batch(self) -> None:
        """A batch of KV events was published."""
        self.totals["kv_event_batches"] += 1
        self._events.inc()

    def l3_blocks(self, outcome: str, blocks: int) -> None:
        """Blocks were stored, present, dropped or failed; or asked for, found, onboarded or missed."""
        if blocks:
            self.totals[f"l3_blocks_{outcome}"] += blocks
            self._l3.labels(outcome).inc(blocks)

    def l2_blocks(self, outcome: str, blocks: int) -> None:
        """Blocks were saved, asked for, found, onboarded, evicted, dropped, damaged, or had left L1 too soon."""
        if blocks:
            self.totals[f"l2_blocks_{outcome}"] += blocks
            self._l2.labels(outcome).inc(blocks)

    def peer_blocks(self, outcome: str, blocks: int) -> None:
        """Blocks were sent to a peer, onboarded from one, or arrived damaged."""
        if blocks:
            self.totals[f"peer_blocks_{outcome}"] += blocks
            self._peer.labels(outcome).inc(blocks)

    def onboard_took(self, seconds: float) -> None:
        """Time that a request waited for blocks that came."""
        self._onboard_s.observe(seconds)

    def source_failed(self, kind: str) -> None:
        """A source of blocks failed: l2, peer, or a store."""
        label = kind if kind in ("l2", "peer") else "l3"
        self.totals[f"source_failures_{label}"] += 1
        self._sources.labels(label).inc()

    def l2_use(self, use: Mapping[int, tuple[int, int]]) -> None:
        """Blocks in L2 and room for them, by domain."""
        for domain, (blocks, slots) in use.items():
            self._l2_blocks.labels(str(domain)).set(blocks)
            self._l2_slots.labels(str(domain)).set(slots)

    def one_way(self, tier: str, is_one_way: bool) -> None:
        """Whether a tier only takes blocks now."""
        self.totals[f"one_way_{tier}"] = int(is_one_way)
        self._one_way.labels(tier).set(is_one_way)

    def l3_error(self, operation: str) -> None:
        """A call to a kvstore failed."""
        self.totals[f"l3_errors_{operation}"] += 1
        self._l3_errors.labels(operation).inc()

    def expired(self, kind: str) -> None:
        """A hold, ticket or request was ended by its deadline."""
        self.totals[f"expired_{kind}"] += 1
        self._expired.labels(kind).inc()

    def forgotten(self, by: str, requests: int = 1) -> None:
        """A rank, service or gateway had lost requests that the other side had, or credit; or a stream had ended."""
        self.totals[f"forgotten_{by}"] += requests
        self._forgotten.labels(by).inc(requests)

    def loads(self, reports: Sequence[events_pb2.LoadReport]) -> None:
        """What the latest load reports say of each domain."""
        for report in reports:
            domain = str(report.domain.domain)
            self._slo_load.labels(domain).set(report.slo_load)
            self._side_load.labels(domain, "ttft").set(report.ttft_slo_load)
            self._side_load.labels(domain, "tpot").set(report.tpot_slo_load)
            self._paused.labels(domain).set(report.admission_paused)
            self._degraded.labels(domain, "small_chunks").set("small_chunks" in report.degraded)

    def runaway(self) -> None:
        """An output was found to repeat itself, or to be far longer than usual."""
        self.totals["runaways"] += 1
        self._runaways.inc()

    def moved(self, outcome: str) -> None:
        """A running request was offered to other instances, moved, or stays: no_room, not_now, failed, expired."""
        self.totals[f"moves_{outcome}"] += 1
        self._moves.labels(outcome).inc()

    def state(self, holds: Mapping[str, int], domains_up: Sequence[bool]) -> None:
        """What the gauges show."""
        for kind, count in holds.items():
            self._holds.labels(kind).set(count)
        for index, up in enumerate(domains_up):
            self._up.labels(str(index)).set(up)

    def backend(self, domain: int, name: str) -> None:
        """A domain's ranks are ready and compute by so named a backend."""
        self._backend.labels(str(domain), name).set(1)

    def gateways(self, count: int) -> None:
        """So many gateways are connected now."""
        self._gateways.set(count)
