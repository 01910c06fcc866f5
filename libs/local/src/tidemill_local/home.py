"""Where everything of one machine's cluster lies: one folder, named by TIDEMILL_HOME."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """The layout below the folder."""

    root: Path

    @property
    def run(self) -> Path:
        """Pid files (`NAME.pid`) and what services say of themselves (`INSTANCE.json`)."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """One log file for each process."""
        return self.root / "logs"

    @property
    def data(self) -> Path:
        """What servers and stores keep on disk."""
        return self.root / "data"

    @property
    def models(self) -> Path:
        """Converted checkpoints."""
        return self.root / "models"

    @property
    def state_file(self) -> Path:
        """What the cluster was started as."""
        return self.root / "cluster.json"

    @property
    def templates_file(self) -> Path:
        """Command lines from which the autoscaler starts workers."""
        return self.root / "worker_templates.json"

    @property
    def bounds_file(self) -> Path:
        """Replica bounds set at run time."""
        return self.root / "autoscaler_bounds.json"

    @property
    def secret_file(self) -> Path:
        """The deployment's cache secret."""
        return self.root / "cache_secret"

    def log_file(self, name: str) -> Path:
        """The log of one process."""
        return self.logs / f"{name}.log"

    def prepare(self) -> None:
        """Makes the folders and, once, the secret from which the tenants' cache salts derive."""
        for folder in (self.run, self.logs, self.data, self.models):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.secret_file.exists():
            write_atomically(self.secret_file, secrets.token_hex(32), mode=0o600)


def default_home() -> Home:
    """TIDEMILL_HOME, else `.tidemill` in the current folder."""
    return Home(Path(os.environ.get("TIDEMILL_HOME", ".tidemill")).resolve())


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """A reader sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    partial.replace(path)
