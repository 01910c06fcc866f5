"""What config.json says of rotary embedding, in our words."""

from dataclasses import dataclass
from typing import Any

from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.models.moe_config import need


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


def parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """Of a model whose layers all rotate alike, over the whole of a head's rotated part."""
    # transformers 5 writes all of it as rope_parameters, older ones as rope_theta and rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor is not supported")
    return rope_of({"rope_theta": raw.get("rope_theta", 10000.0)} | scaling, raw)


def rope_of(scaling: dict[str, Any], raw: dict[str, Any]) -> RopeConfig:
    """One set of rope parameters; raises CheckpointError for a scaling that is not computed here."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "dynamic":
        raise CheckpointError(
            "rope scaling 'dynamic' is not supported: its frequencies change with the length, cached KV would be wrong"
        )
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(f"rope scaling {kind!r} is not supported; known: default, linear, llama3, yarn")
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta") or 10000.0),
        factor=float(scaling.get("factor") or 1.0),
        original_context_tokens=scaling.get("original_max_position_embeddings") or need(raw, "max_position_embeddings"),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        attention_factor=float(scaling.get("attention_factor") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
    )
