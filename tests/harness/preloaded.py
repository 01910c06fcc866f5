"""Faults that a library preloaded into a cluster's processes makes while they run."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("preloaded.c")
NS = 1_000_000_000


class NoCompiler(Exception):
    """This machine has no C compiler."""


class Preloaded:
    """The library, compiled into a folder, and the file by which it is told what to do."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "preloaded.so", folder / "faults"
        compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
        if compiler is None:
            raise NoCompiler("no C compiler here")
        compiled = [*compiler.split(), "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(compiled, check=True, timeout=120)
        self._clock_s = self._disk_s = 0.0
        self._file.write_bytes(struct.pack("qq", 0, 0))
        self.environment = {"LD_PRELOAD": str(library), "TM_FAULTS": str(self._file)}
        """Of the processes it is preloaded into."""

    def set_clock(self, ahead_s: float) -> None:
        """The wall clock jumps to so many seconds beside the right time."""
        self._clock_s = ahead_s
        self._tell()

    def slow_disk(self, call_s: float) -> None:
        """From now on reading or writing a block of a file takes so long."""
        self._disk_s = call_s
        self._tell()

    def _tell(self) -> None:
        with self._file.open("r+b") as file:
            file.write(struct.pack("qq", round(self._clock_s * NS), round(self._disk_s * NS)))
