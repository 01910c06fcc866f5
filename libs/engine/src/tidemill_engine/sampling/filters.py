"""min-p, top-k and top-p as one threshold for each row: tokens below it are cut, ties at it stay.

In the order of the field: min-p relative to the most probable token, then top-k, then the smallest set of the rest
whose probability reaches top-p of what is left.
"""

import torch

FIRST_LOOK = 256
"""Most distributions reach their top-p within so many tokens; the full sort is for the others."""


def keep_mask(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] bool of tokens that may be drawn; `probs` sum to 1, top_k 0 and top_p 1 mean off."""
    threshold = min_p * probs.amax(dim=-1)
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        threshold = torch.maximum(threshold, _sorted_threshold(probs, top_k, top_p, threshold))
    return probs >= threshold[:, None]


def _sorted_threshold(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, floor: torch.Tensor
) -> torch.Tensor:
    vocab = probs.shape[-1]
    first = min(FIRST_LOOK, vocab)
    ranked = torch.topk(probs, first, dim=-1).values
    short = first < vocab and bool(_needs_more(ranked, top_k, top_p, floor).any())
    if short:
        ranked = torch.sort(probs, dim=-1, descending=True).values
    width = ranked.shape[-1]
    kth = ranked.gather(1, (torch.where(top_k > 0, top_k, width).clamp(max=width) - 1)[:, None])
    # With top-p alone the total is 1 by definition; after top-k or min-p it is what they leave.
    kept = ranked * ((ranked >= kth) & (ranked >= floor[:, None]))
    cut = (top_k > 0) | (floor > 0)
    total = torch.where(cut, kept.sum(dim=-1, dtype=torch.float64), 1.0)
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    inside = (before < top_p[:, None] * total[:, None]) & (kept > 0)
    inside[:, 0] = True
    inside |= (top_p >= 1)[:, None] & (kept > 0)
    lowest = ranked.masked_fill(~inside, float("inf")).amin(dim=-1)
    # A row without top-k and top-p keeps everything above its floor, also what was not looked at.
    return torch.where((top_k > 0) | (top_p < 1), lowest, floor)


def _needs_more(ranked: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """[rows] bool: the first look does not hold all that top-k, min-p or top-p keep."""
    width = ranked.shape[-1]
    ends = ((top_k > 0) & (top_k < width)) | (ranked[:, -1] < floor)
    reached = ranked.sum(dim=-1, dtype=torch.float64) >= top_p
    uncut = (top_k == 0) & (floor == 0)
    return ~(ends | (reached & uncut) | ((top_k == 0) & (top_p >= 1)))
