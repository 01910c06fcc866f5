"""Models ask for tensors by the names of Hugging Face's modules; checkpoints store some under names of their own."""

import re
from collections.abc import Callable, Iterable

Rules = tuple[tuple[str, str], ...]

_W_EXPERTS: Rules = (
    (r"\.gate_proj\.", ".w1."),
    (r"\.up_proj\.", ".w3."),
    (r"\.down_proj\.", ".w2."),
)
_MIXTRAL: Rules = ((r"\.mlp\.", ".block_sparse_moe."), *_W_EXPERTS)
_V4_SAVED: Rules = (
    # The compressor's gate_proj and kv_proj are not the experts' w1.
    (r"\.compressor\.(indexer\.)?gate_proj\.", r".compressor.\1wgate."),
    (r"\.kv_proj\.", ".wkv."),
    *_W_EXPERTS,
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"^lm_head\.", "head."),
)
_V4_NATIVE: Rules = (
    *_V4_SAVED,
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
)
# transformers' own writer maps every kv_norm back to norm.
_V4_WRITTEN: Rules = (*_V4_SAVED, (r"\.kv_norm\.", ".norm."))

# The text part of Kimi-K2.5; transformers' own writer also calls the layers blocks.
_TEXT_PART: Rules = ((r"^", "language_model."),)
_TEXT_PART_WRITTEN: Rules = (*_TEXT_PART, (r"\.layers\.", ".blocks."))

_BY_ARCHITECTURE: dict[str, tuple[Rules, ...]] = {
    "DeepseekV3ForCausalLM": (_TEXT_PART, _TEXT_PART_WRITTEN),
    "MixtralForCausalLM": (_MIXTRAL,),
    "DeepseekV4ForCausalLM": (_V4_WRITTEN, _V4_NATIVE),
}

Names = Callable[[str], Iterable[str]]
"""Where a tensor may be stored, the likeliest name first."""


def same_name(name: str) -> Iterable[str]:
    """The module's name only."""
    return (name,)


def names_of(architecture: str) -> Names:
    """The names that checkpoints of an architecture may use."""
    rule_sets = _BY_ARCHITECTURE.get(architecture, ())
    if not rule_sets:
        return same_name

    def names(name: str) -> Iterable[str]:
        return (name, *(_renamed(name, rules) for rules in rule_sets))

    return names


def _renamed(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
