"""What every benchmark is told."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """Folders, and whether a short round is enough."""

    home: Path
    peers: Path
    quick: bool
    traces: Path
    """Folder of public traces: `mooncake/*.jsonl`, and others by the benchmark that reads them."""
    engine: str = "simulated"
    """"simulated" or "real", for benchmarks that can run on both."""
    part: str = ""
    """Only these rows, of a benchmark that has parts; empty: all."""
