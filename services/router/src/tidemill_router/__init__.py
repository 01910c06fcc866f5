"""The cache-aware router: places prefill and decode by predicted seconds."""

__version__ = "0.1.0"
