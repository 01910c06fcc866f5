"""Writes tokenizer.json, tokenizer_config.json and chat_template.jinja from a GGUF's byte-level BPE metadata."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tidemill_engine.loading.errors import CheckpointError

CONTROL_TOKEN = 3
"""GGUF's token_type of special tokens."""


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError for a tokenizer that is not SmolLM's byte-level BPE."""
    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"tokenizer {kind} is not supported, only ('gpt2', 'smollm')")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # llama.cpp's "smollm": every digit by itself, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(
        folder,
        chat_template=fields["tokenizer.chat_template"],
        context_tokens=fields["llama.context_length"],
        special_tokens={
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        },
    )


def write_tokenizer_config(
    folder: Path, *, chat_template: str, context_tokens: int, special_tokens: dict[str, str]
) -> None:
    """tokenizer_config.json (template included) and chat_template.jinja."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        **special_tokens,
        "chat_template": chat_template,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
