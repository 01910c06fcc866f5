"""What the engine says of model folders, as a table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tidemill_local.status import mebibytes

HEADER = ("MODEL", "ARCHITECTURE", "WEIGHTS", "STORED AS", "CONTEXT", "KV/TOKEN", "KV/SEQUENCE", "BLOCKS OF", "ON CPU")


@dataclass(frozen=True)
class FolderSummary:
    """One model folder; sizes of KV are with bfloat16 and over all ranks."""

    folder: str
    architecture: str
    weight_bytes: int
    dtypes: str
    context_tokens: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    block_multiple: int
    reason: str
    """Why it cannot be served; empty when it can."""


def read_summaries(text: str) -> list[FolderSummary]:
    """From the JSON list that `tidemill_engine.loading.outline` prints."""
    known = {field.name for field in fields(FolderSummary)}
    found: list[dict[str, Any]] = json.loads(text)
    return [FolderSummary(**{key: value for key, value in item.items() if key in known}) for item in found]


def rows(summaries: Sequence[FolderSummary]) -> list[tuple[str, ...]]:
    """Lines of a table, the header first."""
    return [HEADER, *(_row(summary) for summary in summaries)]


def _row(summary: FolderSummary) -> tuple[str, ...]:
    return (
        summary.folder,
        summary.architecture or "-",
        mebibytes(summary.weight_bytes),
        summary.dtypes or "-",
        str(summary.context_tokens),
        f"{summary.kv_bytes_per_token} B",
        f"{summary.kv_bytes_per_sequence} B",
        str(summary.block_multiple),
        f"no: {summary.reason}" if summary.reason else "yes",
    )
