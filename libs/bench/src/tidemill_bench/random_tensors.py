"""Random weights of a model's shape, made on the device: speed does not depend on what weights say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "vocab_size": 129_280,
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Of the 43 layers 2 have the window alone, 21 a sparse stream, 20 a heavy one.
    "deepseek-v4-flash, 6 layers": _V4_FLASH | {"num_hidden_layers": 6, "compress_ratios": [0, 4, 128, 4, 128, 4]},
    "deepseek-v4-flash, 3 layers": _V4_FLASH | {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]},
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
    "glm-5.2, 9 layers": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "hidden_size": 6144,
        "intermediate_size": 12_288,
        "num_hidden_layers": 9,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
        "rms_norm_eps": 1e-5,
        "vocab_size": 154_880,
        "max_position_embeddings": 1 << 20,
    },
}
"""Of GLM-5.2's 78 layers 3 dense ones and 6 with experts fit one device; 4 of these 9 have an indexer, 21 of the 78."""


class RandomTensors:
    """Stands for a checkpoint: any name, any shape."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator("cuda").manual_seed(seed)

    def take(self, name: str, shape: Sequence[int], *, axis: int = 0, start: int = 0, end: int = -1) -> torch.Tensor:
        """bfloat16 on the device, of the part's size; vectors are norms of about one."""
        size = list(shape)
        size[axis] = (size[axis] if end < 0 else end) - start
        values = torch.randn(size, generator=self._generator, device="cuda", dtype=torch.bfloat16)
        return 1 + 0.1 * values if len(size) == 1 else values * shape[-1] ** -0.5

    def take_integers(self, name: str, shape: Sequence[int], below: int) -> torch.Tensor:
        """int64 on the device."""
        return torch.randint(below, tuple(shape), generator=self._generator, device="cuda")


def write_config(shape: str, folder: Path, context_tokens: int) -> Path:
    """A model folder with nothing but config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | {"max_position_embeddings": context_tokens}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
