"""Hyper-connections: a residual of several streams, which a layer reads as one and writes back to all.

For each token three sets of weights come from the streams themselves: how they are summed for the layer (`pre`), how
its output is spread (`post`), and how the streams mix meanwhile (`comb`, doubly stochastic by Sinkhorn's steps).
"""

from typing import NamedTuple

import torch
from torch.nn import functional


class Mixed(NamedTuple):
    """What a layer reads, and how its output goes back."""

    collapsed: torch.Tensor
    """[tokens, hidden]"""
    post: torch.Tensor
    """[tokens, streams]"""
    comb: torch.Tensor
    """[tokens, streams, streams]: the first axis is summed over."""


class HyperConnection:
    """Weights of one site; all float32."""

    def __init__(
        self, matrix: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, norm_eps: float, eps: float, steps: int
    ) -> None:
        self.matrix = matrix
        """[streams * (2 + streams), streams * hidden]"""
        self.base = base
        self.scale = scale
        self.norm_eps = norm_eps
        self.eps = eps
        self.steps = steps

    def __call__(self, streams: torch.Tensor) -> Mixed:
        """streams [tokens, streams, hidden]"""
        count = streams.shape[1]
        weights = functional.linear(unit_rms(streams.flatten(1), self.norm_eps), self.matrix)
        pre = torch.sigmoid(weights[:, :count] * self.scale[0] + self.base[:count]) + self.eps
        post = 2 * torch.sigmoid(weights[:, count : 2 * count] * self.scale[1] + self.base[count : 2 * count])
        mixing = weights[:, 2 * count :] * self.scale[2] + self.base[2 * count :]
        comb = sinkhorn(mixing.view(-1, count, count), self.eps, self.steps)
        return Mixed((pre[..., None] * streams).sum(dim=1), post, comb)


class HyperHead:
    """The last sum over the streams."""

    def __init__(self, matrix: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, norm_eps: float, eps: float):
        self.matrix = matrix
        self.base = base
        self.scale = scale
        self.norm_eps = norm_eps
        self.eps = eps

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]"""
        weights = functional.linear(unit_rms(streams.flatten(1), self.norm_eps), self.matrix)
        pre = torch.sigmoid(weights * self.scale + self.base) + self.eps
        return (pre[..., None] * streams).sum(dim=1)


def spread(mixed: Mixed, output: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """The streams after a layer whose output is [tokens, hidden]."""
    return torch.baddbmm(mixed.post[..., None] * output[:, None], mixed.comb.transpose(1, 2), streams)


def sinkhorn(logits: torch.Tensor, eps: float, steps: int) -> torch.Tensor:
    """Rows and columns that sum to about one."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last axis, without weights."""
    return functional.rms_norm(x, x.shape[-1:], None, eps)
