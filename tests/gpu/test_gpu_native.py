"""CUDA C++ is built once, and what is missing for it is named."""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton")

from tidemill_engine.cuda import native
from tidemill_engine.cuda.requirements import CudaUnavailable


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    native.native.cache_clear()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(CudaUnavailable, match="nvcc"):
        native.native("choose_rows")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_what_the_compiler_says_is_passed_on(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("int wrong() { return nothing; }\n")
    with pytest.raises(CudaUnavailable, match="nothing"):
        native._build(source, tmp_path / "cache" / "wrong.so")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = native.native("choose_rows")
    assert first.choose_rows
    native.native.cache_clear()
    monkeypatch.setattr(native, "_build", pytest.fail)
    assert native.native("choose_rows").choose_rows
