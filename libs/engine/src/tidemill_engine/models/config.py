"""What a checkpoint's config.json says, in our words; refuses by key whatever the models here do not compute."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.models.latent_config import (
    LATENT_ARCHITECTURES,
    IndexerConfig,
    LatentConfig,
    parse_indexer,
    parse_latent,
    parse_sigmoid_moe,
)
from tidemill_engine.models.moe_config import MOE_ARCHITECTURES, MoeConfig, need, parse_moe
from tidemill_engine.models.rope_config import RopeConfig, parse_rope
from tidemill_engine.models.stream_config import (
    STREAM_ARCHITECTURES,
    StreamConfig,
    parse_hashed_moe,
    parse_streams,
    window_rope,
)

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TOY_ARCHITECTURE = "TidemillToyForCausalLM"
KNOWN_ARCHITECTURES = (
    *DENSE_ARCHITECTURES,
    *MOE_ARCHITECTURES,
    *LATENT_ARCHITECTURES,
    *STREAM_ARCHITECTURES,
    TOY_ARCHITECTURE,
)

TEXT_PARTS = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
}
"""Models with other senses, of which the text part is served."""


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
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    indexer: IndexerConfig | None = None
    streams: StreamConfig | None = None

    def input_widths(self) -> dict[str, int]:
        """Input features of the model's matrices, by key."""
        widths = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        if self.moe is not None:
            widths["moe_intermediate_size"] = self.moe.expert_size
        if self.latent is not None:
            widths["q_lora_rank"] = self.latent.q_rank
            widths["num_attention_heads * v_head_dim"] = self.num_heads * self.latent.value_dim
        if self.streams is not None:
            widths["q_lora_rank"] = self.streams.q_rank
            widths["o_groups * o_lora_rank"] = self.streams.output_groups * self.streams.output_rank
            widths["heads of a group * head_dim"] = self.num_heads * self.head_dim // self.streams.output_groups
        return widths


NVFP4 = (("modelopt", "NVFP4"), ("compressed-tensors", "nvfp4-pack-quantized"))
"""Methods and forms of `quantization_config` that name it."""


def read_config(model_dir: Path) -> ModelConfig:
    """Raises CheckpointError naming the key that is missing or not supported."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    raw = json.loads(path.read_text(encoding="utf-8"))
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture in TEXT_PARTS:
        raw = {"quantization_config": raw.get("quantization_config")} | raw.get("text_config", {})
        architecture = TEXT_PARTS[architecture]
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise CheckpointError(f"architecture {architecture} is not supported; known: {known}")
    return _parse(architecture, raw)


def _parse(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    quantised = raw.get("quantization_config") or {}
    method, form = quantised.get("quant_method", "fp8"), quantised.get("quant_algo") or quantised.get("format")
    if method != "fp8" and (method, form) not in NVFP4:
        known = ", ".join(f"{method!r} with {form!r}" for method, form in NVFP4)
        given = f"{method!r} with {form!r}" if form else f"{method!r}"
        raise CheckpointError(f"quant_method {given} is not supported, only 'fp8' (with FP4 experts), {known}")
    if raw.get("use_sliding_window"):
        raise CheckpointError("use_sliding_window is not supported")
    if architecture == "MixtralForCausalLM" and raw.get("sliding_window"):
        raise CheckpointError("sliding_window is not supported for MixtralForCausalLM")
    num_heads = need(raw, "num_attention_heads")
    hidden_size = need(raw, "hidden_size")
    llama_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        # Where every layer has experts, there may be no other size.
        intermediate_size=need(raw, "intermediate_size", "moe_intermediate_size"),
        num_layers=need(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or hidden_size // num_heads,
        vocab_size=need(raw, "vocab_size"),
        context_tokens=need(raw, "max_position_embeddings"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=window_rope(raw) if architecture in STREAM_ARCHITECTURES else parse_rope(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=llama_bias or architecture == "Qwen2ForCausalLM",
        output_bias=llama_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        window_tokens=raw.get("window_tokens", 0),
        state_values=raw.get("state_values", 0),
        snapshot_interval_tokens=raw.get("snapshot_interval_tokens", 0),
        moe=_parse_moe(architecture, raw),
        latent=parse_latent(architecture, raw),
        indexer=parse_indexer(architecture, raw, need(raw, "num_hidden_layers")),
        streams=parse_streams(architecture, raw, need(raw, "num_hidden_layers")),
    )


def _parse_moe(architecture: str, raw: dict[str, Any]) -> MoeConfig | None:
    num_layers = need(raw, "num_hidden_layers")
    if architecture in LATENT_ARCHITECTURES:
        return parse_sigmoid_moe(raw, num_layers)
    if architecture in STREAM_ARCHITECTURES:
        return parse_hashed_moe(raw, num_layers)
    return parse_moe(architecture, raw, num_layers)
