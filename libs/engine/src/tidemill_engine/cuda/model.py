"""Decoders with grouped-query attention on CUDA: Llama, Qwen2, Qwen3, and with experts Mixtral and Qwen3-MoE."""

from collections.abc import Iterable, Iterator

import torch

from tidemill_engine.cuda.attention import PagedAttention, StepAttention
from tidemill_engine.cuda.experts import DeviceMoe, MakeWeight, make_moe
from tidemill_engine.cuda.kernels.norm import add_rms_norm
from tidemill_engine.cuda.kernels.rotary_store import HeadShape, rotate_store
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.linear import DeviceLinear, GatedLinear, LogitsHead
from tidemill_engine.cuda.mlp import DenseMlp, on_device
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.layers.rotary import RotaryTable
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.dense import PAGED, paged_group

Mlp = DenseMlp | DeviceMoe


class Layer:
    """Weights of one decoder layer."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int, make_weight: MakeWeight) -> None:
        prefix = f"model.layers.{index}"
        hidden, dim = config.hidden_size, config.head_dim
        rows = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        names = [f"{prefix}.self_attn.{part}_proj" for part in ("q", "k", "v")]
        self.input_norm = vector_of(source, f"{prefix}.input_layernorm.weight", hidden)
        self.qkv = on_device(source.columns(names, rows, hidden, bias=config.qkv_bias))
        self.qk_norms = _qk_norms(source, f"{prefix}.self_attn", dim) if config.qk_norm else None
        self.out = on_device(source.row(f"{prefix}.self_attn.o_proj", hidden, rows[0], bias=config.output_bias))
        self.mlp_norm = vector_of(source, f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp = make_mlp(config, source, f"{prefix}.mlp", index, make_weight)


class CudaModel:
    """All layers hold paged KV of one group; the residual stream is bfloat16."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        kv_dtype: str,
        make_weight: MakeWeight,
        *,
        batch_invariant: bool,
    ) -> None:
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups: tuple[KVGroupSpec, ...] = (paged_group(PAGED, range(config.num_layers), config, kv_dtype),)
        self.heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self._cos, self._sin = turns(config, config.head_dim)
        self.embedding, self.head = embedding_and_head(config, source, batch_invariant=batch_invariant)
        self._last_norm = vector_of(source, "model.norm.weight", config.hidden_size)
        self.layers = [Layer(config, source, index, make_weight) for index in range(config.num_layers)]
        self._is_invariant = batch_invariant

    def open_attention(self, pool: CudaKVPool, prefill_backend: str) -> PagedAttention:
        """What attends over the pool's blocks."""
        return PagedAttention(
            pool, PAGED, self.heads, batch_invariant=self._is_invariant, prefill_backend=prefill_backend
        )

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the layers' matrices, all experts counted."""
        return sum(matrix.num_bytes for matrix in self.matrices()) + expert_bytes(layer.mlp for layer in self.layers)

    def matrices(self) -> Iterator[DeviceLinear]:
        """Of all layers, without routed experts."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out)
            yield from dense_matrices(layer.mlp)

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
        """[wanted tokens (None: all), hidden] after the last norm; `hidden` are embeddings and change in place, the
        index tensors are int32 on the device."""
        assert isinstance(attention, PagedAttention)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = add_rms_norm(hidden, delta, layer.input_norm, self._eps)
            qkv = layer.qkv(normed)
            if attention.wants_keys and qkv.dim() == 3:
                qkv = qkv.sum(0).bfloat16()
            q = rotate_store(
                qkv,
                attention.layer(index),
                positions,
                block_ids,
                self._cos,
                self._sin,
                layer.qk_norms,
                self._eps,
                self.heads,
                keep_keys=attention.wants_keys,
            )
            kv = qkv.view(-1, self.heads.num_heads + 2 * self.heads.num_kv_heads, self.heads.dim)
            delta = layer.out(attention.run(index, q, kv[:, self.heads.num_heads :]).flatten(1))
            normed = add_rms_norm(hidden, delta, layer.mlp_norm, self._eps)
            delta = layer.mlp(normed)
        return add_rms_norm(*picked(hidden, delta, wanted), self._last_norm, self._eps)


def turns(config: ModelConfig, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [context, dim / 2] float32 each: both halves of a head turn by the same angles."""
    table = RotaryTable(config.rope, dim, config.context_tokens)
    return table.cos[:, : dim // 2].contiguous().cuda(), table.sin[:, : dim // 2].contiguous().cuda()


def embedding_and_head(
    config: ModelConfig, source: WeightSource, *, batch_invariant: bool
) -> tuple[torch.Tensor, LogitsHead]:
    """[vocab, hidden] bfloat16, and what makes logits, of the same matrix or one of its own."""
    embedding = source.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    embedding = embedding.to("cuda", torch.bfloat16)
    head = embedding
    if not config.tie_embeddings:
        head = source.embedding("lm_head.weight", config.vocab_size, config.hidden_size)
    return embedding, LogitsHead(head.to("cuda", torch.bfloat16), batch_invariant=batch_invariant)


def picked(
    hidden: torch.Tensor, delta: torch.Tensor | None, wanted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The wanted tokens (None: all) of the residual stream and of what is still to be added to it."""
    if wanted is None:
        return hidden, delta
    return hidden.index_select(0, wanted), None if delta is None else delta.index_select(-2, wanted)


def make_mlp(config: ModelConfig, source: WeightSource, prefix: str, index: int, make_weight: MakeWeight) -> Mlp:
    """The MLP of layer `index`."""
    if config.moe is None or config.moe.kinds[index] == "dense":
        return DenseMlp(source, prefix, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return make_moe(config.moe, config, source, prefix, make_weight, hashed=False)


def dense_part(mlp: Mlp) -> DenseMlp | None:
    """What every token passes: the MLP itself, or the shared experts."""
    return mlp if isinstance(mlp, DenseMlp) else mlp.shared


def dense_matrices(mlp: Mlp) -> Iterator[DeviceLinear]:
    """Matrices of the dense part."""
    dense = dense_part(mlp)
    if dense is not None:
        yield from (dense.gate_up.linear, dense.down)


def gated_of(mlps: Iterable[Mlp]) -> Iterator[GatedLinear]:
    """The first products of dense parts."""
    for mlp in mlps:
        dense = dense_part(mlp)
        if dense is not None:
            yield dense.gate_up


def expert_bytes(mlps: Iterable[Mlp]) -> int:
    """Of routed experts."""
    return sum(mlp.num_bytes for mlp in mlps if isinstance(mlp, DeviceMoe))


def vector_of(source: WeightSource, name: str, size: int) -> torch.Tensor:
    return source.vector(name, size).cuda()


def _qk_norms(source: WeightSource, prefix: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return vector_of(source, f"{prefix}.q_norm.weight", dim), vector_of(source, f"{prefix}.k_norm.weight", dim)
