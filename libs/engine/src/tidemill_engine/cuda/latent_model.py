"""Decoders with latent attention on CUDA: DeepSeek-V3 (and Kimi-K2), and with an indexer DeepSeek-V3.2 and GLM-5.2."""

from collections.abc import Iterator

import torch

from tidemill_engine.cuda.attention import StepAttention
from tidemill_engine.cuda.experts import MakeWeight
from tidemill_engine.cuda.kernels.latent_store import store_index, store_latent
from tidemill_engine.cuda.kernels.norm import add_rms_norm
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.latent_attention import Chosen, IndexerQueries, LatentExpansion, LatentPagedAttention
from tidemill_engine.cuda.linear import DeviceLinear, GatedLinear
from tidemill_engine.cuda.mlp import on_device, whole
from tidemill_engine.cuda.model import (
    dense_matrices,
    embedding_and_head,
    expert_bytes,
    gated_of,
    make_mlp,
    picked,
    turns,
    vector_of,
)
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.latent import INDEX_EPS, INNER_EPS, latent_groups
from tidemill_engine.models.latent_config import LatentConfig


class LatentIndexer:
    """Matrices of one indexer."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, source: WeightSource, prefix: str) -> None:
        assert config.indexer is not None
        self.shape = config.indexer
        heads, dim = self.shape.num_heads, self.shape.head_dim
        self.q_up = on_device(source.replicated(f"{prefix}.wq_b", heads * dim, latent.q_rank))
        self.key = on_device(source.replicated(f"{prefix}.wk", dim, config.hidden_size))
        self.key_norm = (
            vector_of(source, f"{prefix}.k_norm.weight", dim),
            vector_of(source, f"{prefix}.k_norm.bias", dim),
        )
        self.weigh = on_device(source.replicated(f"{prefix}.weights_proj", heads, config.hidden_size))

    def matrices(self) -> Iterator[DeviceLinear]:
        """All of them."""
        yield from (self.q_up, self.key, self.weigh)


class LatentDeviceLayer:
    """Weights of one decoder layer."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int, make_weight: MakeWeight) -> None:
        latent = config.latent
        assert latent is not None
        prefix, hidden, heads = f"model.layers.{index}", config.hidden_size, config.num_heads
        own = f"{prefix}.self_attn"
        self.input_norm = vector_of(source, f"{prefix}.input_layernorm.weight", hidden)
        self.q_down: DeviceLinear | None = None
        rows = heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank:
            self.q_down = on_device(source.replicated(f"{own}.q_a_proj", latent.q_rank, hidden, bias=latent.bias))
            self.q_norm = vector_of(source, f"{own}.q_a_layernorm.weight", latent.q_rank)
            self.q_up = on_device(source.columns([f"{own}.q_b_proj"], [rows], latent.q_rank))
        else:
            self.q_up = on_device(source.columns([f"{own}.q_proj"], [rows], hidden))
        row = latent.kv_rank + latent.rope_dim
        self.kv_down = on_device(source.replicated(f"{own}.kv_a_proj_with_mqa", row, hidden, bias=latent.bias))
        self.kv_norm = vector_of(source, f"{own}.kv_a_layernorm.weight", latent.kv_rank)
        self.expansion = _expansion(latent, heads, source, f"{own}.kv_b_proj.weight")
        self.out = on_device(source.row(f"{own}.o_proj", hidden, heads * latent.value_dim, bias=latent.bias))
        self.mlp_norm = vector_of(source, f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp = make_mlp(config, source, f"{prefix}.mlp", index, make_weight)
        owns = config.indexer is not None and config.indexer.owner[index] == index
        self.indexer = LatentIndexer(config, latent, source, f"{own}.indexer") if owns else None

    def matrices(self) -> Iterator[DeviceLinear]:
        """All of them, without routed experts."""
        if self.q_down is not None:
            yield self.q_down
        yield from (self.q_up, self.kv_down, self.out)
        if self.indexer is not None:
            yield from self.indexer.matrices()
        yield from dense_matrices(self.mlp)


class CudaLatentModel:
    """Latents of all layers in one paged group, keys of the layers with an indexer in another; bfloat16."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, kv_dtype: str, make_weight: MakeWeight, *, fp8_scores: bool
    ) -> None:
        latent = config.latent
        assert latent is not None
        self.fp8_scores = fp8_scores
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups = latent_groups(config, kv_dtype)
        self._latent = latent
        self._num_heads, self._eps = config.num_heads, config.rms_norm_eps
        self._top_k = config.indexer.top_k if config.indexer is not None else 0
        self._cos, self._sin = turns(config, latent.rope_dim)
        self.embedding, self.head = embedding_and_head(config, source, batch_invariant=False)
        self._last_norm = vector_of(source, "model.norm.weight", config.hidden_size)
        self.layers = [LatentDeviceLayer(config, source, index, make_weight) for index in range(config.num_layers)]

    def open_attention(self, pool: CudaKVPool, prefill_backend: str) -> LatentPagedAttention:
        """What attends over the pool's blocks; it has one way to compute chunks."""
        return LatentPagedAttention(
            pool, self._num_heads, self._latent.kv_rank, self._top_k, fp8_scores=self.fp8_scores
        )

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the layers' matrices, all experts counted."""
        expansions = sum(layer.expansion.keys.nbytes + layer.expansion.values.nbytes for layer in self.layers)
        matrices = sum(matrix.num_bytes for matrix in self.matrices())
        return matrices + expansions + expert_bytes(layer.mlp for layer in self.layers)

    def matrices(self) -> Iterator[DeviceLinear]:
        """Of all layers, without routed experts."""
        for layer in self.layers:
            yield from layer.matrices()

    def gated(self) -> Iterator[GatedLinear]:
        """The first products of all dense MLPs."""
        return gated_of(layer.mlp for layer in self.layers)

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        block_ids: torch.Tensor,
        attention: StepAttention,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `CudaModel.forward`."""
        assert isinstance(attention, LatentPagedAttention)
        delta: torch.Tensor | None = None
        chosen: Chosen | None = None
        num_indexers = 0
        for index, layer in enumerate(self.layers):
            x = add_rms_norm(hidden, delta, layer.input_norm, self._eps)
            inner = x
            if layer.q_down is not None:
                inner = add_rms_norm(whole(layer.q_down(x)), None, layer.q_norm, INNER_EPS)
            q = whole(layer.q_up(inner)).view(x.shape[0], self._num_heads, -1)
            q_rope = store_latent(
                q,
                whole(layer.kv_down(x)),
                attention.latent_layer(index),
                positions,
                block_ids,
                self._cos,
                self._sin,
                layer.kv_norm,
                INNER_EPS,
                interleaved=self._latent.interleaved,
            )
            if layer.indexer is not None:
                chosen = self._choose(layer.indexer, num_indexers, x, inner, positions, block_ids, attention)
                num_indexers += 1
            delta = layer.out(attention.run(index, q, q_rope, layer.expansion, chosen))
            normed = add_rms_norm(hidden, delta, layer.mlp_norm, self._eps)
            delta = layer.mlp(normed)
        return add_rms_norm(*picked(hidden, delta, wanted), self._last_norm, self._eps)

    def _choose(
        self,
        indexer: LatentIndexer,
        layer: int,
        x: torch.Tensor,
        inner: torch.Tensor,
        positions: torch.Tensor,
        block_ids: torch.Tensor,
        attention: LatentPagedAttention,
    ) -> Chosen:
        shape = indexer.shape
        q, scales = store_index(
            whole(indexer.q_up(inner)).view(x.shape[0], shape.num_heads, shape.head_dim),
            whole(indexer.key(x)),
            attention.index_layer(layer),
            positions,
            block_ids,
            self._cos,
            self._sin,
            indexer.key_norm,
            INDEX_EPS,
            interleaved=shape.interleaved,
            fast_layer=attention.fast_index_layer(layer),
        )
        weights = whole(indexer.weigh(x)).float() * (shape.num_heads**-0.5 if scales is None else scales)
        return attention.choose(IndexerQueries(layer, q, weights))


def _expansion(latent: LatentConfig, num_heads: int, source: WeightSource, name: str) -> LatentExpansion:
    rows = latent.nope_dim + latent.value_dim
    weight = source.checkpoint.take(name, (num_heads * rows, latent.kv_rank)).to("cuda", torch.bfloat16)
    by_head = weight.view(num_heads, rows, -1)
    keys, values = by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :]
    return LatentExpansion(keys.contiguous(), values.contiguous(), latent.scale)
