"""Torch-free cache logic: block hashes, prefix tree, block pool, index, events, tiers."""

__version__ = "0.1.0"
