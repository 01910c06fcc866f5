"""What the fault tests share: waves of streams on the cluster of pairs, and the cluster whose lines may be cut."""

from typing import Any

import pytest
from faults.spread import host, library, line, namespace, ports, servers, shim, spread, spread_cluster, spread_wave
from faults.wave import MakeWave, Wave
from harness.oracle import Oracle
from harness.pairs import GATEWAYS
from harness.running import RunningCluster

__all__ = [
    "host",
    "library",
    "line",
    "namespace",
    "ports",
    "servers",
    "shim",
    "spread",
    "spread_cluster",
    "spread_wave",
    "wave",
]

STREAMS = 12
PROMPT_TOKENS = 300
OUTPUT_TOKENS = 100


@pytest.fixture
def wave(pairs: RunningCluster, oracle: Oracle, request: pytest.FixtureRequest) -> MakeWave:
    """Makes waves of prompts that are new to the cluster."""
    made = 0

    def make(streams: int = STREAMS, output_tokens: int = OUTPUT_TOKENS, **options: Any) -> Wave:
        nonlocal made
        made += 1
        prompts, answers = oracle.cases(f"{request.node.name}/{made}", streams, PROMPT_TOKENS, output_tokens)
        return Wave(pairs, prompts, answers, **{"gateways": GATEWAYS, **options})

    return make
