"""From scheduled rows to the numbers of a step, by numpy over all rows at once."""

from dataclasses import dataclass

import numpy as np

from tidemill_engine.cuda.attention import PageTable
from tidemill_engine.model_runner import RowTables
from tidemill_engine.step import ScheduledRow


@dataclass(frozen=True)
class StepRows:
    """The scheduled rows of a step as arrays, decode rows (one token) first."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    """Bool: the row's next token is sampled."""
    num_decode: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.counts.sum())

    @property
    def all_decode(self) -> bool:
        """No row computes more than one token."""
        return self.num_decode == self.rows.size


def read_rows(scheduled: list[ScheduledRow], tables: RowTables) -> StepRows:
    """Takes the rows' new blocks in and returns their numbers."""
    for part in scheduled:
        if part.new_block_ids:
            tables.extend(part.row, part.new_block_ids)
    numbers = np.array([(part.row, part.start, part.num_tokens, part.sample) for part in scheduled], np.int64)
    rows, starts, counts, samples = numbers.T
    longer = counts != 1
    num_decode = int(np.argmax(longer)) if longer.any() else rows.size
    return StepRows(rows, starts, counts, samples.astype(bool), num_decode)


def page_table(tables: RowTables, rows: np.ndarray, lengths: np.ndarray, num_padded: int, null_block: int) -> PageTable:
    """Blocks of rows with contexts of `lengths` tokens; rows up to `num_padded` hold one token in the null block."""
    padding = max(0, num_padded - rows.size)
    counts = -(-lengths // tables.block_size)
    width = int(counts.max(initial=0))
    held = tables.blocks[rows, :width][np.arange(width) < counts[:, None]]
    indices = np.concatenate([held, np.full(padding, null_block)]).astype(np.int32)
    indptr = np.zeros(rows.size + padding + 1, np.int32)
    np.cumsum(np.concatenate([counts, np.ones(padding, np.int64)]), out=indptr[1:])
    last = np.concatenate([lengths - (counts - 1) * tables.block_size, np.ones(padding, np.int64)]).astype(np.int32)
    slots = np.concatenate([tables.slots[rows], np.full(padding, -1)]).astype(np.int32)
    return PageTable(indptr, indices, last, slots)


def fill_tokens(host: dict[str, np.ndarray], tables: RowTables, step: StepRows) -> None:
    """Token ids, positions and blocks of all tokens of the step; -1 for a token that only the device knows."""
    if step.all_decode:
        token_rows, positions = step.rows, step.starts
    else:
        firsts = np.cumsum(step.counts) - step.counts
        token_rows = np.repeat(step.rows, step.counts)
        positions = np.arange(step.num_tokens) + np.repeat(step.starts - firsts, step.counts)
    size = positions.size
    known = positions < tables.num_tokens[token_rows]
    host["token_ids"][:size] = np.where(known, tables.token_ids[token_rows, positions], -1)
    host["positions"][:size] = positions
    host["block_ids"][:size] = tables.blocks[token_rows, positions // tables.block_size]
