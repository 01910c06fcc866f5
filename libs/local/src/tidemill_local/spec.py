"""What a cluster consists of, and the command line of each of its services. Pure: nothing is started here."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidemill_local.home import Home

SERVICES = ("router", "kvstore", "prefill", "decode", "gateway", "autoscaler")
WORKERS = ("prefill", "decode")

# Of each worker's rank; taken from the system as it fills.
L2_MEMORY_BYTES = 512 << 20

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Counts, ports and settings; it is also the state file's content, so all of it is JSON."""

    model: str
    # Name under which the model is served; empty: the folder's.
    model_name: str = ""
    aliases: str = ""
    host: str = "127.0.0.1"
    # 0: free ports (the first gateway's; further ones always take free ports).
    grpc_port: int = 50051
    http_port: int = 8000
    etcd_port: int = 0
    nats_port: int = 0
    routers: int = 1
    kvstores: int = 1
    prefill: int = 1
    decode: int = 1
    gateways: int = 1
    autoscalers: int = 1
    # How many more of each kind of worker the autoscaler may start.
    spare_workers: int = 1
    # Further settings by service, "all" for every one: {"prefill": {"tp_size": 2}}.
    settings: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        return self.model_name or Path(self.model).name

    def count(self, service: str) -> int:
        """Instances of a service."""
        counts = {"router": self.routers, "kvstore": self.kvstores, "gateway": self.gateways}
        counts |= {"prefill": self.prefill, "decode": self.decode, "autoscaler": self.autoscalers}
        return counts[service]

    def instances(self) -> list[tuple[str, str]]:
        """(service, instance) in the order of their start."""
        return [(service, f"{service}-{i}") for service in SERVICES for i in range(1, self.count(service) + 1)]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Addresses:
    """Where the servers of a running cluster are."""

    etcd: str
    nats: str


def service_argv(spec: ClusterSpec, home: Home, addresses: Addresses, service: str, instance: str) -> list[str]:
    """The command line of one instance."""
    settings: dict[str, Setting] = {"instance": instance, "host": spec.host}
    settings |= {"etcd": addresses.etcd, "nats": addresses.nats, "run_dir": str(home.run)}
    settings |= service_settings(spec, home, service, instance)
    settings |= spec.settings.get("all", {})
    settings |= spec.settings.get(service, {})
    return [sys.executable, "-m", f"tidemill_{service}", *flags(settings)]


def service_settings(spec: ClusterSpec, home: Home, service: str, instance: str) -> dict[str, Setting]:
    """What a service is told beside the settings that all have."""
    secret = f"@{home.secret_file}"
    match service:
        case "gateway":
            first = instance == "gateway-1"
            ports: dict[str, Setting] = {"port": spec.grpc_port, "http_api_port": spec.http_port}
            return {"cache_secret": secret, **(ports if first else dict.fromkeys(ports, 0))}
        case "prefill" | "decode":
            return {
                "model": spec.model,
                "model_name": spec.served_name,
                "aliases": spec.aliases,
                "cache_secret": secret,
                "l2_memory_bytes": L2_MEMORY_BYTES,
            }
        case "kvstore":
            return {"data_dir": str(home.data / instance)}
        case "autoscaler":
            bounds = {
                f"{bound}_{role}": spec.count(role) + (spec.spare_workers if bound == "max" else 0)
                for role in WORKERS
                for bound in ("min", "max")
            }
            files = {"templates": home.templates_file, "log_dir": home.logs, "bounds_file": home.bounds_file}
            return {**bounds, **{name: str(path) for name, path in files.items()}, "model": spec.served_name}
    return {}


def flags(settings: Mapping[str, Setting]) -> list[str]:
    """Settings as command-line flags; an empty text is a setting's absence."""
    written = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
    return [f"--{name.replace('_', '-')}={value}" for name, value in written.items() if value]


def worker_templates(spec: ClusterSpec, home: Home, addresses: Addresses) -> dict[str, list[str]]:
    """For the autoscaler: by role, a worker's command line; `{instance}` stands for the id it chooses."""
    return {role: service_argv(spec, home, addresses, role, "{instance}") for role in WORKERS}
