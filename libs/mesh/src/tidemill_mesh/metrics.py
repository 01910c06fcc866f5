"""Prometheus metrics of one process on a registry of their own, with one naming rule."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

M = TypeVar("M", Counter, Gauge, Histogram)


class Metrics:
    """Makes metrics named tidemill_<service>_<name>; asking for a name again gives the same metric."""

    def __init__(self, service: str, instance: str, version: str = "") -> None:
        self.service = service
        self.registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        info = self.gauge("info", "1; names the process.", ("instance", "version"))
        info.labels(instance=instance, version=version).set(1)

    def counter(self, name: str, doc: str, labels: Sequence[str] = ()) -> Counter:
        """A counter; its name ends with _total."""
        return self._get(Counter, name, lambda full: Counter(full, doc, labels, registry=self.registry))

    def gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> Gauge:
        """A gauge."""
        return self._get(Gauge, name, lambda full: Gauge(full, doc, labels, registry=self.registry))

    def histogram(
        self, name: str, doc: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS
    ) -> Histogram:
        """A histogram; buckets are of seconds unless given."""
        return self._get(
            Histogram, name, lambda full: Histogram(full, doc, labels, registry=self.registry, buckets=tuple(buckets))
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _get(self, kind: type[M], name: str, make: Callable[[str], M]) -> M:
        full = name if name.startswith("tidemill_") else f"tidemill_{self.service}_{name}"
        metric = self._made.get(full)
        if metric is None:
            metric = self._made[full] = make(full)
        assert isinstance(metric, kind), f"metric {full} exists as another kind"
        return metric
