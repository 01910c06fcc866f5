"""Keeps prefill and decode replicas between bounds by SLO load."""

__version__ = "0.1.0"
