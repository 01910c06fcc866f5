"""What a checkpoint's config.json says, in our words; refuses by key whatever the models here do not compute."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill_engine.loading.errors import CheckpointError

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TOY_ARCHITECTURE = "TidemillToyForCausalLM"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; `kind` is one of "default", "linear", "llama3", "yarn"."""

    kind: str
    theta: float
    factor: float = 1.0
    original_context_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    """0: derived from the factor."""
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder over the whole model (all ranks)."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window_tokens: int = 0
    """Ring of the toy architecture's window layers."""
    state_values: int = 0
    """Values for each head of the toy architecture's state layers."""
    snapshot_interval_tokens: int = 0


def read_config(model_dir: Path) -> ModelConfig:
    """Raises CheckpointError naming the key that is missing or not supported."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    raw = json.loads(path.read_text(encoding="utf-8"))
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in (*DENSE_ARCHITECTURES, TOY_ARCHITECTURE):
        known = ", ".join((*DENSE_ARCHITECTURES, TOY_ARCHITECTURE))
        raise CheckpointError(f"architecture {architecture} is not supported; known: {known}")
    return _parse(architecture, raw)


def _parse(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("use_sliding_window"):
        raise CheckpointError("use_sliding_window is not supported")
    num_heads = _need(raw, "num_attention_heads")
    hidden_size = _need(raw, "hidden_size")
    llama_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_need(raw, "intermediate_size"),
        num_layers=_need(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or hidden_size // num_heads,
        vocab_size=_need(raw, "vocab_size"),
        context_tokens=_need(raw, "max_position_embeddings"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_parse_rope(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=llama_bias or architecture == "Qwen2ForCausalLM",
        output_bias=llama_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        window_tokens=raw.get("window_tokens", 0),
        state_values=raw.get("state_values", 0),
        snapshot_interval_tokens=raw.get("snapshot_interval_tokens", 0),
    )


def _parse_rope(raw: dict[str, Any]) -> RopeConfig:
    # transformers 5 writes all of it as rope_parameters, older ones as rope_theta and rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "dynamic":
        raise CheckpointError(
            "rope scaling 'dynamic' is not supported: its frequencies change with the length, cached KV would be wrong"
        )
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(f"rope scaling {kind!r} is not supported; known: default, linear, llama3, yarn")
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor is not supported")
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0))),
        factor=float(scaling.get("factor", 1.0)),
        original_context_tokens=scaling.get("original_max_position_embeddings")
        or _need(raw, "max_position_embeddings"),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        attention_factor=float(scaling.get("attention_factor") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _need(raw: dict[str, Any], key: str) -> int:
    if raw.get(key) is None:
        raise CheckpointError(f"config.json lacks {key}")
    return int(raw[key])
