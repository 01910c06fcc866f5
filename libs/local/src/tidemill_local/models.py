"""The real model of the quick start: converted once, by a process that may import torch."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tidemill_local.home import Home
from tidemill_local.model_folders import FolderSummary, read_summaries

SMOLLM2 = "smollm2"


class ModelFailed(Exception):
    """The conversion ended with an error; the message holds what it printed last."""


def ensure_smollm2(home: Home, say: Callable[[str], None] = print) -> Path:
    """The folder of the converted checkpoint; converts it if it is not there (the converter is idempotent)."""
    folder = home.models / SMOLLM2
    if (folder / "config.json").exists():
        return folder
    say(f"converting SmolLM2-135M-Instruct into {folder}")
    run_loader("smollm2", "--out", str(folder))
    return folder


def outline(folders: Sequence[Path]) -> list[FolderSummary]:
    """What model folders hold, told by a process that may import torch."""
    return read_summaries(run_loader("outline", *map(str, folders)))


def run_loader(module: str, *args: str) -> str:
    """Runs one of the engine's checkpoint makers or readers in a process of its own; returns what it printed."""
    argv = [sys.executable, "-m", f"tidemill_engine.loading.{module}", *args]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"{done.stdout}{done.stderr}"[-2000:]
        raise ModelFailed(f"{' '.join(argv)} ended with {done.returncode}:\n{said}")
    return done.stdout
