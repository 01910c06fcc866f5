"""Log-probabilities of the model's own distribution: before bias, penalties, temperature and masks, as OpenAI and vLLM
report them."""

import torch

TokenLogprobs = tuple[float, int, list[int], list[float]]
"""(logprob, rank from 1, top ids, top logprobs)."""


def token_logprobs(raw_logits: torch.Tensor, token_ids: torch.Tensor, top_n: list[int]) -> list[TokenLogprobs]:
    """One entry for each row; `top_n` says how many alternatives each wants."""
    logprobs = torch.log_softmax(raw_logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    most = max(top_n)
    if most == 0:
        tops_ids: list[list[int]] = [[] for _ in top_n]
        tops: list[list[float]] = [[] for _ in top_n]
    else:
        top = torch.topk(logprobs, most, dim=-1)
        tops, tops_ids = top.values.tolist(), top.indices.tolist()
    rows = zip(chosen[:, 0].tolist(), ranks.tolist(), tops_ids, tops, top_n, strict=True)
    return [(logprob, rank, ids[:n], values[:n]) for logprob, rank, ids, values, n in rows]
