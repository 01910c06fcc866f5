"""Cuts the contexts of a step's decode rows into equal stretches for groups of programs; numpy only."""

from dataclasses import dataclass

import numpy as np

GOES_ON = -1
WHOLE_ROW = -2


@dataclass(frozen=True)
class DecodePlan:
    """What `kernels.split_decode.DecodeWork` holds, on the host; all int32. An item is a stretch's part of one row."""

    group_firsts: np.ndarray
    """[groups + 1]: first tile of each group of programs."""
    tiles: np.ndarray
    """[tiles, 4]: row, where in the page table's indices the tile begins, its tokens, and what follows it: GOES_ON with
    the next tile of the row, or the end of an item that is a WHOLE_ROW, or else the item's number."""
    item_firsts: np.ndarray
    """[rows + 1]: first item of each row."""


def plan_decode(
    lengths: np.ndarray, indptr: np.ndarray, num_groups: int, tile_tokens: int, block_size: int
) -> DecodePlan:
    """lengths [rows] are contexts of one token at least, whose blocks begin at indptr; cuts lie between tiles of
    `tile_tokens` of a row, which hold whole blocks. There are at most rows + num_groups items."""
    counts = -(-lengths // tile_tokens)
    row_starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(row_starts[-1])
    group_starts = np.arange(num_groups + 1) * total // num_groups
    cuts = np.union1d(row_starts, group_starts)
    item_firsts = np.searchsorted(cuts, row_starts)
    rows = np.repeat(np.arange(lengths.size), counts)
    begins = (np.arange(total) - row_starts[rows]) * tile_tokens
    tiles = np.empty((total, 4), np.int32)
    tiles[:, 0] = rows
    tiles[:, 1] = indptr[rows] + begins // block_size
    tiles[:, 2] = np.minimum(tile_tokens, lengths[rows] - begins)
    tiles[:, 3] = GOES_ON
    ends = cuts[1:] - 1
    is_whole = (np.diff(item_firsts) == 1)[rows[ends]]
    tiles[ends, 3] = np.where(is_whole, WHOLE_ROW, np.arange(ends.size))
    return DecodePlan(group_starts.astype(np.int32), tiles, item_firsts.astype(np.int32))


def most_items(num_rows: int, num_groups: int) -> int:
    """Bound on the items of a plan."""
    return num_rows + num_groups
