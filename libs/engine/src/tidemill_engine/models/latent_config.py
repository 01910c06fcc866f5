"""What config.json says of latent attention and its indexer, in our words."""

import math
from dataclasses import dataclass
from typing import Any

from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.models.moe_config import MlpKind, MoeConfig, need

LATENT_ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
INDEXED_ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention."""

    q_rank: int
    """0: queries come from the hidden state in one step."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    score_factor: float
    """On the scores beside (nope_dim + rope_dim)^-0.5."""
    interleaved: bool
    """Rotated values are stored as pairs, not as halves."""
    bias: bool
    """On the projections down to the ranks, and on the output."""

    @property
    def scale(self) -> float:
        """On the scores."""
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.score_factor)


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Which tokens attention reads: the best by a small attention of its own."""

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    """DeepSeek-V3.2's indexer rotates halves although its attention rotates pairs; GLM's rotates pairs in both."""
    owner: tuple[int, ...]
    """By layer: the layer whose indexer selects for it (itself, or the last one before that has an indexer)."""


def parse_latent(architecture: str, raw: dict[str, Any]) -> LatentConfig | None:
    """None for a model without latents."""
    if architecture not in LATENT_ARCHITECTURES:
        return None
    if architecture in INDEXED_ARCHITECTURES and not raw.get("q_lora_rank"):
        raise CheckpointError("config.json lacks q_lora_rank, which the indexer reads from")
    return LatentConfig(
        q_rank=raw.get("q_lora_rank") or 0,
        kv_rank=need(raw, "kv_lora_rank"),
        nope_dim=need(raw, "qk_nope_head_dim"),
        rope_dim=need(raw, "qk_rope_head_dim"),
        value_dim=need(raw, "v_head_dim"),
        score_factor=_score_factor(raw.get("rope_parameters") or raw.get("rope_scaling") or {}),
        interleaved=bool(raw.get("rope_interleave", True)),
        bias=bool(raw.get("attention_bias", False)),
    )


def parse_indexer(architecture: str, raw: dict[str, Any], num_layers: int) -> IndexerConfig | None:
    """None for a model that attends to all tokens."""
    if architecture not in INDEXED_ARCHITECTURES:
        return None
    glm = architecture == "GlmMoeDsaForCausalLM"
    return IndexerConfig(
        num_heads=need(raw, "index_n_heads"),
        head_dim=need(raw, "index_head_dim"),
        top_k=need(raw, "index_topk"),
        interleaved=bool(raw.get("indexer_rope_interleave", glm)),
        owner=_owners(_has_indexer(raw, num_layers) if glm else [True] * num_layers),
    )


def parse_sigmoid_moe(raw: dict[str, Any], num_layers: int) -> MoeConfig:
    """Experts of the DeepSeek-V3 family: sigmoid scores, chosen with a correction bias from the best groups."""
    if raw.get("topk_method", "noaux_tc") != "noaux_tc":
        raise CheckpointError(f"topk_method {raw['topk_method']!r} is not supported, only 'noaux_tc'")
    if raw.get("scoring_func", "sigmoid") != "sigmoid":
        raise CheckpointError(f"scoring_func {raw['scoring_func']!r} is not supported here, only 'sigmoid'")
    if raw.get("moe_layer_freq", 1) != 1:
        raise CheckpointError("moe_layer_freq is not supported, only 1")
    expert_size = need(raw, "moe_intermediate_size")
    return MoeConfig(
        kinds=_mlp_kinds(raw, num_layers),
        num_experts=need(raw, "n_routed_experts", "num_local_experts", "num_experts"),
        top_k=need(raw, "num_experts_per_tok"),
        expert_size=expert_size,
        shared_size=expert_size * need(raw, "n_shared_experts"),
        scoring="sigmoid",
        has_bias=True,
        renormalise=bool(raw.get("norm_topk_prob", True)),
        weight_floor=1e-20,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        num_groups=raw.get("n_group") or 1,
        kept_groups=raw.get("topk_group") or 1,
    )


def _mlp_kinds(raw: dict[str, Any], num_layers: int) -> tuple[MlpKind, ...]:
    named = raw.get("mlp_layer_types")
    dense = [i < need(raw, "first_k_dense_replace") for i in range(num_layers)]
    if named is not None:
        dense = [kind == "dense" for kind in named[:num_layers]]
    return tuple("dense" if plain else "moe" for plain in dense)


def _has_indexer(raw: dict[str, Any], num_layers: int) -> list[bool]:
    """By layer: named one by one, by a pattern of F and S, or by a period after an offset."""
    named = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if named is not None:
        return [kind in ("full", "F") for kind in named[:num_layers]]
    period = max(raw.get("index_topk_freq") or 1, 1)
    offset = raw.get("index_skip_topk_offset", 2)
    return [max(i - offset + 1, 0) % period == 0 for i in range(num_layers)]


def _owners(has_indexer: list[bool]) -> tuple[int, ...]:
    if not has_indexer[0]:
        raise CheckpointError("layer 0 shares the indices of an earlier layer: there is none")
    owners: list[int] = []
    for layer, own in enumerate(has_indexer):
        owners.append(layer if own else owners[-1])
    return tuple(owners)


def _score_factor(scaling: dict[str, Any]) -> float:
    weight = scaling.get("mscale_all_dim") or 0.0
    factor = scaling.get("factor") or 1.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default" or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)
