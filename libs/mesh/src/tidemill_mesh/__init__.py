"""What every service process is made of: config, server, channels, errors, bus, membership, metrics, logs, drain."""

__version__ = "0.1.0"
