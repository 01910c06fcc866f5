"""CUDA C++ for what Triton cannot say, built by nvcc at first use and kept beside Triton's compiled kernels."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import structlog
import triton

from tidemill_engine.cuda.requirements import CudaUnavailable

log = structlog.get_logger()

_FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC")
_BUILD_LIMIT_S = 180


@cache
def native(name: str) -> ctypes.CDLL:
    """The library of `<name>.cu`; raises CudaUnavailable that names nvcc where it is missing or fails."""
    source = Path(__file__).with_name(f"{name}.cu")
    digest = hashlib.sha256(source.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:24]
    library = Path(triton.knobs.cache.dir) / "native" / f"{name}-{digest}.so"
    if not library.exists():
        _build(source, library)
    return ctypes.CDLL(str(library))


def _build(source: Path, library: Path) -> None:
    started = time.perf_counter()
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [_nvcc(), *_FLAGS, "-o", str(made), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CudaUnavailable(f"nvcc took more than {_BUILD_LIMIT_S} s for {source.name}") from error
        if done.returncode:
            raise CudaUnavailable(f"nvcc failed on {source.name}: {done.stderr[-2000:]}")
        # Another process may have built the same: both are whole, either may stay.
        made.replace(library)
    log.info("native_kernels_built", source=source.name, seconds=round(time.perf_counter() - started, 2))


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    named = Path(home) / "bin" / "nvcc" if home else None
    if named is not None and named.exists():
        return str(named)
    found = shutil.which("nvcc")
    if found is None:
        raise CudaUnavailable("kernels in CUDA C++ need nvcc, on the path or in $CUDA_HOME/bin")
    return found
