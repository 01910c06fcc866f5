"""Attention in parts: each gives its output and the logarithm of its softmax sum, by which they are merged."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """Attention over some of the keys."""

    out: torch.Tensor
    """[..., queries, values]"""
    lse: torch.Tensor
    """[..., queries]: -inf where every key was hidden."""


def attend_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float) -> Part:
    """q [..., queries, dim] over k [..., keys, dim] and v [..., keys, values], of which leading axes may be missing;
    `hidden` is broadcastable to [..., queries, keys]. Hidden keys and values must be finite."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    top.masked_fill_(top == float("-inf"), 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = (weights @ v) / total.clamp_min(torch.finfo(total.dtype).tiny)
    return Part(out, (top + total.log()).squeeze(-1))


def merge(parts: Sequence[Part], sink: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over the keys of all parts; `sink`, broadcastable to lse, is the logit of a key without value."""
    lses = torch.stack([part.lse for part in parts])
    top = lses.amax(dim=0)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = (lses - top).exp_()
    total = weights.sum(dim=0)
    if sink is not None:
        total = total + (sink - top).exp()
    out = sum(weight[..., None] * part.out for weight, part in zip(weights, parts, strict=True))
    assert isinstance(out, torch.Tensor), "there is a part"
    return out / total[..., None]
