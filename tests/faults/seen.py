"""The table of faults in docs/operations.md, and whether a fault shows what its row says."""

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from harness.running import RunningCluster

OPERATIONS = Path(__file__).resolve().parents[2] / "docs/operations.md"
POLL_S = 0.2
PATIENCE_S = 180.0
SCRAPE_S = 60.0
INSTANCES_OF = {"worker": ("prefill", "decode"), "rank": ("prefill", "decode"), "all": ("",), "its own": ("",)}
"""Beginnings of the instances that the table means; a rank writes into its service's log."""

# An autoscaler that is gone says nothing, and nobody misses it.
ROW_OF = {
    "decode": "worker frozen, or its line cut",
    "prefill": "worker frozen, or its line cut",
    "router": "router killed, frozen or cut off",
    "kvstore": "kvstore killed, frozen or cut off",
    "nats": "NATS killed, frozen or cut off",
    "etcd": "etcd killed, frozen or cut off",
}
"""What the table calls it when a process is frozen or cut off; also when one is killed that is no worker."""

_METRIC = re.compile(r"(?P<service>\w+) `(?P<name>\w+)(?:\{(?P<label>[^`]*)\})?`(?: = (?P<value>\d+))?")


@dataclass(frozen=True)
class Row:
    """One fault of the table."""

    fault: str
    noticed: str
    log: str
    metric: str
    to_do: str

    def log_lines(self) -> dict[str, list[str]]:
        """By service, lines of which at least one is written."""
        parts = [part.partition(":") for part in self.log.split("; ") if part]
        return {service: re.findall(r"`([^`]+)`", lines) for service, _, lines in parts}

    def first_metric(self) -> re.Match[str] | None:
        """The one that moves, or has the value that is named, in any case."""
        return _METRIC.search(self.metric)


def rows() -> list[Row]:
    """All faults."""
    section = OPERATIONS.read_text().partition("## Faults")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[1:]]


class Watch:
    """What logs and metrics said before a fault."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._logged_bytes = {path.name: path.stat().st_size for path in cluster.home.logs.glob("*.log")}
        self._metrics = {name: scrape(cluster, name) for name in cluster.launched()}
        self._pids = {name: cluster.cluster.record(name).pid for name in cluster.launched()}

    async def assert_seen(self, fault: str) -> None:
        """Waits until its row has come true: a log line of each service that is named, and the first metric."""
        [row] = [row for row in rows() if row.fault == fault]
        end = time.monotonic() + PATIENCE_S
        while missing := await asyncio.to_thread(self._missing, row):
            assert time.monotonic() < end, f"{fault}: {missing}"
            await asyncio.sleep(POLL_S)

    async def assert_loss_of(self, victim: str) -> None:
        """As `assert_seen`, for a process that is frozen or cut off, or a killed one that is no worker."""
        fault = ROW_OF.get(victim.partition("-")[0])
        if fault is not None:
            await self.assert_seen(fault)

    def _missing(self, row: Row) -> str:
        for service, lines in row.log_lines().items():
            written = self._written(service)
            if not any(line in written for line in lines):
                return f"no {service} has logged {lines}"
        metric = row.first_metric()
        return "" if metric is None or self._moved(metric) else f"{row.metric} has not moved"

    def _written(self, service: str) -> str:
        """All that the service's instances have logged since."""
        texts = []
        for path in self._cluster.home.logs.glob("*.log"):
            if path.name.startswith(INSTANCES_OF.get(service, (service,))):
                with path.open("rb") as file:
                    file.seek(self._logged_bytes.get(path.name, 0))
                    texts.append(file.read().decode(errors="replace"))
        return "\n".join(texts)

    def _moved(self, metric: re.Match[str]) -> bool:
        """At a process that has not been started again: what a new one counts began with it."""
        for instance in self._cluster.launched():
            pid = self._cluster.cluster.record(instance).pid
            if not instance.startswith(INSTANCES_OF.get(metric["service"], (metric["service"],))):
                continue
            if pid != self._pids.get(instance, pid):
                continue
            name, label = f"tidemill_{instance.partition('-')[0]}_{metric['name']}", metric["label"] or ""
            now = total(scrape(self._cluster, instance), name, label)
            before = total(self._metrics.get(instance, []), name, label) or 0.0
            if now is not None and (now == float(metric["value"]) if metric["value"] else now != before):
                return True
        return False


def scrape(cluster: RunningCluster, instance: str) -> list[str]:
    """An instance's metrics; none while it does not answer."""
    try:
        with urlopen(f"http://{cluster.cluster.http_endpoint(instance)}/metrics", timeout=SCRAPE_S) as response:
            text: str = response.read().decode()
    except (OSError, KeyError):
        return []
    return text.splitlines()


def total(lines: list[str], name: str, label: str = "") -> float | None:
    """Sum of a metric over its labels, or over those with this one; None if the instance offers none of that name."""
    found = []
    for line in lines:
        key, _, value = line.rpartition(" ")
        base, _, labels = key.partition("{")
        # A histogram's number of calls stands for it.
        if base in (name, f"{name}_count") and label in labels:
            found.append(float(value))
    return sum(found) if found else None
