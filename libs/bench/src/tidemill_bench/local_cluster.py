"""Clusters that benchmarks start on free ports and stop again."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill_bench.options import Options
from tidemill_local import health, servers
from tidemill_local.cluster import LocalCluster, running_addresses
from tidemill_local.home import Home
from tidemill_local.models import ensure_smollm2
from tidemill_local.spec import ClusterSpec, Setting


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running cluster as a load generator sees it."""

    cluster: LocalCluster
    host: str
    http_port: int
    grpc_endpoint: str
    model: str
    model_dir: Path


@contextmanager
def running_cluster(spec: ClusterSpec) -> Iterator[LocalCluster]:
    """Runs a cluster in a temporary home."""
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        cluster = LocalCluster(Home(Path(folder)), spec, say=lambda text: None)
        cluster.up()
        try:
            yield cluster
        finally:
            cluster.down()


@contextmanager
def real_model_cluster(options: Options, settings: Mapping[str, Mapping[str, Setting]]) -> Iterator[Served]:
    """One prefill and one decode instance with SmolLM2, no autoscaler."""
    model_dir = ensure_smollm2(Home(options.home))
    spec = ClusterSpec(
        model=str(model_dir), model_name="smollm2", grpc_port=0, http_port=0, autoscalers=0, settings=settings
    )
    with running_cluster(spec) as cluster:
        host, _, port = cluster.http_endpoint("gateway-1").rpartition(":")
        yield Served(
            cluster=cluster,
            host=host,
            http_port=int(port),
            grpc_endpoint=cluster.endpoint("gateway-1"),
            model="smollm2",
            model_dir=model_dir,
        )


@contextmanager
def emulated_cluster(tokenizer: Path, step_s: float) -> Iterator[Served]:
    """Real gateway, router, etcd and NATS in front of one emulated prefill and one emulated decode worker."""
    spec = ClusterSpec(model="emulated", grpc_port=0, http_port=0, kvstores=0, prefill=0, decode=0, autoscalers=0)
    with running_cluster(spec) as cluster:
        addresses = running_addresses(cluster.home)
        for role in ("prefill", "decode"):
            argv = [sys.executable, "-m", "tidemill_bench.emulated_worker", f"--role={role}", f"--instance={role}-1"]
            argv += [f"--etcd={addresses.etcd}", f"--nats={addresses.nats}", f"--step-s={step_s}"]
            argv += [f"--tokenizer={tokenizer}", f"--run-dir={cluster.home.run}"]
            servers.launch(f"{role}-1", argv, cluster.home)
        gateway = cluster.endpoint("gateway-1")
        api = cluster.http_endpoint("gateway-1")
        health.wait_for(cluster.record("gateway-1"), "ready", lambda: health.gateway_ready(api), timeout_s=30)
        host, _, port = api.rpartition(":")
        yield Served(
            cluster=cluster,
            host=host,
            http_port=int(port),
            grpc_endpoint=gateway,
            model="emulated",
            model_dir=tokenizer.parent,
        )
