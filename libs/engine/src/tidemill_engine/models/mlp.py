"""What follows attention in a decoder layer: a gated MLP, or routed experts with shared ones that see every token."""

from collections.abc import Sequence
from typing import Protocol

import torch

from tidemill_engine.layers.moe import Experts, Gate, Router, clamped_silu_mul
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.moe_config import MoeConfig


class Mlp(Protocol):
    """What follows attention in a layer."""

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor: ...


class GatedMlp:
    """silu(gate) * up, then down; `inner` and `gate` where they are not the configuration's and silu."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, prefix: str, inner: int = 0, gate: Gate | None = None
    ) -> None:
        inner, hidden, bias = inner or config.intermediate_size, config.hidden_size, config.mlp_bias
        source.tp.share("intermediate_size", inner)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = source.columns(names, [inner, inner], hidden, bias=bias)
        self.down = source.row(f"{prefix}.down_proj", hidden, inner, bias=bias)
        self.tp = source.tp
        self.gate = gate or source.elementwise.silu_mul

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum."""
        return self.down(self.gate(self.gate_up(x)))


class MoeMlp:
    """Each rank holds a part of every expert's inner features; one sum over the ranks ends the layer."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str, index: int) -> None:
        assert config.moe is not None
        moe = config.moe
        gate = clamped_silu_mul(moe.clamp) if moe.clamp else source.elementwise.silu_mul
        self.router = make_router(moe, config, source, f"{prefix}.gate", hashed=moe.kinds[index] == "hash")
        self.experts = _experts(moe, config.hidden_size, source, f"{prefix}.experts", gate)
        self.shared = (
            GatedMlp(config, source, f"{prefix}.shared_experts", inner=moe.shared_size, gate=gate)
            if moe.shared_size
            else None
        )
        self.tp = source.tp

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        out = self.experts(x, *self.router(x, token_ids))
        if self.shared is not None:
            out += self.shared.partial(x)
        return self.tp.all_reduce(out)


def make_mlp(config: ModelConfig, source: WeightSource, prefix: str, index: int) -> Mlp:
    """The MLP of layer `index`."""
    if config.moe is None or config.moe.kinds[index] == "dense":
        return GatedMlp(config, source, prefix)
    return MoeMlp(config, source, prefix, index)


def make_router(moe: MoeConfig, config: ModelConfig, source: WeightSource, name: str, *, hashed: bool) -> Router:
    table = (config.vocab_size, moe.top_k)
    return Router(
        source.whole(f"{name}.weight", (moe.num_experts, config.hidden_size)),
        top_k=moe.top_k,
        scoring=moe.scoring,
        bias=source.vector(f"{name}.e_score_correction_bias", moe.num_experts) if moe.has_bias and not hashed else None,
        renormalise=moe.renormalise,
        weight_floor=moe.weight_floor,
        scale=moe.scale,
        num_groups=moe.num_groups,
        kept_groups=moe.kept_groups,
        expert_of_token=source.integers(f"{name}.tid2eid", table, moe.num_experts) if hashed else None,
    )


def _experts(moe: MoeConfig, hidden: int, source: WeightSource, prefix: str, gate: Gate) -> Experts:
    names: Sequence[str] = [f"{prefix}.{index}" for index in range(moe.num_experts)]
    rows = [moe.expert_size, moe.expert_size]
    gate_up = [source.columns([f"{name}.gate_proj", f"{name}.up_proj"], rows, hidden) for name in names]
    down = [source.row(f"{name}.down_proj", hidden, moe.expert_size) for name in names]
    return Experts(gate_up, down, gate)
