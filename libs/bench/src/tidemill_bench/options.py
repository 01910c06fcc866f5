"""What every benchmark is told."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """Folders, and whether a short round is enough."""

    home: Path
    peers: Path
    quick: bool
