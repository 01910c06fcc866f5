"""Which tokens go to which expert, sorted on the device; plain torch, and nothing waits for the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dispatch:
    """Which rows go to which expert, made for tiles of `tile_rows` rows."""

    order: torch.Tensor
    """[rows] int32: places (token * top_k + choice) in order of their expert, and of the place among equals."""
    ends: torch.Tensor
    """[experts] int32: where each expert's rows end in that order."""
    tiles: torch.Tensor
    """[tiles, 3] int32: expert, first row, end of the expert's rows; expert -1 past the last tile."""
    tile_rows: int


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Bound on the tiles: each expert with rows wastes less than one."""
    return num_rows // tile_rows + min(num_rows, num_experts)


def by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts [tokens, top_k] int64 -> (places in order of their expert, where each expert's end), both int64."""
    chosen, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=experts.device)
    return order, torch.searchsorted(chosen, numbers, right=True)


def dispatch(experts: torch.Tensor, num_experts: int, tile_rows: int) -> Dispatch:
    """experts [tokens, top_k] int64, without waiting for the device."""
    order, ends = by_expert(experts, num_experts)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = (ends - starts + (tile_rows - 1)) // tile_rows
    tile_ends = counts.cumsum(0)
    places = torch.arange(most_tiles(order.shape[0], num_experts, tile_rows), device=experts.device)
    owner = torch.searchsorted(tile_ends, places, right=True)
    held = owner.clamp(max=num_experts - 1)
    first = starts[held] + (places - (tile_ends - counts)[held]) * tile_rows
    expert = torch.where(owner < num_experts, owner, -1)
    tiles = torch.stack([expert, first, ends[held]], dim=1).int()
    return Dispatch(order.int(), ends.int(), tiles, tile_rows)
