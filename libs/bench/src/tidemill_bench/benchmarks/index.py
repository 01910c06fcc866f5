"""The router's index and the engine's prefix cache beside Dynamo's Rust RadixTree: same blocks, same events, one core.

Each index gets what its interface takes, ready made: Dynamo JSON events and lists of 64-bit hashes, Tidemill packed
128-bit hashes as they lie in a protobuf message.
"""

import gc
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tidemill_bench import index_rounds, scheduling_gap
from tidemill_bench.options import Options
from tidemill_bench.peers import dynamo_radix
from tidemill_bench.prefix_events import Fleet, conversations, long_prompts
from tidemill_bench.report import Row, machine

PEER = "Dynamo RadixTree (ai-dynamo-runtime)"
FLEETS: dict[str, Callable[[], Fleet]] = {
    "64 workers, 1,000 conversations of 128 blocks, 32 shared": lambda: conversations(64, 1000, 128, 32, 2000),
    "8 workers, 50 conversations of 2,048 blocks, 512 shared": lambda: conversations(8, 50, 2048, 512, 400),
    "8 workers, 20 conversations of 16,384 blocks, 4,096 shared": lambda: conversations(8, 20, 16384, 4096, 60),
    "64 workers, 300 prompts of 8K-128K tokens in blocks of 16, 40 groups": lambda: long_prompts(64, 300, 200),
}
SHALLOW = next(iter(FLEETS))
LONG = list(FLEETS)[-1]


def run(options: Options) -> list[Row]:
    """Rounds of both indexes in turn. Each figure is the best of its rounds, a percentile is over each query's best:

    what other processes on the machine took away is left out alike for both.
    """
    rounds = 1 if options.quick else 5
    fleets = {name: make() for name, make in FLEETS.items()}
    ours: dict[str, list[index_rounds.Round]] = {name: [] for name in fleets}
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in fleets}
    hash_s: list[float] = []
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="tidemill-index-") as folder:
        paths = {name: Path(folder) / f"{i}.npz" for i, name in enumerate(fleets)}
        for name, path in paths.items():
            fleets[name].save(path)
        for _ in range(rounds):
            for name, fleet in fleets.items():
                ours[name].append(index_rounds.measure(fleet))
            for name, result in zip([*fleets, ""], _peer(options.peers, list(paths.values())), strict=False):
                if name:
                    theirs[name].append(result)
                else:
                    hash_s.append(result["hash_s"])
    rows = [row for name, fleet in fleets.items() for row in _fleet_rows(name, fleet, ours[name], theirs[name])]
    rows += _long_rows(ours[LONG], theirs[LONG])
    rows += _own_rows(rounds, hash_s, quick=options.quick)
    return rows


