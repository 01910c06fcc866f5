"""Folders go with their owners."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill_mesh.owned_folders import LOCK, owned_folder, sweep

OWNER = """
import sys, time
from tidemill_mesh.owned_folders import owned_folder
with owned_folder() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextlib.contextmanager
def owner() -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_folder_is_gone_after_its_block_and_kept_by_others_meanwhile(temporary: Path) -> None:
    with owned_folder() as first, owned_folder() as second:
        assert first != second
        assert sweep() == 0
        assert (first / LOCK).exists()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_start_and_not_before_its_end(temporary: Path) -> None:
    with owner() as (process, folder):
        assert sweep() == 0
        process.kill()
        process.wait()
        assert (folder / "socket").exists()
        with owned_folder() as mine:
            assert list(temporary.iterdir()) == [mine]


def test_folders_of_nobody_and_links_are_left_alone(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    (temporary / "tidemill-bench-1").mkdir()
    (temporary / "tidemill-link").symlink_to(elsewhere)
    assert sweep() == 0
    assert (elsewhere / LOCK).exists()
    assert (temporary / "tidemill-bench-1").exists()
