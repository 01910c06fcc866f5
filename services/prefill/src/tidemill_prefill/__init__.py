"""The prefill worker."""

__version__ = "0.1.0"
