"""What the gateway measures."""

from collections.abc import Callable

from tidemill_gateway.live_request import LiveRequest
from tidemill_gateway.overload import NAME
from tidemill_mesh.metrics import Metrics

TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


class GatewayMetrics:
    """Metrics of requests; label values are bounded."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._requests = metrics.counter("requests_total", "Requests by outcome.", ("outcome",))
        self._prompt_tokens = metrics.counter("prompt_tokens_total", "Prompt tokens of ended requests.")
        self._cached_tokens = metrics.counter("cached_tokens_total", "Prompt tokens not computed again.", ("tier",))
        self._output_tokens = metrics.counter("output_tokens_total", "Output tokens of ended requests.")
        self._retries = metrics.counter("retries_total", "Attempts beyond the first, of all choices.")
        self._degraded = metrics.counter("degraded_requests_total", "Requests placed without a part.", ("part",))
        self._ttft_s = metrics.histogram("ttft_seconds", "Arrival to first token.")
        self._tpot_s = metrics.histogram("tpot_seconds", "Mean time for an output token.", buckets=TPOT_BUCKETS)
        self._total_s = metrics.histogram("request_seconds", "Arrival to end.")
        self.slow_clients = metrics.counter("slow_clients_total", "Clients cut off because they did not read.")
        self._refusals = metrics.counter("tenant_refusals_total", "Requests beyond a tenant's limit.", ("limit",))
        self._steps = metrics.gauge("degraded", "1 while a step of degraded service is on.", ("step",))
        self._steps.labels(NAME).set(0)
        self._shed = metrics.counter("shed_requests_total", "Requests refused while degraded.", ("step",))
        self._refused_bodies = metrics.counter("refused_bodies_total", "Request bodies not taken.", ("reason",))
        self.unknown_fields = metrics.counter("unknown_fields_total", "Unknown fields in HTTP bodies.")

    def show_state(self, state: Callable[[], dict[str, int]]) -> None:
        """A gauge for each entry, read when somebody looks."""
        for name in state():
            gauge = self._metrics.gauge(name, f"Now: {name.replace('_', ' ')}.")
            gauge.set_function(lambda name=name: state()[name])  # type: ignore[misc]

    def tenant_refused(self, limit: str) -> None:
        """Counts a request that was beyond one of its tenant's limits."""
        self._refusals.labels(limit).inc()

    def body_refused(self, reason: str) -> None:
        """Counts a request body that found no room, or came too slowly."""
        self._refused_bodies.labels(reason).inc()

    def degraded(self, is_on: bool) -> None:
        """Low classes are refused from now on, or no more."""
        self._steps.labels(NAME).set(is_on)

    def shed(self, step: str) -> None:
        """Counts a request that was refused."""
        self._shed.labels(step).inc()

    def finished(self, outcome: str, request: LiveRequest | None) -> None:
        """Counts a request at its end; `request` is None when it never started."""
        self._requests.labels(outcome).inc()
        if request is None:
            return
        usage, times = request.final
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._output_tokens.inc(usage.completion_tokens)
        for tier, tokens in (("l1", usage.cached_l1), ("l2", usage.cached_l2), ("l3", usage.cached_l3)):
            if tokens:
                self._cached_tokens.labels(tier).inc(tokens)
        retries = sum(max(0, run.attempt - 1) for run in request.generation.runs)
        if retries:
            self._retries.inc(retries)
        if request.placement.degraded:
            self._degraded.labels(request.placement.degraded).inc()
        if times.ttft_s:
            self._ttft_s.observe(times.ttft_s)
        decoded = usage.completion_tokens - len(request.pipes)
        if outcome == "ok" and decoded > 0:
            self._tpot_s.observe((times.total_s - times.ttft_s) * len(request.pipes) / decoded)
        self._total_s.observe(times.total_s)
