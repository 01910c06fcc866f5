"""Offers the harness to every test below this folder."""

from harness.fixtures import checkpoint, cluster, pytest_runtest_makereport, quiet, smollm2, start_cluster
from harness.pairs import oracle, pairs, pairs_cluster

__all__ = [
    "checkpoint",
    "cluster",
    "oracle",
    "pairs",
    "pairs_cluster",
    "pytest_runtest_makereport",
    "quiet",
    "smollm2",
    "start_cluster",
]
