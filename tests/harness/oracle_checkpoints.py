"""Tiny random checkpoints that Hugging Face transformers makes, saves and computes: the outside oracle of the large
architectures.

Matrices are scaled so that next-token distributions are peaked, as in `tidemill_engine.loading.tiny`, and nothing keeps
a neutral start value (zero biases, zero sinks): what is not computed must be missed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tidemill_engine.loading.atomic import folder_being_made
from tidemill_engine.loading.tiny import CONTEXT_TOKENS, SPECIAL_TOKENS, write_tokenizer

_BASE: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
# Many indexer heads: with few, scores are often exactly zero, and which of equal rows torch picks is its secret.
_INDEXER: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 24}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            "num_hidden_layers": 5,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "sliding_window": 12,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
            "index_n_heads": 32,
            "index_head_dim": 16,
            "index_topk": 6,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
        },
    ),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "deepseek_v32": ("DeepseekV32", _LATENT | _INDEXER),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        _LATENT
        | _INDEXER
        | {
            "num_hidden_layers": 6,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-5,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 3,
        },
    ),
}


def make_kimi_k25(out: Path, seed: int = 0) -> Path:
    """A checkpoint whose text part is DeepSeek-V3's, beside a vision tower."""
    text = _BASE | CONFIGS["deepseek_v3"][1] | {"model_type": "deepseek_v3"}
    eyes = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=eyes, projection_hidden_size=32, tie_word_embeddings=False
    )
    model = transformers.Kimi_K25ForConditionalGeneration(config).eval()
    randomise(model, seed)
    with folder_being_made(out) as folder:
        model.save_pretrained(folder)
        write_tokenizer(folder)
    return out


def make_oracle(name: str, out: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes the folder; `overrides` change the configuration."""
    prefix, values = CONFIGS[name]
    config = getattr(transformers, f"{prefix}Config")(**(_BASE | values | overrides))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomise(model, seed)
    with folder_being_made(out) as folder:
        model.save_pretrained(folder)
        write_tokenizer(folder)
    return out


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Gives every parameter and stored buffer values of about the size that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            tensor.random_(0, 2**31, generator=generator)
            tensor.remainder_(tensor_limit(model, name))
            continue
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("norm.weight", "scale")) or "layernorm" in name:
            tensor.copy_(1.0 + 0.1 * values)
        elif tensor.ndim == 1:
            tensor.copy_(0.1 * values)
        elif name == "model.embed_tokens.weight":
            tensor.copy_(values)
        else:
            gain = 3.0 if name == "lm_head.weight" else 1.0
            if name.endswith("indexer.wk.weight"):
                # Keys so small that the epsilon of their norm tells.
                gain = 2e-3
            tensor.copy_(gain / tensor.shape[-1] ** 0.5 * values)


def tensor_limit(model: torch.nn.Module, name: str) -> int:
    """What a stored table of numbers counts below."""
    assert name.endswith("tid2eid"), name
    experts: int = model.config.n_routed_experts
    return experts


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return settings


def assert_greedy(logits: torch.Tensor, tokens: Sequence[int], margin: float) -> None:
    """Each token is the likeliest of its row of logits, or within `margin` of it: sums in another order may part two
    that are as close."""
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    wrong = [int(at) for at in (behind > margin).nonzero()]
    assert not wrong, f"wrong tokens at {wrong} of {len(tokens)}"


def random_prompt(length: int, seed: int = 1) -> list[int]:
    """Token ids that every oracle's vocabulary has."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_mixed_batch(driver: Any, model: Any, margin: float) -> None:
    """Greedy tokens equal the reference's while prompts are computed in chunks beside a row that grows one by one."""
    prompts = {row: random_prompt(length, seed=row) for row, length in ((0, 9), (1, 40), (2, 75))}
    for row, tokens in prompts.items():
        driver.add(row, tokens)
    for parts in [{0: 9}, {0: 1, 1: 25}, {0: 1, 1: 15, 2: 30}, {0: 1, 1: 1, 2: 45}] + [{0: 1, 1: 1, 2: 1}] * 30:
        driver.step(parts)
    for row, tokens in prompts.items():
        logits = model(torch.tensor([driver.tokens[row][:-1]])).logits[0, len(tokens) - 1 :]
        assert_greedy(logits, driver.tokens[row][len(tokens) :], margin)
