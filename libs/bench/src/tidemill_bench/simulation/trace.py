"""Requests of public traces, as token ids that share prefixes where the recorded ones did."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidemill_kvcache.hashing import chain_root, hash_blocks

ROOT = chain_root(b"trace", b"")
FIRST_OUTPUT_ID = 1 << 31
"""Output tokens have ids of their own for each request: no trace tells which later prompt repeats them."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: Sequence[int]
    """One for each block of the prompt, the last one perhaps partial; equal ids stand for equal prefixes."""
    session: int = -1

    def token_ids(self, block_size: int) -> npt.NDArray[np.uint32]:
        """Prompt and output, shape (input_tokens + output_tokens,)."""
        prompt = np.repeat(np.asarray(self.block_ids, np.uint32), block_size)[: self.input_tokens]
        output = np.full(self.output_tokens, FIRST_OUTPUT_ID + self.index, np.uint32)
        return np.concatenate([prompt, output])

    def prompt_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the full blocks of the prompt."""
        return hash_blocks(ROOT, self.token_ids(block_size)[: self.input_tokens], block_size)


def read_mooncake(path: Path, limit: int = 0) -> list[TraceRequest]:
    """Requests of a Mooncake trace in order of arrival; `limit` > 0: only the first so many."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows.sort(key=lambda row: row["timestamp"])
    return [
        TraceRequest(i, row["timestamp"] / 1e3, row["input_length"], max(1, row["output_length"]), row["hash_ids"])
        for i, row in enumerate(rows[:limit] if limit else rows)
    ]
