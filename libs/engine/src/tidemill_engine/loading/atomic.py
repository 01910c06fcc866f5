"""A folder that appears whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_being_made(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target` and renames it to `target` at a clean end.

    When another process finished the same folder first, its result stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    temporary.chmod(0o755)
    try:
        yield temporary
        try:
            temporary.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