def _peer(peers: Path, paths: list[Path]) -> list[dict[str, Any]]:
    """One line for each fleet and one of hashing; nothing, said aloud, where the peers are not installed."""
    python = peers / "bin" / "python"
    if not python.exists():
        print(f"Dynamo is not installed in {peers}: `make bench-deps` installs it; rows stand without it")
        return []
    argv = [str(python), dynamo_radix.__file__, *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _row(metric: str, unit: str, value: float, workload: str, **more: Any) -> Row:
    higher = more.pop("higher_is_better", False)
    if more.get("baseline_value") is None:
        more.pop("baseline_value", None)
        more.pop("baseline", None)
    return Row(
        metric=metric, unit=unit, value=value, higher_is_better=higher, workload=workload, machine=machine(), **more
    )


def _fleet_rows(name: str, fleet: Fleet, ours: list[index_rounds.Round], theirs: list[dict[str, Any]]) -> list[Row]:
    for result in theirs:
        assert result["best"] == ours[0].best, "both indexes give the same answers"
    deep = name != SHALLOW
    millions = fleet.event_blocks / 1e6
    rows = []
    for metric, field in (("insert", "insert_s"), ("insert, by processor time", "insert_cpu_s")):
        peer = millions / min(r[field] for r in theirs) if theirs else None
        rows.append(
            _row(metric, "M blocks/s", millions / min(getattr(r, field) for r in ours), name, higher_is_better=True,
                 baseline=PEER, baseline_value=peer, goal=">= 5x the baseline" if deep else None)
        )  # fmt: skip
    mine = np.min([r.match_s for r in ours], axis=0) * 1e6
    others = np.min([r["match_s"] for r in theirs], axis=0) * 1e6 if theirs else None
    for percent, goal in ((50, "<= 1/3 of the baseline" if deep else None), (99, "no worse than the baseline")):
        rows.append(
            _row(f"match p{percent}", "us", float(np.percentile(mine, percent)), name, baseline=PEER,
                 baseline_value=float(np.percentile(others, percent)) if others is not None else None, goal=goal)
        )  # fmt: skip
    rows.append(_row("memory", "bytes/block", ours[0].bytes_per_block, name, goal="<= 64 bytes, published and bounded"))
    return rows


def _long_rows(ours: list[index_rounds.Round], theirs: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for blocks in (512, 2048, 8192):
        workload = f"a prompt of {blocks * 16 // 1024}K tokens in chunks of 2,048: match what is known, store the chunk"
        peer = min(r["chunked_s"][str(blocks)] for r in theirs) * 1e3 if theirs else None
        value = min(r.chunked_s[blocks] for r in ours) * 1e3
        rows.append(_row("chunked prefill", "ms", value, workload, baseline=PEER, baseline_value=peer,
                         goal="<= 1/10 of the baseline"))  # fmt: skip
    for blocks in (1, 16, 128):
        peer = min(r["grown_s"][str(blocks)] for r in theirs) * 1e6 if theirs else None
        value = min(r.grown_s[blocks] for r in ours) * 1e6
        rows.append(_row("event", "us", value, f"8,192 blocks in events of {blocks}, each behind the one before",
                         baseline=PEER, baseline_value=peer))  # fmt: skip
    peer = min(r["remove_s"] for r in theirs) * 1e3 if theirs else None
    rows.append(_row("remove", "ms", min(r.remove_s for r in ours) * 1e3, "8,192 blocks, deepest first, one event",
                     baseline=PEER, baseline_value=peer))  # fmt: skip
    if theirs:
        kept = median(r["kept_bytes"] for r in theirs)
        print(f"{PEER} grew by {kept / 2**20:.0f} MiB while it took the long prompts in")
    return rows


def _own_rows(rounds: int, hash_s: list[float], *, quick: bool) -> list[Row]:
    tokens = 131_072
    own_hash = min(index_rounds.hashing_s(tokens, 16) for _ in range(rounds))
    rows = [
        _row("block hashes of a prompt", "ms", own_hash * 1e3,
             "128K tokens in blocks of 16; ours chained and keyed (BLAKE2b), the baseline's of single blocks (XXH3)",
             baseline="Dynamo compute_block_hash_for_seq", baseline_value=min(hash_s) * 1e3 if hash_s else None)
    ]  # fmt: skip
    for blocks in (1, 2):
        workload = f"100,000 blocks in prompts of {blocks} with nothing in common, 64 workers"
        rows.append(_row("memory", "bytes/block", index_rounds.short_prompts(blocks, 64), workload,
                         goal="<= 64 bytes, published and bounded"))  # fmt: skip
    rows += shared_out_rows()
    blocks = 228_000 if quick else 2_280_000
    seconds = min(index_rounds.rebuild(blocks, 64) for _ in range(1 if quick else 2))
    rows.append(_row("rebuild", "s", seconds, f"{blocks:,} blocks of 64 workers, snapshot messages parsed and applied",
                     goal="seconds (Dynamo's users report 46-50 s)"))  # fmt: skip
    churn = index_rounds.churn(64, 1000, 2000 if quick else 10_000)
    workload = (
        f"{churn.block_events / 1e6:.1f} M blocks came and went in {churn.events:,} events, at most 1,000 prompts live"
    )
    rows += [
        _row("churn", "M blocks/s", churn.block_events / churn.seconds / 1e6, workload, higher_is_better=True),
        _row("memory at the peak of churn", "MiB", churn.peak_bytes / 2**20, workload, goal="bounded"),
        _row("memory after churn", "bytes/block", churn.end_bytes / churn.live_blocks, workload, goal="<= 64 bytes"),
    ]
    if not quick:
        rows += day_rows()
    return rows + _gap_rows(rounds)


def day_rows() -> list[Row]:
    """Memory over a day's churn."""
    day = index_rounds.churn(64, 1000, 64 * 2 * 60 * 24)
    workload = (
        f"{day.block_events / 1e6:.0f} M blocks, in and out: 64 workers, each two prompts of some 440 blocks a minute,"
        " for a day; at most 1,000 prompts live"
    )
    return [
        _row("memory at the peak of the day's last tenth", "MiB", day.tenths_peak_bytes[-1] / 2**20, workload,
             baseline="its second tenth", baseline_value=day.tenths_peak_bytes[1] / 2**20,
             goal="<= 1.05x the baseline"),
        _row("memory after the day", "bytes/block", day.end_bytes / day.live_blocks, workload, goal="<= 64 bytes"),
    ]  # fmt: skip


def shared_out_rows() -> list[Row]:
    """Memory where prompts lie in several kvstores."""
    return [
        _row("memory", "bytes/block", index_rounds.shared_out(stores, 200, 500),
             f"100,000 blocks in 200 prompts of 500, each block in one of {stores} kvstores by its hash",
             goal="<= 64 bytes, published and bounded")
        for stores in (2, 8)
    ]  # fmt: skip


def _gap_rows(rounds: int) -> list[Row]:
    rows = []
    workload = "cache work of the last of 64 chunks of a 128K-token prompt, blocks of 16"
    ours = [scheduling_gap.resumed(131_072, 16, 2048) for _ in range(rounds)]
    full = [scheduling_gap.rescanned(131_072, 16, 2048) for _ in range(min(rounds, 3))]
    last = min(gaps[-1] for gaps in ours), min(gaps[-1] for gaps in full)
    rows.append(_row("scheduling gap, last chunk", "ms", last[0] * 1e3, workload, baseline="full rescan, same tree",
                     baseline_value=last[1] * 1e3, goal="<= 1/10 of the baseline"))  # fmt: skip
    sums = min(sum(gaps) for gaps in ours), min(sum(gaps) for gaps in full)
    rows.append(_row("scheduling gap, whole prompt", "ms", sums[0] * 1e3, workload.replace("the last of ", ""),
                     baseline="full rescan, same tree", baseline_value=sums[1] * 1e3,
                     goal="<= 1/10 of the baseline"))  # fmt: skip
    return rows + engine_gap_rows(rounds)


def engine_gap_rows(rounds: int) -> list[Row]:
    """The same of whole steps of the engine: what keeps the device waiting between two chunks."""
    workload = (
        "Engine.step() less the runner's time, for each of 64 chunks of one 128K-token prompt, blocks of 16: planning,"
        " cache, events and reports; the first takes the whole prompt in, the last lets it go"
    )
    ours = [scheduling_gap.engine_steps(131_072, 16, 2048) for _ in range(rounds)]
    full = [
        scheduling_gap.engine_steps(131_072, 16, 2048, scheduling_gap.RescanningCache) for _ in range(min(rounds, 3))
    ]
    best, rescanned = np.min(ours, axis=0) * 1e3, np.min(full, axis=0) * 1e3
    figures = [
        (f"p{percent}", float(np.percentile(best, percent)), float(np.percentile(rescanned, percent)))
        for percent in (50, 99)
    ]
    figures.append(("last step", float(best[-1]), float(rescanned[-1])))
    return [
        _row(f"scheduling gap of the engine, {name}", "ms", value, workload, baseline="full rescan, same engine",
             baseline_value=other, goal="<= 1/10 of the baseline")
        for name, value, other in figures
    ]  # fmt: skip
