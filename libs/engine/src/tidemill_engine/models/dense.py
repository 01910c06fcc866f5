"""Decoders with grouped-query attention: Llama, Qwen2 (bias on Q, K, V), Qwen3 (norms on Q and K), and those of them
whose MLPs are experts: Mixtral, Qwen3-MoE."""

import torch
from torch.nn import functional

from tidemill_engine.attention.base import AttentionBackend, ForwardBatch
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.layers.rotary import RotaryTable
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.mlp import make_mlp

PAGED = "kv"


class SelfAttention:
    """Projections of one attention layer; which KV group it attends through is the caller's."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        tp, dim = source.tp, config.head_dim
        self.eps = config.rms_norm_eps
        self.num_heads = _share_size(source, "num_attention_heads", config.num_heads)
        self.num_kv_heads = _share_size(source, "num_key_value_heads", config.num_kv_heads)
        self.dim = dim
        rows = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        names = [f"{prefix}.{part}_proj" for part in ("q", "k", "v")]
        self.qkv = source.columns(names, rows, config.hidden_size, bias=config.qkv_bias)
        self.out = source.row(f"{prefix}.o_proj", config.hidden_size, rows[0], bias=config.output_bias)
        self.qk_norms = (
            (source.vector(f"{prefix}.q_norm.weight", dim), source.vector(f"{prefix}.k_norm.weight", dim))
            if config.qk_norm
            else None
        )
        self.tp = tp
        self.elementwise = source.elementwise

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q, rotated k, v as [tokens, heads, dim]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.dim)
        split = self.num_heads + self.num_kv_heads
        if self.qk_norms:
            q_norm, k_norm = self.qk_norms
            q = functional.rms_norm(heads[:, : self.num_heads], (self.dim,), q_norm, self.eps)
            k = functional.rms_norm(heads[:, self.num_heads : split], (self.dim,), k_norm, self.eps)
            heads = torch.cat([q, k, heads[:, split:]], dim=1)
        heads = self.elementwise.rotate(heads, split, cos, sin)
        return heads[:, : self.num_heads], heads[:, self.num_heads : split], heads[:, split:]

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, summed over the ranks."""
        return self.tp.all_reduce(self.out(attended))


class Embeddings:
    """Token embedding, last norm and output matrix."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self.eps = config.rms_norm_eps
        self.table = source.embedding("model.embed_tokens.weight", vocab, hidden)
        self.norm = source.vector("model.norm.weight", hidden)
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        self.head = source.head(head, vocab, hidden)
        self.tp = source.tp
        self.elementwise = source.elementwise

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table.index_select(0, token_ids).float()

    def last(self, hidden: torch.Tensor, delta: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """Normed hidden states of the tokens that are sampled; `delta` is what the last layer adds."""
        index = batch.sample_indices
        added = None if delta is None else delta[index]
        return self.elementwise.add_rms_norm(hidden[index], added, self.norm, self.eps)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """By the last norm."""
        return self.elementwise.add_rms_norm(hidden, None, self.norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.tp.gather_columns(self.head(hidden))


class DenseLayer:
    """Attention and MLP with their norms."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        prefix = f"model.layers.{index}"
        self.eps = config.rms_norm_eps
        self.input_norm = source.vector(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.attention = SelfAttention(config, source, f"{prefix}.self_attn")
        self.mlp_norm = source.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp = make_mlp(config, source, f"{prefix}.mlp", index)


class DenseModel:
    """All layers hold paged KV of one group."""

    def __init__(self, config: ModelConfig, source: WeightSource, kv_dtype: str) -> None:
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups: tuple[KVGroupSpec, ...] = (paged_group(PAGED, range(config.num_layers), config, kv_dtype),)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.context_tokens)
        self.embeddings = Embeddings(config, source)
        self.layers = [DenseLayer(config, source, index) for index in range(config.num_layers)]
        self.elementwise = source.elementwise

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        hidden = self.embeddings.embed(batch.token_ids)
        cos, sin = self.rotary.at(batch.positions)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = self.elementwise.add_rms_norm(hidden, delta, layer.input_norm, layer.eps)
            q, k, v = layer.attention.project(normed, cos, sin)
            delta = layer.attention.finish(attention.paged(PAGED, index, q, k, v))
            normed = self.elementwise.add_rms_norm(hidden, delta, layer.mlp_norm, layer.eps)
            delta = layer.mlp(normed, batch.token_ids)
        return self.embeddings.last(hidden, delta, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.embeddings.logits(hidden)


def paged_group(name: str, layers: range | tuple[int, ...], config: ModelConfig, kv_dtype: str) -> KVGroupSpec:
    """Grouped-query KV: K and V of each head."""
    return KVGroupSpec(
        name=name,
        kind="paged",
        layers=tuple(layers),
        dtype=kv_dtype,
        num_heads=config.num_kv_heads,
        head_values=2 * config.head_dim,
    )


def _share_size(source: WeightSource, name: str, total: int) -> int:
    start, end = source.tp.share(name, total)
    return end - start
