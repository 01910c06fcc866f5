"""The real model of the quick start: converted once, by a process that may import torch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tidemill_local.home import Home

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


def run_loader(module: str, *args: str) -> None:
    """Runs one of the engine's checkpoint makers in a process of its own."""
    argv = [sys.executable, "-m", f"tidemill_engine.loading.{module}", *args]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise ModelFailed(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
