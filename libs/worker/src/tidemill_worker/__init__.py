"""The torch-free body of prefill and decode: rank supervision, gateway streams, hand-over, drain."""

__version__ = "0.1.0"
