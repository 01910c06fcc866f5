"""Workloads, load generator, benchmarks and their reports."""

__version__ = "0.1.0"
