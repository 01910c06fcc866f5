"""What the fault tests share: a cluster with a second of each worker and gateway, and right answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.oracle import Oracle, prompts_of
from faults.wave import MakeWave, Wave
from harness.fixtures import LIVE
from harness.running import RunningCluster

LIVENESS_S = 1.5
GATEWAYS = ("gateway-1", "gateway-2")
STREAMS = 12
PROMPT_TOKENS = 300
OUTPUT_TOKENS = 100
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
}


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Oracle:
    """Right answers of the tiny Llama."""
    torch.set_num_threads(1)
    return Oracle(checkpoint("llama"))


@pytest.fixture(scope="module")
def pairs(checkpoint: Callable[[str], Path]) -> Iterator[RunningCluster]:
    """Two of each worker and two gateways, for all cases of a module: each case leaves it whole again."""
    made = RunningCluster.start(checkpoint("llama"), prefill=2, decode=2, gateways=2, settings=SETTINGS)
    LIVE.append(made)
    yield made
    LIVE.remove(made)
    made.remove()


@pytest.fixture
def wave(pairs: RunningCluster, oracle: Oracle, request: pytest.FixtureRequest) -> MakeWave:
    """Makes waves of prompts that are new to the cluster."""
    made = 0

    def make(streams: int = STREAMS, output_tokens: int = OUTPUT_TOKENS, **options: Any) -> Wave:
        nonlocal made
        made += 1
        prompts = prompts_of(f"{request.node.name}/{made}", streams, PROMPT_TOKENS)
        answers = oracle.answers(prompts, output_tokens)
        return Wave(pairs, prompts, answers, **{"gateways": GATEWAYS, **options})

    return make
