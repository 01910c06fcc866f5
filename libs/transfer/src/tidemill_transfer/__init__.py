"""Moves bytes between workers: UCX agent, named TCP fallback, transfer plans."""

__version__ = "0.1.0"
