"""Cuts the contexts of a step's decode rows into items and deals them to programs; numpy only."""

from dataclasses import dataclass

import numpy as np

WHOLE_ROW = -1
ITEM_WORDS = 5
ITEM_TILES = 4
"""Tiles that a program could read in the time that it takes to begin and to end an item."""


@dataclass(frozen=True)
class ItemPlan:
    """What `kernels.latent_decode` reads, on the host; all int32."""

    items: np.ndarray
    """[items, 5]: row, where the row begins in the indices, the item's first token, its tokens, and its number, or
    WHOLE_ROW where it is the only one of its row. Items of a row follow each other."""
    item_firsts: np.ndarray
    """[rows + 1]: first item of each row."""
    program_firsts: np.ndarray
    """[programs + 1]: first item of each program that has some."""


def plan_items(lengths: np.ndarray, indptr: np.ndarray, num_programs: int, tile_tokens: int) -> ItemPlan:
    """lengths [rows] of at least one token. Items are whole tiles but for a row's end. Either each program has one
    item, all about equally long, or all rows laid end to end are cut into equal stretches, whichever takes less
    long."""
    tiles = -(-lengths // tile_tokens)
    one_each, stretches = _one_each(tiles, num_programs), _stretches(tiles, num_programs)
    rows, begins, counts, programs = min(one_each, stretches, key=lambda cut: _cost(cut, num_programs))
    item_firsts = np.searchsorted(rows, np.arange(lengths.size + 1))
    items = np.empty((rows.size, ITEM_WORDS), np.int32)
    items[:, 0] = rows
    items[:, 1] = indptr[rows]
    items[:, 2] = begins * tile_tokens
    items[:, 3] = np.minimum(counts * tile_tokens, lengths[rows] - begins * tile_tokens)
    items[:, 4] = np.where(np.diff(item_firsts)[rows] == 1, WHOLE_ROW, np.arange(rows.size))
    program_firsts = np.searchsorted(programs, np.arange(programs[-1] + 2))
    return ItemPlan(items, item_firsts.astype(np.int32), program_firsts.astype(np.int32))


def most_items(num_rows: int, num_programs: int) -> int:
    """Bound on the items of a plan."""
    return num_rows + num_programs


def most_programs(num_rows: int, num_programs: int) -> int:
    """Bound on the programs of a plan that have items."""
    return max(num_rows, num_programs)


_Cut = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""By item: its row, its first tile there, its tiles, its program."""


def _one_each(tiles: np.ndarray, num_programs: int) -> _Cut:
    """At most max(rows, num_programs) items, as short as that allows."""
    low, high = 1, max(1, int(tiles.max(initial=1)))
    while low < high:
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) <= max(num_programs, tiles.size):
            high = middle
        else:
            low = middle + 1
    # Equal parts of a row, so that none is a short rest.
    each = -(-tiles // -(-tiles // low))
    counts = -(-tiles // each)
    firsts = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(tiles.size), counts)
    numbers = np.arange(rows.size)
    begins = (numbers - firsts[rows]) * each[rows]
    return rows, begins, np.minimum(each[rows], tiles[rows] - begins), numbers


def _stretches(tiles: np.ndarray, num_programs: int) -> _Cut:
    """Cuts where a stretch ends and where a row does."""
    ends = np.cumsum(tiles)
    share = -(-int(ends[-1]) // num_programs)
    starts = np.union1d(ends - tiles, np.arange(0, ends[-1], share))
    counts = np.diff(np.append(starts, ends[-1]))
    rows = np.searchsorted(ends, starts, side="right")
    return rows, starts - (ends - tiles)[rows], counts, starts // share


def _cost(cut: _Cut, num_programs: int) -> int:
    """Tiles' time of the longest program, and of those that must wait for one to end."""
    _, _, counts, programs = cut
    waves = -(-int(programs[-1] + 1) // num_programs)
    return int(np.bincount(programs, counts + ITEM_TILES).max()) * waves
