"""Rows of a benchmark, their table and their JSON file."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure; `baseline` names the peer or plain path measured in the same run."""

    metric: str
    unit: str
    value: float
    higher_is_better: bool
    workload: str
    machine: str
    baseline: str | None = None
    baseline_value: float | None = None
    goal: str | None = None


def machine() -> str:
    """Processor, cores and memory of this machine, without its name."""
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    cores = 0
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model, cores = value.strip(), cores + 1
        elif key.strip() == "flags":
            flags.update(value.split())
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{cores} x {model} ({', '.join(units)}), {memory_kib / 2**20:.0f} GiB, no GPU"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(rows: Sequence[Row]) -> str:
    """A fixed-width table of all rows, with the ratio to the baseline."""
    head = ("metric", "value", "unit", "baseline", "its value", "ratio", "goal")
    lines = [head]
    for row in rows:
        ratio = f"{row.value / row.baseline_value:.2f}x" if row.baseline_value else "-"
        cells = (row.metric, _cell(row.value), row.unit, row.baseline or "-", _cell(row.baseline_value), ratio)
        lines.append((*cells, row.goal or "-"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def read(name: str, folder: Path) -> list[Row]:
    """The rows that `write` wrote."""
    return [Row(**row) for row in json.loads((folder / f"{name}.json").read_text())]


def with_part(rows: Sequence[Row], part: Sequence[Row]) -> list[Row]:
    """Rows of an earlier run and those of a part that was run later, which follow the earlier ones of their workload.

    Raises ValueError unless the part repeats some of the earlier rows, and each that it repeats to the last digit on
    the same machine: only then do both tell of one program.
    """
    earlier, present = (
        {(row.metric, row.workload): (row.value, row.machine) for row in listed} for listed in (rows, part)
    )
    repeated, merged = earlier.keys() & present.keys(), list(rows)
    if not repeated:
        raise ValueError("the part repeats no row of the earlier run, so nothing shows that they belong together")
    for key in repeated:
        if present[key] != earlier[key]:
            raise ValueError(f"{key[0]!r} was {earlier[key][0]} and is {present[key][0]}: run the whole benchmark")
    for row in part:
        if (row.metric, row.workload) not in earlier:
            last = max((at for at, other in enumerate(merged) if other.workload == row.workload), default=len(merged))
            merged.insert(last + 1, row)
    return merged


def write(name: str, rows: Sequence[Row], folder: Path) -> Path:
    """Writes `<folder>/<name>.json`: a list of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return path
