"""Decoders with latent attention: DeepSeek-V3 (and Kimi-K2), and with an indexer DeepSeek-V3.2 and GLM-5.2."""

from collections.abc import Iterable

import torch
from torch.nn import functional

from tidemill_engine.attention.base import ForwardBatch
from tidemill_engine.attention.latent import Expansion, LatentBackend
from tidemill_engine.attention.row_store import Selection
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.layers.rotary import RotaryTable, pairs_to_halves, rotate
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.dense import Embeddings
from tidemill_engine.models.latent_config import IndexerConfig, LatentConfig
from tidemill_engine.models.mlp import make_mlp

LATENT, INDEX = "latent", "index"
INNER_EPS = 1e-6
"""Of the norms inside attention, whatever the model's own epsilon is."""
INDEX_EPS = 1e-6
"""Of the norm of the indexer's keys, which is a LayerNorm."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [tokens, 1, rope_dim]."""


class LatentProjections:
    """Matrices of one layer's latent attention; heads split over the ranks, latents whole on each."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, source: WeightSource, prefix: str) -> None:
        hidden, heads = config.hidden_size, config.num_heads
        self.latent = latent
        self.tp = source.tp
        self.query_dim = latent.nope_dim + latent.rope_dim
        rows = heads * self.query_dim
        if latent.q_rank:
            self.q_down = source.replicated(f"{prefix}.q_a_proj", latent.q_rank, hidden, bias=latent.bias)
            self.q_norm = source.vector(f"{prefix}.q_a_layernorm.weight", latent.q_rank)
            self.q_up = source.columns([f"{prefix}.q_b_proj"], [rows], latent.q_rank)
        else:
            self.q_up = source.columns([f"{prefix}.q_proj"], [rows], hidden)
        row = latent.kv_rank + latent.rope_dim
        self.kv_down = source.replicated(f"{prefix}.kv_a_proj_with_mqa", row, hidden, bias=latent.bias)
        self.kv_norm = source.vector(f"{prefix}.kv_a_layernorm.weight", latent.kv_rank)
        self.expansion = _expansion(latent, heads, source, f"{prefix}.kv_b_proj.weight")
        self.out = source.row(f"{prefix}.o_proj", hidden, heads * latent.value_dim, bias=latent.bias)

    def queries(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """q [tokens, heads, nope + rope] and what it was made from (the indexer reads that too)."""
        inner = x
        if self.latent.q_rank:
            inner = functional.rms_norm(self.q_down(x), self.q_norm.shape, self.q_norm, INNER_EPS)
        q = self.q_up(inner).view(x.shape[0], -1, self.query_dim)
        plain, turning = q[..., : self.latent.nope_dim], q[..., self.latent.nope_dim :]
        return torch.cat([plain, turn(turning, rotation, interleaved=self.latent.interleaved)], dim=-1), inner

    def rows(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[tokens, kv_rank + rope_dim]: what is kept of a token."""
        made = self.kv_down(x)
        plain, turning = made[:, : self.latent.kv_rank], made[:, self.latent.kv_rank :]
        normed = functional.rms_norm(plain, self.kv_norm.shape, self.kv_norm, INNER_EPS)
        turned = turn(turning[:, None], rotation, interleaved=self.latent.interleaved)
        return torch.cat([normed, turned[:, 0]], dim=-1)

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, summed over the ranks."""
        return self.tp.all_reduce(self.out(attended))


class Indexer:
    """Small queries and keys, whole on every rank, so that all ranks select the same rows."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, source: WeightSource, prefix: str) -> None:
        assert config.indexer is not None
        self.shape: IndexerConfig = config.indexer
        self.rope_dim = latent.rope_dim
        heads, dim = self.shape.num_heads, self.shape.head_dim
        self.q_up = source.replicated(f"{prefix}.wq_b", heads * dim, latent.q_rank)
        self.key = source.replicated(f"{prefix}.wk", dim, config.hidden_size)
        self.key_norm = source.vector(f"{prefix}.k_norm.weight", dim), source.vector(f"{prefix}.k_norm.bias", dim)
        self.weigh = source.replicated(f"{prefix}.weights_proj", heads, config.hidden_size)

    def queries(self, inner: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[tokens, heads, dim]"""
        return self._turned(self.q_up(inner).view(inner.shape[0], -1, self.shape.head_dim), rotation)

    def rows(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[tokens, dim] keys."""
        weight, bias = self.key_norm
        keys = functional.layer_norm(self.key(x), weight.shape, weight, bias, INDEX_EPS)
        return self._turned(keys[:, None], rotation)[:, 0]

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads]"""
        weights: torch.Tensor = self.weigh(x) * self.shape.num_heads**-0.5
        return weights

    def _turned(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The first values of a head turn, unlike in attention."""
        turning, plain = heads[..., : self.rope_dim], heads[..., self.rope_dim :]
        return torch.cat([turn(turning, rotation, interleaved=self.shape.interleaved), plain], dim=-1)


