"""What every Tidemill service process is made of: configuration, server, channels, errors, bus, membership, metrics, logs, drain."""

__version__ = "0.1.0"
