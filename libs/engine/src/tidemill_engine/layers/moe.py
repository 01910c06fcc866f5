"""Mixture of experts: who computes which token (router), and the experts themselves."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from tidemill_engine.layers.linear import Linear

Gate = Callable[[torch.Tensor], torch.Tensor]
"""[rows, 2 * inner] gate and up -> [rows, inner]."""


class Router:
    """Scores every expert for each token and keeps the best."""

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        top_k: int,
        scoring: str,
        bias: torch.Tensor | None,
        renormalise: bool,
        weight_floor: float,
        scale: float,
        num_groups: int = 1,
        kept_groups: int = 1,
        expert_of_token: torch.Tensor | None = None,
    ) -> None:
        self.weight = weight
        self.top_k = top_k
        self.score = SCORES[scoring]
        self.bias = bias
        self.renormalise = renormalise
        self.weight_floor = weight_floor
        self.scale = scale
        self.num_groups = num_groups
        self.kept_groups = kept_groups
        self.expert_of_token = expert_of_token
        """[vocab, top_k] int64 of hash-routed layers: the table chooses, scores only weigh."""

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 and experts int64, both [tokens, top_k]."""
        scores = self.score(functional.linear(x, self.weight))
        experts = self.expert_of_token[token_ids] if self.expert_of_token is not None else self._choose(scores)
        weights = scores.gather(1, experts)
        if self.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.weight_floor)
        return weights * self.scale, experts

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        ranked = scores if self.bias is None else scores + self.bias
        if self.num_groups > 1:
            grouped = ranked.view(ranked.shape[0], self.num_groups, -1)
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.kept_groups, dim=-1, sorted=False).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            ranked = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return ranked.topk(self.top_k, dim=-1).indices


class Experts:
    """Gated MLPs, each over the tokens that chose it; experts that nobody chose are not read."""

    def __init__(self, gate_up: Sequence[Linear], down: Sequence[Linear], gate: Gate) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate = gate

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]; the sum over a token's experts runs in the order of its choice, whatever else the batch
        holds."""
        tokens, top_k = experts.shape
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        sorted_x = x[order // top_k]
        made = torch.empty_like(sorted_x)
        first = 0
        for expert, count in enumerate(chosen.bincount(minlength=len(self.down)).tolist()):
            if count:
                rows = slice(first, first + count)
                made[rows] = self.down[expert](self.gate(self.gate_up[expert](sorted_x[rows])))
                first += count
        by_choice = torch.empty_like(made)
        by_choice[order] = made
        return (by_choice.view(tokens, top_k, -1) * weights[..., None]).sum(dim=1)


def clamped_silu_mul(limit: float) -> Gate:
    """silu of the gate, bounded above, times up, bounded on both sides."""

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        gates, ups = gate_up.chunk(2, dim=-1)
        return functional.silu(gates.clamp(max=limit)).mul_(ups.clamp(-limit, limit))

    return gate


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


def _sqrtsoftplus(logits: torch.Tensor) -> torch.Tensor:
    return functional.softplus(logits).sqrt()


SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}
