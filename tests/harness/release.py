"""The last release in a work tree of its own, so that its processes run beside today's (docs/adr/0030)."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.running import RunningCluster
from tidemill_local.cluster import running_addresses

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
CONSTRAINTS = "constraints-cpu.txt"

# Run by the release's own code: its flags are what it knows, whatever today's code would pass.
COMMAND_LINE = """
import json, sys
from dataclasses import asdict, fields
from pathlib import Path
from tidemill_local.home import Home
from tidemill_local.spec import Addresses, ClusterSpec, service_argv

given = json.load(sys.stdin)
known = {field.name for field in fields(ClusterSpec)}
spec = ClusterSpec(**{name: value for name, value in given["spec"].items() if name in known})
home, addresses = Home(Path(given["home"])), Addresses(**given["addresses"])
json.dump(service_argv(spec, home, addresses, given["service"], given["instance"]), sys.stdout)
"""


class ReleaseMissing(Exception):
    """The last release's commit cannot be had; the message says why."""


@dataclass(frozen=True)
class Release:
    """A checked-out release."""

    version: str
    commit: str
    tree: Path

    @property
    def python_path(self) -> str:
        """Its packages and what it needs beyond today's environment; they go before the installed ones."""
        sources = [*self.tree.glob("libs/*/src"), *self.tree.glob("services/*/src")]
        return os.pathsep.join(map(str, [*sorted(sources), packages_of(self.tree)]))

    def command(self, cluster: RunningCluster, service: str, instance: str) -> list[str]:
        """The command line with which this release starts an instance of a running cluster."""
        addresses = running_addresses(cluster.home)
        given = {
            "spec": cluster.spec.to_json(),
            "home": str(cluster.home.root),
            "addresses": {"etcd": addresses.etcd, "nats": addresses.nats},
            "service": service,
            "instance": instance,
        }
        said = self._run([sys.executable, "-c", COMMAND_LINE], json.dumps(given))
        return ["env", f"PYTHONPATH={self.python_path}", *json.loads(said)]

    def package_file(self, package: str) -> Path:
        """Where the release's processes find a package."""
        said = self._run([sys.executable, "-c", f"import {package}; print({package}.__file__)"])
        return Path(said.strip())

    def _run(self, argv: list[str], given: str = "") -> str:
        env = {**os.environ, "PYTHONPATH": self.python_path}
        done = subprocess.run(
            argv, env=env, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def git(*arguments: str, root: Path = ROOT) -> str:
    """Runs git; ReleaseMissing with what it says if it fails."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise ReleaseMissing(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def is_checkout(root: Path = ROOT) -> bool:
    """Whether the sources come with their history, be it a part of it."""
    return (root / ".git").exists()


def release_commit(root: Path = ROOT) -> str:
    """The commit that last changed RELEASED; in a shallow clone the rest of the history is fetched first."""
    if git("rev-parse", "--is-shallow-repository", root=root) == "true":
        git("fetch", "-q", "--unshallow", "origin", root=root)
    commit = git("log", "-1", "--format=%H", "--", "RELEASED", root=root)
    if not commit:
        raise ReleaseMissing("no commit has changed RELEASED: nothing was released yet")
    return commit


def packages_of(tree: Path) -> Path:
    """The folder beside a release's work tree that holds the packages it pins and today's environment lacks."""
    return tree.parent / f"{tree.name}-packages"


def pins_unmet(constraints: str, installed: Mapping[str, str]) -> list[str]:
    """The "name==version" lines that the installed versions, by canonical name, do not meet."""
    pins = [line.strip() for line in constraints.splitlines() if "==" in line and not line.startswith("#")]
    return [pin for pin in pins if installed.get(canonical(pin.split("==")[0])) != pin.split("==")[1]]


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def install_missing(tree: Path) -> None:
    """Installs what a release pins and today's environment lacks, or has in another version, beside its work tree."""
    found = metadata.distributions()
    installed = {canonical(dist.name): dist.version.split("+")[0] for dist in found}
    pins = pins_unmet((tree / CONSTRAINTS).read_text(), installed)
    if pins:
        # The pins are a whole environment: each package's own requirements are among them, or met today.
        argv = ["uv", "pip", "install", "-q", "--python", sys.executable, "--no-deps", "--target", packages_of(tree)]
        env = {**environment(), "UV_SYSTEM_CERTS": "1"}
        subprocess.run([*map(str, argv), *pins], env=env, timeout=TIMEOUT_S, check=True)


def environment() -> dict[str, str]:
    """This process's environment with its Python's own commands first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@contextmanager
def checked_out(folder: Path, root: Path = ROOT) -> Iterator[Release]:
    """The last release in a work tree below the folder, its stubs made and its packages installed beside it."""
    commit, tree = release_commit(root), folder / "release"
    git("worktree", "add", "-q", "--detach", str(tree), commit, root=root)
    try:
        install_missing(tree)
        generate = [sys.executable, str(tree / "proto/generate.py")]
        subprocess.run(generate, env=environment(), timeout=TIMEOUT_S, check=True)
        yield Release((tree / "RELEASED").read_text().strip(), commit, tree)
    finally:
        git("worktree", "remove", "--force", str(tree), root=root)
