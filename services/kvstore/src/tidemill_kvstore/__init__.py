"""L3 of the KV cache: blocks on local SSD."""

__version__ = "0.1.0"
