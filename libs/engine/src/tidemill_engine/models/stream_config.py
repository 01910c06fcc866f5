"""What config.json of DeepSeek-V4 says, in our words."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.models.moe_config import MlpKind, MoeConfig, need
from tidemill_engine.models.rope_config import RopeConfig, rope_of

STREAM_ARCHITECTURES = ("DeepseekV4ForCausalLM",)

StreamKind = Literal["window", "sparse", "heavy"]
_KINDS: dict[str, StreamKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_KIND_OF_RATIO: dict[int, StreamKind] = {0: "window", 4: "sparse", 128: "heavy"}
SNAPSHOT_ROWS = 4
"""A snapshot for so many rows of the slowest stream."""


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """A window of the last tokens, and a compressed stream of all of them in most layers."""

    kinds: tuple[StreamKind, ...]
    """By layer: the window alone, or with a stream of which an indexer selects ("sparse"), or with all of a stream
    ("heavy")."""
    sparse_ratio: int
    heavy_ratio: int
    window_tokens: int
    q_rank: int
    rope_dim: int
    stream_rope: RopeConfig
    """Of layers with a stream; the others have the model's own."""
    output_groups: int
    output_rank: int
    index_heads: int
    index_dim: int
    index_top_k: int
    residual_streams: int
    sinkhorn_steps: int
    mix_eps: float

    @property
    def snapshot_interval_tokens(self) -> int:
        """Tokens between snapshots of window and compressor state."""
        ratios = [self.ratio(kind) for kind in set(self.kinds) if kind != "window"]
        return SNAPSHOT_ROWS * math.lcm(*ratios) if ratios else SNAPSHOT_ROWS * self.window_tokens

    def ratio(self, kind: StreamKind) -> int:
        """Tokens for each row of a stream."""
        return self.sparse_ratio if kind == "sparse" else self.heavy_ratio

    def layers(self, kind: StreamKind) -> tuple[int, ...]:
        """Layers of a kind."""
        return tuple(i for i, own in enumerate(self.kinds) if own == kind)


def parse_streams(architecture: str, raw: dict[str, Any], num_layers: int) -> StreamConfig | None:
    """None for any other architecture."""
    if architecture not in STREAM_ARCHITECTURES:
        return None
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise CheckpointError(f"{key} is not supported for {architecture}")
    rates = raw.get("compress_rates") or {}
    return StreamConfig(
        kinds=_kinds(raw, num_layers),
        sparse_ratio=rates.get("compressed_sparse_attention") or raw.get("compress_rate_csa") or 4,
        heavy_ratio=rates.get("heavily_compressed_attention") or raw.get("compress_rate_hca") or 128,
        window_tokens=need(raw, "sliding_window", "window_size"),
        q_rank=need(raw, "q_lora_rank"),
        rope_dim=_rope_dim(raw),
        stream_rope=_stream_rope(raw),
        output_groups=need(raw, "o_groups"),
        output_rank=need(raw, "o_lora_rank"),
        index_heads=need(raw, "index_n_heads"),
        index_dim=need(raw, "index_head_dim"),
        index_top_k=need(raw, "index_topk"),
        residual_streams=need(raw, "hc_mult"),
        sinkhorn_steps=need(raw, "hc_sinkhorn_iters"),
        mix_eps=float(raw.get("hc_eps", 1e-6)),
    )


def parse_hashed_moe(raw: dict[str, Any], num_layers: int) -> MoeConfig:
    """Experts whose first layers are named by the token's id."""
    if raw.get("n_shared_experts", 1) != 1:
        raise CheckpointError(f"n_shared_experts = {raw['n_shared_experts']} is not supported here, only 1")
    scoring = raw.get("scoring_func", "sqrtsoftplus")
    if scoring not in ("sqrtsoftplus", "softmax", "sigmoid"):
        raise CheckpointError(f"scoring_func {scoring!r} is not supported")
    named = raw.get("mlp_layer_types")
    num_hashed = raw.get("num_hash_layers", 3)
    kinds: list[MlpKind] = ["hash" if i < num_hashed else "moe" for i in range(num_layers)]
    if named is not None:
        kinds = ["hash" if kind == "hash_moe" else "moe" for kind in named[:num_layers]]
    expert_size = need(raw, "moe_intermediate_size")
    return MoeConfig(
        kinds=tuple(kinds),
        num_experts=need(raw, "n_routed_experts"),
        top_k=need(raw, "num_experts_per_tok"),
        expert_size=expert_size,
        shared_size=expert_size,
        scoring=scoring,
        has_bias=True,
        renormalise=True,
        weight_floor=1e-20,
        scale=float(raw.get("routed_scaling_factor", 1.5)),
        clamp=float(raw.get("swiglu_limit", 10.0)),
    )


def window_rope(raw: dict[str, Any]) -> RopeConfig:
    """Of layers without a stream: never scaled."""
    nested = (raw.get("rope_parameters") or {}).get("main")
    return rope_of(nested or {"rope_theta": raw.get("rope_theta", 10000.0)}, raw)


def _stream_rope(raw: dict[str, Any]) -> RopeConfig:
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    nested = parameters.get("compress")
    if nested is None:
        nested = {k: v for k, v in parameters.items() if k not in ("main", "rope_theta")}
        nested["rope_theta"] = raw.get("compress_rope_theta", 160000.0)
    # The reference does not scale cos and sin by YaRN's factor.
    return rope_of({"attention_factor": 1.0} | nested, raw)


def _rope_dim(raw: dict[str, Any]) -> int:
    if raw.get("qk_rope_head_dim"):
        return int(raw["qk_rope_head_dim"])
    return int(need(raw, "head_dim") * float(raw.get("partial_rotary_factor") or 0.125))


def _kinds(raw: dict[str, Any], num_layers: int) -> tuple[StreamKind, ...]:
    named, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    if named is not None:
        kinds = [_KINDS.get(kind) for kind in named[:num_layers]]
    elif ratios is not None:
        kinds = [_KIND_OF_RATIO.get(ratio) for ratio in ratios[:num_layers]]
    else:
        raise CheckpointError("config.json lacks layer_types or compress_ratios")
    if len(kinds) != num_layers or None in kinds:
        raise CheckpointError("layer_types or compress_ratios do not name every layer's attention")
    return tuple(kind for kind in kinds if kind is not None)
