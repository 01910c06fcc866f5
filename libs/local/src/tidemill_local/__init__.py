"""Processes of one machine: etcd, NATS, service processes, a whole local cluster, and the tidemill command."""

__version__ = "0.1.0"
