"""A small architecture that uses every kind of KV group: paged attention, window attention, recurrent state, in turn.

It exists so that chunking, preemption, prefix hits with snapshots and hand-over are exercised for sequence state before
a large model needs them. Its state layer is a gated linear recurrence, kept in float32:
    s[t] = a[t] * s[t-1] + (1 - a[t]) * in[t],  a = sigmoid(decay),  y[t] = s[t] * silu(gate[t])
"""

import msgspec
import torch
from torch.nn import functional

from tidemill_engine.attention.base import AttentionBackend, ForwardBatch
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.layers.rotary import RotaryTable
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.dense import DenseLayer, Embeddings, paged_group
from tidemill_engine.models.mlp import GatedMlp

PAGED, WINDOW, STATE = "paged", "window", "state"
KINDS = (PAGED, WINDOW, STATE)


class StateLayer:
    """Recurrent mixer and MLP with their norms; heads split over the ranks."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, width = config.hidden_size, config.num_kv_heads * config.state_values
        self.eps = config.rms_norm_eps
        self.values = config.state_values
        self.input_norm = source.vector(f"{prefix}.input_layernorm.weight", hidden)
        names = [f"{prefix}.mixer.{part}_proj" for part in ("in", "decay", "gate")]
        self.projections = source.columns(names, [width] * 3, hidden)
        self.out = source.row(f"{prefix}.mixer.out_proj", hidden, width)
        self.mlp_norm = source.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp = GatedMlp(config, source, f"{prefix}.mlp")
        self.tp = source.tp

    def mix(self, x: torch.Tensor, attention: AttentionBackend, layer: int) -> torch.Tensor:
        """Runs the recurrence over each sequence's tokens and leaves its state in the slot."""
        values, decay, gate = (part.view(x.shape[0], -1, self.values) for part in self.projections(x).chunk(3, dim=-1))
        states = attention.recur(STATE, layer, torch.sigmoid(decay), values)
        return self.tp.all_reduce(self.out((states * functional.silu(gate)).flatten(1)))


class ToyModel:
    """Layer i is paged, window or state by i % 3."""

    def __init__(self, config: ModelConfig, source: WeightSource, kv_dtype: str) -> None:
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups = toy_groups(config, kv_dtype)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.context_tokens)
        self.embeddings = Embeddings(config, source)
        self.layers: list[DenseLayer | StateLayer] = [
            StateLayer(config, source, i) if KINDS[i % 3] == STATE else DenseLayer(config, source, i)
            for i in range(config.num_layers)
        ]
        self.elementwise = source.elementwise

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        hidden = self.embeddings.embed(batch.token_ids)
        rotary = self.rotary.at(batch.positions)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = self.elementwise.add_rms_norm(hidden, delta, layer.input_norm, layer.eps)
            if isinstance(layer, StateLayer):
                delta = layer.mix(normed, attention, index // 3)
            else:
                q, k, v = layer.attention.project(normed, *rotary)
                attend = attention.paged if KINDS[index % 3] == PAGED else attention.window
                delta = layer.attention.finish(attend(KINDS[index % 3], index // 3, q, k, v))
            normed = self.elementwise.add_rms_norm(hidden, delta, layer.mlp_norm, layer.eps)
            delta = layer.mlp(normed, batch.token_ids)
        return self.embeddings.last(hidden, delta, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.embeddings.logits(hidden)


def toy_groups(config: ModelConfig, kv_dtype: str) -> tuple[KVGroupSpec, ...]:
    """One group of each kind; state stays float32 whatever the KV dtype."""
    layers = {kind: tuple(range(i, config.num_layers, 3)) for i, kind in enumerate(KINDS)}
    paged = paged_group(PAGED, layers[PAGED], config, kv_dtype)
    window = msgspec.structs.replace(
        paged,
        name=WINDOW,
        kind="window",
        layers=layers[WINDOW],
        window_tokens=config.window_tokens,
        snapshot_interval_tokens=config.snapshot_interval_tokens,
    )
    state = msgspec.structs.replace(
        window,
        name=STATE,
        kind="state",
        layers=layers[STATE],
        dtype="float32",
        head_values=config.state_values,
        window_tokens=0,
    )
    return (paged, window, state)
