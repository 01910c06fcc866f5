"""A step's numbers in one pinned buffer and one device buffer, so that a step needs one copy to the device.

    int64  seeds | int32  rows, wanted, temperatures (as bits), counts, indptr, last_page_len (rows) | the attention's |
    token_ids, positions, block_ids (tokens) | indices | tiles

The device buffer never moves: CUDA graphs read it in place.
"""

from dataclasses import dataclass

import numpy as np
import torch

_ROW_PARTS = ("rows", "wanted", "temperatures", "counts", "indptr", "last_page_len")
_TOKEN_PARTS = ("token_ids", "positions", "block_ids")
_ALIGN = 4
"""Parts begin at multiples of 16 bytes."""


@dataclass(frozen=True)
class Part:
    """A range of int32 words."""

    start: int
    size: int


class StepInputs:
    """`host` arrays are filled, `send` copies them, `device` tensors are what kernels read."""

    def __init__(
        self, num_tokens: int, num_rows: int, num_indices: int, num_tile_words: int, more: dict[str, int]
    ) -> None:
        self.num_rows = num_rows
        sizes = dict.fromkeys(_ROW_PARTS, num_rows + 1) | more
        sizes |= dict.fromkeys(_TOKEN_PARTS, num_tokens) | {"indices": num_indices, "tiles": num_tile_words}
        parts: dict[str, Part] = {"seeds": Part(0, 2 * num_rows)}
        end = _round_up(2 * num_rows)
        for name, size in sizes.items():
            parts[name] = Part(end, size)
            end = _round_up(end + size)
        self._indices_start, self._tiles_start = parts["indices"].start, parts["tiles"].start
        self._pinned = torch.zeros(end, dtype=torch.int32, pin_memory=True)
        self._on_device = torch.zeros(end, dtype=torch.int32, device="cuda")
        words = self._pinned.numpy()
        self.host = {name: words[part.start : part.start + part.size] for name, part in parts.items()}
        self.device = {name: self._on_device[part.start : part.start + part.size] for name, part in parts.items()}
        self.host["seeds"] = self.host["seeds"].view(np.int64)
        self.device["seeds"] = self.device["seeds"].view(torch.int64)
        self.host["temperatures"] = self.host["temperatures"].view(np.float32)
        self.device["temperatures"] = self.device["temperatures"].view(torch.float32)
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns once the device has read what the last step's plans and copies left in pinned memory."""
        self._sent.synchronize()

    def send(self, num_indices: int, num_tile_words: int) -> None:
        """Starts the copies; `mark_sent` must follow them and the step's plans."""
        self._copy(0, self._indices_start + num_indices)
        if num_tile_words:
            self._copy(self._tiles_start, self._tiles_start + num_tile_words)

    def _copy(self, start: int, end: int) -> None:
        self._on_device[start:end].copy_(self._pinned[start:end], non_blocking=True)

    def mark_sent(self) -> None:
        """All copies of this step from pinned memory have been started."""
        self._sent.record()


def _round_up(words: int) -> int:
    return -(-words // _ALIGN) * _ALIGN
