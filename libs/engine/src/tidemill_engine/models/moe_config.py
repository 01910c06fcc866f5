"""What config.json says of experts, in our words."""

from dataclasses import dataclass
from typing import Any, Literal

from tidemill_engine.loading.errors import CheckpointError

MOE_ARCHITECTURES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")

MlpKind = Literal["dense", "moe", "hash"]
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed and shared experts."""

    kinds: tuple[MlpKind, ...]
    """By layer; "hash" experts are named by a table of token ids."""
    num_experts: int
    top_k: int
    expert_size: int
    """Inner features of a routed expert."""
    shared_size: int
    """Inner features of the shared experts together; 0 without them."""
    scoring: Scoring
    has_bias: bool
    """A correction bias is added to the scores for the choice only."""
    renormalise: bool
    weight_floor: float
    """Added to the sum that weights are divided by."""
    scale: float
    num_groups: int = 1
    kept_groups: int = 1
    """Experts are chosen from so many groups, those whose two best scores have the largest sum."""
    clamp: float = 0.0
    """Bound of gate (above) and up (both sides) before the product; 0 without."""


def parse_moe(architecture: str, raw: dict[str, Any], num_layers: int) -> MoeConfig | None:
    """None for a model without experts; raises CheckpointError for what is not computed here."""
    if architecture == "Qwen3MoeForCausalLM":
        return _qwen3_moe(raw, num_layers)
    if architecture == "MixtralForCausalLM":
        return _mixtral(raw, num_layers)
    return None


def _qwen3_moe(raw: dict[str, Any], num_layers: int) -> MoeConfig:
    dense = set(raw.get("mlp_only_layers") or [])
    step = raw.get("decoder_sparse_step", 1)
    num_experts = need(raw, "num_experts", "num_local_experts")
    kinds: list[MlpKind] = [
        "moe" if num_experts and i not in dense and (i + 1) % step == 0 else "dense" for i in range(num_layers)
    ]
    return MoeConfig(
        kinds=tuple(kinds),
        num_experts=num_experts,
        top_k=need(raw, "num_experts_per_tok"),
        expert_size=need(raw, "moe_intermediate_size"),
        shared_size=0,
        scoring="softmax",
        has_bias=False,
        renormalise=bool(raw.get("norm_topk_prob", False)),
        weight_floor=0.0,
        scale=1.0,
    )


def _mixtral(raw: dict[str, Any], num_layers: int) -> MoeConfig:
    kinds: list[MlpKind] = ["moe"] * num_layers
    return MoeConfig(
        kinds=tuple(kinds),
        num_experts=need(raw, "num_local_experts", "num_experts"),
        top_k=need(raw, "num_experts_per_tok"),
        expert_size=need(raw, "intermediate_size"),
        shared_size=0,
        scoring="softmax",
        has_bias=False,
        renormalise=True,
        weight_floor=0.0,
        scale=1.0,
    )


def need(raw: dict[str, Any], *keys: str) -> int:
    """The first of the keys that is there."""
    for key in keys:
        if raw.get(key) is not None:
            return int(raw[key])
    raise CheckpointError(f"config.json lacks {keys[0]}")
