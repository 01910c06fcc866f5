"""Tensor parallelism: each rank holds a range of heads and of inner features; sums and gathers go over gloo."""

from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 60.0
"""A rank whose peer is gone ends with an error after this, rather than hang."""


class TensorParallel:
    """One rank's view of its group; with size 1 every operation is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, init_method: str = "") -> None:
        self.rank = rank
        self.size = size
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )

    @property
    def is_leader(self) -> bool:
        """The leader samples."""
        return self.rank == 0

    def share(self, name: str, total: int) -> tuple[int, int]:
        """This rank's [start, end) of `total`; raises ValueError naming a size that does not divide."""
        if total % self.size:
            raise ValueError(f"{name} = {total} does not divide by tp_size = {self.size}")
        part = total // self.size
        return self.rank * part, (self.rank + 1) * part

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the ranks' tensors along the last axis."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast_from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader's values on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def close(self) -> None:
        """Leaves the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
