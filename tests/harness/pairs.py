"""A cluster with a second of each worker and gateway: what breaks or is replaced has another one beside it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from harness.fixtures import kept
from harness.oracle import Oracle
from harness.running import RunningCluster

LIVENESS_S = 1.5
GATEWAYS = ("gateway-1", "gateway-2")
WORKER = {
    # Prompts take several steps, so that a fault finds requests at every stage.
    "max_num_batched_tokens": 64,
    "torch_threads": 1,
    "kv_memory_bytes": 32 << 20,
    "max_num_seqs": 16,
    "restart_limit": 100,
    "rank_watchdog_s": 5.0,
}
SETTINGS = {
    "all": {"liveness_s": LIVENESS_S, "drain_s": 10.0},
    "prefill": WORKER,
    "decode": WORKER,
    # It would replace what a test has killed.
    "autoscaler": {"actuator": "none"},
    # As long as a slow machine takes to start a worker again.
    "gateway": {"resume_wait_s": 300.0},
}


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Oracle:
    """Right answers of the tiny Llama."""
    torch.set_num_threads(1)
    return Oracle(checkpoint("llama"))


@pytest.fixture(scope="session")
def pairs_cluster(checkpoint: Callable[[str], Path]) -> Iterator[RunningCluster]:
    """Two of each worker and two gateways, for all tests that ask for them."""
    made = RunningCluster.start(checkpoint("llama"), prefill=2, decode=2, gateways=2, settings=SETTINGS)
    with kept(made):
        yield made


@pytest.fixture
def pairs(pairs_cluster: RunningCluster) -> RunningCluster:
    """The cluster of pairs, whole: each test leaves it so, and what a failed one left broken fails no other."""
    pairs_cluster.mend()
    return pairs_cluster