class LatentLayer:
    """Attention and MLP with their norms; an indexer where the layer has one of its own."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        assert config.latent is not None
        prefix = f"model.layers.{index}"
        self.eps = config.rms_norm_eps
        self.input_norm = source.vector(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.attention = LatentProjections(config, config.latent, source, f"{prefix}.self_attn")
        self.mlp_norm = source.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp = make_mlp(config, source, f"{prefix}.mlp", index)
        owns = config.indexer is not None and config.indexer.owner[index] == index
        self.indexer = Indexer(config, config.latent, source, f"{prefix}.self_attn.indexer") if owns else None


class LatentModel:
    """Latents of all layers in one paged group, keys of the layers with an indexer in another."""

    def __init__(self, config: ModelConfig, source: WeightSource, kv_dtype: str) -> None:
        assert config.latent is not None
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups = latent_groups(config, kv_dtype)
        self.rotary = RotaryTable(config.rope, config.latent.rope_dim, config.context_tokens)
        self.embeddings = Embeddings(config, source)
        self.layers = [LatentLayer(config, source, index) for index in range(config.num_layers)]
        self.elementwise = source.elementwise

    def forward(self, batch: ForwardBatch, attention: LatentBackend) -> torch.Tensor:
        hidden = self.embeddings.embed(batch.token_ids)
        rotation = self.rotary.at(batch.positions)
        delta: torch.Tensor | None = None
        selection: Selection | None = None
        num_indexers = 0
        for index, layer in enumerate(self.layers):
            x = self.elementwise.add_rms_norm(hidden, delta, layer.input_norm, layer.eps)
            q, inner = layer.attention.queries(x, rotation)
            attention.store(LATENT, index, layer.attention.rows(x, rotation))
            if layer.indexer is not None:
                selection = _select(layer.indexer, attention, num_indexers, x, inner, rotation)
                num_indexers += 1
            attended = attention.latent(LATENT, index, q, layer.attention.expansion, selection)
            delta = layer.attention.finish(attended)
            normed = self.elementwise.add_rms_norm(hidden, delta, layer.mlp_norm, layer.eps)
            delta = layer.mlp(normed, batch.token_ids)
        return self.embeddings.last(hidden, delta, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.embeddings.logits(hidden)


def latent_groups(config: ModelConfig, kv_dtype: str) -> tuple[KVGroupSpec, ...]:
    """Every rank holds all of them: a latent belongs to no head."""
    assert config.latent is not None
    row = config.latent.kv_rank + config.latent.rope_dim
    groups = [row_group(LATENT, range(config.num_layers), kv_dtype, row)]
    if config.indexer is not None:
        owners = [i for i in range(config.num_layers) if config.indexer.owner[i] == i]
        groups.append(row_group(INDEX, owners, kv_dtype, config.indexer.head_dim))
    return tuple(groups)


def row_group(name: str, layers: Iterable[int], kv_dtype: str, values: int, tokens_per_row: int = 1) -> KVGroupSpec:
    """A paged group of one vector for each row."""
    return KVGroupSpec(
        name=name,
        kind="paged",
        layers=tuple(layers),
        dtype=kv_dtype,
        num_heads=1,
        head_values=values,
        sharded=False,
        planes=1,
        tokens_per_row=tokens_per_row,
    )


def turn(heads: torch.Tensor, rotation: Rotation, *, interleaved: bool) -> torch.Tensor:
    """Rotary embedding over all values of [tokens, heads, dim]; pairs come out as halves, in queries and keys alike."""
    return rotate(pairs_to_halves(heads) if interleaved else heads, *rotation)


def _select(
    indexer: Indexer,
    attention: LatentBackend,
    layer: int,
    x: torch.Tensor,
    inner: torch.Tensor,
    rotation: Rotation,
) -> Selection:
    attention.store(INDEX, layer, indexer.rows(x, rotation))
    return attention.select(INDEX, layer, indexer.queries(inner, rotation), indexer.weights(x), indexer.shape.top_k)


def _expansion(latent: LatentConfig, num_heads: int, source: WeightSource, name: str) -> Expansion:
    start, end = source.tp.share("num_attention_heads", num_heads)
    rows = latent.nope_dim + latent.value_dim
    shape = (num_heads * rows, latent.kv_rank)
    weight = source.checkpoint.take(name, shape, start=start * rows, end=end * rows).float()
    by_head = weight.view(end - start, rows, -1)
    keys, values = by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :]
    return Expansion(keys.contiguous(), values.contiguous(), latent.scale)
