"""Random weights of a model's shape, made on the device: speed does not depend on what weights say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
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
}


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


def write_config(shape: str, folder: Path, context_tokens: int) -> Path:
    """A model folder with nothing but config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | {"max_position_embeddings": context_tokens}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
