"""Random tiny checkpoints with a byte-level tokenizer and a chat template: real enough for every path of the mesh.

Matrices are scaled so that next-token distributions are peaked: greedy choices are then robust to the rounding that
other batch shapes, chunk borders and tensor-parallel sums bring.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tidemill_engine.loading.atomic import folder_being_made
from tidemill_engine.loading.gguf_tokenizer import write_tokenizer_config
from tidemill_engine.models.config import TOY_ARCHITECTURE

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "toy": TOY_ARCHITECTURE,
}
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|tool_call|>", "<|reserved_1|>",
    "<|reserved_2|>", "<|reserved_3|>",
)  # fmt: skip
CONTEXT_TOKENS = 1024
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tiny(architecture: str, out: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes the folder unless it is there; returns it. `overrides` change keys of config.json."""
    if (out / "config.json").is_file():
        return out
    config = tiny_config(architecture) | overrides
    with folder_being_made(out) as folder:
        save_file(random_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        write_tokenizer(folder)
        eos = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(eos, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def tiny_config(architecture: str) -> dict[str, Any]:
    """config.json of a tiny checkpoint."""
    special = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": "tidemill_toy" if architecture == "toy" else architecture,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3 if architecture == "toy" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": 256 + len(SPECIAL_TOKENS),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": architecture == "qwen3",
        "bos_token_id": special["<|im_start|>"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|pad|>"],
    }
    if architecture == "toy":
        config |= {"window_tokens": 24, "state_values": 16, "snapshot_interval_tokens": 64}
    return config


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Named random weights of a tiny checkpoint, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        elif len(shape) == 1:
            tensors[name] = 0.1 * torch.randn(shape, generator=generator)
        else:
            gain = 3.0 if name == "lm_head.weight" else 1.0
            tensors[name] = gain / shape[-1] ** 0.5 * torch.randn(shape, generator=generator)
    if not config["tie_word_embeddings"]:
        tensors["model.embed_tokens.weight"] *= config["hidden_size"] ** 0.5
    return tensors


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, in file order."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        mixer = _state_shapes(config) if is_state_layer(config, layer) else _attention_shapes(config)
        shapes |= {f"{prefix}.{name}": shape for name, shape in mixer.items()}
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            bias = bool(config.get("mlp_bias"))
            shapes |= _matrix(f"{prefix}.mlp.{part}_proj", rows, columns, bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def is_state_layer(config: dict[str, Any], layer: int) -> bool:
    """The toy's layers are paged attention, window attention, state, and so on in turn."""
    return bool(config["architectures"] == [TOY_ARCHITECTURE] and layer % 3 == 2)


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    llama_bias = bool(config.get("attention_bias"))
    qkv_bias = llama_bias or config["architectures"] == ["Qwen2ForCausalLM"]
    shapes: dict[str, tuple[int, ...]] = {}
    for part, rows in (("q", q), ("k", kv), ("v", kv)):
        shapes |= _matrix(f"self_attn.{part}_proj", rows, hidden, qkv_bias)
    if config["architectures"] == ["Qwen3ForCausalLM"]:
        shapes["self_attn.q_norm.weight"] = (dim,)
        shapes["self_attn.k_norm.weight"] = (dim,)
    return shapes | _matrix("self_attn.o_proj", hidden, q, llama_bias)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | ({f"{name}.bias": (rows,)} if bias else {})


def _state_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width = config["hidden_size"], config["num_key_value_heads"] * config["state_values"]
    return {
        "mixer.in_proj.weight": (width, hidden),
        "mixer.decay_proj.weight": (width, hidden),
        "mixer.gate_proj.weight": (width, hidden),
        "mixer.out_proj.weight": (hidden, width),
    }


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and `SPECIAL_TOKENS`, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    write_tokenizer_config(folder, chat_template=CHAT_TEMPLATE, context_tokens=CONTEXT_TOKENS, special_tokens=special)


def main() -> None:
    """Command line: `--architecture NAME --out DIR [--seed N]`."""
    parser = argparse.ArgumentParser(prog="python -m tidemill_engine.loading.tiny", description=__doc__)
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; left alone when it is there")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_tiny(arguments.architecture, arguments.out, arguments.seed))


if __name__ == "__main__":
    main()
