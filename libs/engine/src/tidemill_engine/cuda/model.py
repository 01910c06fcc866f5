"""Decoders of the Llama family on CUDA: Llama, Qwen2, Qwen3 with paged KV of one group."""

import torch

from tidemill_engine.cuda.attention import PagedAttention
from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.norm import add_rms_norm
from tidemill_engine.cuda.kernels.rotary_store import HeadShape, rotate_store
from tidemill_engine.cuda.linear import DeviceLinear
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.layers.linear import Linear
from tidemill_engine.layers.rotary import RotaryTable
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.dense import PAGED, paged_group


class Layer:
    """Weights of one decoder layer."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        rows = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        names = [f"{prefix}.self_attn.{part}_proj" for part in ("q", "k", "v")]
        self.input_norm = _vector(source, f"{prefix}.input_layernorm.weight", hidden)
        self.qkv = source.columns(names, rows, hidden, bias=config.qkv_bias)
        self.qk_norms = _qk_norms(source, f"{prefix}.self_attn", dim) if config.qk_norm else None
        self.out = source.row(f"{prefix}.self_attn.o_proj", hidden, rows[0], bias=config.output_bias)
        self.mlp_norm = _vector(source, f"{prefix}.post_attention_layernorm.weight", hidden)
        gate_up = [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")]
        self.gate_up = source.columns(gate_up, [inner, inner], hidden, bias=config.mlp_bias)
        self.down: Linear = source.row(f"{prefix}.mlp.down_proj", hidden, inner, bias=config.mlp_bias)


class CudaModel:
    """All layers hold paged KV of one group; the residual stream is bfloat16."""

    def __init__(self, config: ModelConfig, source: WeightSource, kv_dtype: str) -> None:
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups: tuple[KVGroupSpec, ...] = (paged_group(PAGED, range(config.num_layers), config, kv_dtype),)
        self.heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        table = RotaryTable(config.rope, config.head_dim, config.context_tokens)
        # Both halves of a head turn by the same angles.
        self._cos = table.cos[:, : config.head_dim // 2].contiguous().cuda()
        self._sin = table.sin[:, : config.head_dim // 2].contiguous().cuda()
        embedding = source.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding = embedding.to("cuda", torch.bfloat16)
        self.layers = [Layer(config, source, index) for index in range(config.num_layers)]
        self._last_norm = _vector(source, "model.norm.weight", config.hidden_size)
        head = self.embedding
        if not config.tie_embeddings:
            head = source.embedding("lm_head.weight", config.vocab_size, config.hidden_size)
        self.head_weight = head.to("cuda", torch.bfloat16)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the layers' matrices."""
        matrices = (m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return sum(matrix.weight.nbytes for matrix in matrices if isinstance(matrix, DeviceLinear))

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        block_ids: torch.Tensor,
        attention: PagedAttention,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """[wanted tokens (None: all), hidden] after the last norm; `hidden` are embeddings and change in place, the
        index tensors are int32 on the device."""
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = add_rms_norm(hidden, delta, layer.input_norm, self._eps)
            qkv = layer.qkv(normed)
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
            delta = layer.down(silu_mul(layer.gate_up(normed)))
        if wanted is not None:
            hidden = hidden.index_select(0, wanted)
            delta = None if delta is None else delta.index_select(0, wanted)
        return add_rms_norm(hidden, delta, self._last_norm, self._eps)


def _vector(source: WeightSource, name: str, size: int) -> torch.Tensor:
    return source.vector(name, size).cuda()


def _qk_norms(source: WeightSource, prefix: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _vector(source, f"{prefix}.q_norm.weight", dim), _vector(source, f"{prefix}.k_norm.weight", dim)
