"""Compiles the C sources once for each (sources, compiler, processor) and keeps the library in the cache folder."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O2", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-lm")
COMPILE_TIMEOUT_S = 300.0


class KernelsUnavailable(RuntimeError):
    """The kernels cannot run here; the message says why."""


def cache_folder() -> Path:
    """`cache/kernels` of TIDEMILL_HOME, else of ~/.cache/tidemill."""
    home = os.environ.get("TIDEMILL_HOME")
    return (Path(home) / "cache" if home else Path.home() / ".cache" / "tidemill") / "kernels"


def library() -> Path:
    """Path of the compiled library; raises KernelsUnavailable when there is no compiler or it fails."""
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")
    path = cache_folder() / f"{_digest(compiler)}.so"
    if path.is_file():
        return path
    if not compiler:
        raise KernelsUnavailable("no C compiler (cc, gcc, clang or $CC) to build the CPU kernels")
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "build.lock").open("w") as lock:
        # Ranks that start together would all compile the same, one slower than the other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _build(compiler, path)
    return path


def _build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _compile(compiler, made)
        made.replace(path)


def _compile(compiler: str, out: Path) -> None:
    command = [compiler, *map(str, sorted(SOURCES.glob("*.c"))), *FLAGS, "-o", str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"building the CPU kernels failed: {error}") from error
    if done.returncode:
        raise KernelsUnavailable(f"building the CPU kernels failed: {done.stderr.strip()[-500:]}")


def _digest(compiler: str) -> str:
    """A home folder may be shared by different machines: -march=native depends on the processor's features."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(repr((compiler, FLAGS, platform.machine(), _processor_flags())).encode())
    return digest.hexdigest()


def main() -> None:
    """Command line without arguments: builds ahead of the first start and prints the library's path."""
    print(library())


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


if __name__ == "__main__":
    main()
