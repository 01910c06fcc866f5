"""DeepSeek-V4: a residual of several streams, attention over a window and a compressed stream, experts everywhere."""

import torch
from torch.nn import functional

from tidemill_engine.attention.base import ForwardBatch
from tidemill_engine.attention.compressed import CompressedBackend, Compressor, Stream
from tidemill_engine.attention.row_store import Selection
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.layers.hyper import HyperConnection, HyperHead, spread, unit_rms
from tidemill_engine.layers.rotary import PairRotary
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.dense import Embeddings
from tidemill_engine.models.latent import row_group
from tidemill_engine.models.mlp import make_mlp
from tidemill_engine.models.stream_config import StreamConfig

WINDOW, SPARSE, INDEX, HEAVY = "window", "sparse", "index", "heavy"
STATES = {SPARSE: "sparse_state", INDEX: "index_state", HEAVY: "heavy_state"}
"""State group of each stream's compressor."""


class StreamCompressor:
    """Makes the rows of one stream, whole on every rank."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        prefix: str,
        group: str,
        ratio: int,
        dim: int,
        rotary: PairRotary,
    ) -> None:
        overlap = group != HEAVY
        channels = dim * (2 if overlap else 1)
        self.group = group
        self.values = source.replicated(f"{prefix}.kv_proj", channels, config.hidden_size)
        self.gates = source.replicated(f"{prefix}.gate_proj", channels, config.hidden_size)
        bias = source.whole(f"{prefix}.position_bias", (ratio, channels))
        self.compressor = Compressor(STATES[group], ratio, overlap, bias)
        self.norm = source.vector(f"{prefix}.kv_norm.weight", dim)
        self.eps = config.rms_norm_eps
        self.rotary = rotary

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, attention: CompressedBackend, layer: int) -> None:
        """Takes the batch's tokens and stores the rows that they complete."""
        runs = attention.compress(self.compressor, layer, self.values(x), self.gates(x))
        normed = functional.rms_norm(runs.means, self.norm.shape, self.norm, self.eps)
        firsts = batch.positions[runs.last] - (self.compressor.ratio - 1)
        rows = self.rotary.turn(normed[:, None], self.rotary.at(firsts))[:, 0]
        attention.store_runs(self.group, layer, rows, runs.last)


class StreamIndexer:
    """Selects rows of a sparse stream by keys of a stream of its own."""

    def __init__(
        self, config: ModelConfig, streams: StreamConfig, source: WeightSource, prefix: str, rotary: PairRotary
    ) -> None:
        self.heads, self.dim, self.top_k = streams.index_heads, streams.index_dim, streams.index_top_k
        self.compress = StreamCompressor(config, source, prefix, INDEX, streams.sparse_ratio, self.dim, rotary)
        self.q_up = source.replicated(f"{prefix}.q_b_proj", self.heads * self.dim, streams.q_rank)
        self.weigh = source.replicated(f"{prefix}.scorer.weights_proj", self.heads, config.hidden_size)
        self.rotary = rotary

    def __call__(
        self, x: torch.Tensor, inner: torch.Tensor, batch: ForwardBatch, attention: CompressedBackend, layer: int
    ) -> Selection:
        self.compress(x, batch, attention, layer)
        q = self.q_up(inner).view(x.shape[0], self.heads, self.dim)
        turned = self.rotary.turn(q, self.rotary.at(batch.positions))
        return attention.select(INDEX, layer, turned, self.weigh(x) * self.heads**-0.5, self.top_k)


class StreamAttention:
    """Queries split over the ranks by head; the one vector that is key and value is whole on each."""

    def __init__(
        self,
        config: ModelConfig,
        streams: StreamConfig,
        source: WeightSource,
        prefix: str,
        kind: str,
        rotary: PairRotary,
    ) -> None:
        hidden, dim, heads = config.hidden_size, config.head_dim, config.num_heads
        groups, rank = streams.output_groups, streams.output_rank
        self.eps, self.dim = config.rms_norm_eps, dim
        self.rotary = rotary
        self.q_down = source.replicated(f"{prefix}.q_a_proj", streams.q_rank, hidden)
        self.q_norm = source.vector(f"{prefix}.q_a_norm.weight", streams.q_rank)
        self.q_up = source.columns([f"{prefix}.q_b_proj"], [heads * dim], streams.q_rank)
        self.kv = source.replicated(f"{prefix}.kv_proj", dim, hidden)
        self.kv_norm = source.vector(f"{prefix}.kv_norm.weight", dim)
        start, end = source.tp.share("num_attention_heads", heads)
        self.sinks = source.vector(f"{prefix}.sinks", heads)[start:end]
        self.out_down = source.blocks(f"{prefix}.o_a_proj", groups, rank, heads * dim // groups)
        self.out_up = source.row(f"{prefix}.o_b_proj", hidden, groups * rank)
        self.tp = source.tp
        self.compress: StreamCompressor | None = None
        self.indexer: StreamIndexer | None = None
        if kind != WINDOW:
            ratio = streams.sparse_ratio if kind == SPARSE else streams.heavy_ratio
            self.compress = StreamCompressor(config, source, f"{prefix}.compressor", kind, ratio, dim, rotary)
        if kind == SPARSE:
            self.indexer = StreamIndexer(config, streams, source, f"{prefix}.compressor.indexer", rotary)

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, attention: CompressedBackend, layer: int, stream_layer: int
    ) -> torch.Tensor:
        """`stream_layer` is the layer's index in its stream's group."""
        angles = self.rotary.at(batch.positions)
        inner = functional.rms_norm(self.q_down(x), self.q_norm.shape, self.q_norm, self.eps)
        q = self.rotary.turn(unit_rms(self.q_up(inner).view(x.shape[0], -1, self.dim), self.eps), angles)
        kv = functional.rms_norm(self.kv(x), self.kv_norm.shape, self.kv_norm, self.eps)
        rows = self.rotary.turn(kv[:, None], angles)[:, 0]
        stream = None
        if self.compress is not None:
            self.compress(x, batch, attention, stream_layer)
            selection = self.indexer(x, inner, batch, attention, stream_layer) if self.indexer is not None else None
            stream = Stream(self.compress.group, stream_layer, selection)
        attended = attention.windowed(WINDOW, layer, q, rows, self.sinks, stream)
        # Values were keys, and keys were turned: turning back leaves the distance to the query.
        return self._finish(self.rotary.turn_back(attended, angles))

    def _finish(self, attended: torch.Tensor) -> torch.Tensor:
        by_group = attended.flatten(1).chunk(len(self.out_down), dim=1)
        narrow = torch.cat([down(part) for down, part in zip(self.out_down, by_group, strict=True)], dim=1)
        return self.tp.all_reduce(self.out_up(narrow))


class StreamLayer:
    """Attention and experts, each between a sum of the residual streams and its way back."""

    def __init__(
        self, config: ModelConfig, streams: StreamConfig, source: WeightSource, index: int, rotary: PairRotary
    ) -> None:
        prefix, kind = f"model.layers.{index}", streams.kinds[index]
        self.eps = config.rms_norm_eps
        self.attention_mix = _connection(config, streams, source, f"{prefix}.attn_hc")
        self.input_norm = source.vector(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.attention = StreamAttention(config, streams, source, f"{prefix}.self_attn", kind, rotary)
        self.mlp_mix = _connection(config, streams, source, f"{prefix}.ffn_hc")
        self.mlp_norm = source.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp = make_mlp(config, source, f"{prefix}.mlp", index)
        self.stream_layer = streams.layers(kind).index(index)

    def __call__(
        self, residual: torch.Tensor, batch: ForwardBatch, attention: CompressedBackend, layer: int
    ) -> torch.Tensor:
        """residual [tokens, streams, hidden]"""
        mixed = self.attention_mix(residual)
        normed = functional.rms_norm(mixed.collapsed, self.input_norm.shape, self.input_norm, self.eps)
        residual = spread(mixed, self.attention(normed, batch, attention, layer, self.stream_layer), residual)
        mixed = self.mlp_mix(residual)
        normed = functional.rms_norm(mixed.collapsed, self.mlp_norm.shape, self.mlp_norm, self.eps)
        return spread(mixed, self.mlp(normed, batch.token_ids), residual)


class StreamModel:
    """All kinds of KV groups at once: compressed paged streams, a window ring, compressor state."""

    def __init__(self, config: ModelConfig, source: WeightSource, kv_dtype: str) -> None:
        assert config.streams is not None
        streams = config.streams
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups = stream_groups(config, kv_dtype)
        window = PairRotary(config.rope, streams.rope_dim)
        stream = PairRotary(streams.stream_rope, streams.rope_dim)
        self.embeddings = Embeddings(config, source)
        self.num_streams = streams.residual_streams
        self.layers = [
            StreamLayer(config, streams, source, index, window if kind == WINDOW else stream)
            for index, kind in enumerate(streams.kinds)
        ]
        width = streams.residual_streams * config.hidden_size
        self.head = HyperHead(
            source.whole("model.hc_head.hc_fn", (streams.residual_streams, width)),
            source.vector("model.hc_head.hc_base", streams.residual_streams),
            source.vector("model.hc_head.hc_scale", 1),
            norm_eps=config.rms_norm_eps,
            eps=streams.mix_eps,
        )

    def forward(self, batch: ForwardBatch, attention: CompressedBackend) -> torch.Tensor:
        embedded = self.embeddings.embed(batch.token_ids)
        residual = embedded[:, None].expand(-1, self.num_streams, -1).contiguous()
        for index, layer in enumerate(self.layers):
            residual = layer(residual, batch, attention, index)
        return self.embeddings.normed(self.head(residual[batch.sample_indices]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.embeddings.logits(hidden)


def stream_groups(config: ModelConfig, kv_dtype: str) -> tuple[KVGroupSpec, ...]:
    """Whole on every rank; compressor state stays float32 whatever the KV dtype."""
    streams = config.streams
    assert streams is not None
    interval, dim = streams.snapshot_interval_tokens, config.head_dim
    groups = [_window(config, streams, kv_dtype)]
    streamed = [
        (SPARSE, streams.layers("sparse"), streams.sparse_ratio, dim, 2),
        (INDEX, streams.layers("sparse"), streams.sparse_ratio, streams.index_dim, 2),
        (HEAVY, streams.layers("heavy"), streams.heavy_ratio, dim, 1),
    ]
    for name, layers, ratio, values, halves in streamed:
        if layers:
            groups.append(row_group(name, layers, kv_dtype, values, tokens_per_row=ratio))
            # Values and gates of the ring's tokens; with overlap both are twice as many and twice as wide.
            state = 2 * (halves * ratio) * (halves * values)
            groups.append(_state(STATES[name], layers, state, interval))
    return tuple(groups)


def _window(config: ModelConfig, streams: StreamConfig, kv_dtype: str) -> KVGroupSpec:
    return KVGroupSpec(
        name=WINDOW,
        kind="window",
        layers=tuple(range(config.num_layers)),
        dtype=kv_dtype,
        num_heads=1,
        head_values=config.head_dim,
        sharded=False,
        planes=1,
        window_tokens=streams.window_tokens,
        snapshot_interval_tokens=streams.snapshot_interval_tokens,
    )


def _state(name: str, layers: tuple[int, ...], values: int, interval: int) -> KVGroupSpec:
    return KVGroupSpec(
        name=name,
        kind="state",
        layers=layers,
        dtype="float32",
        num_heads=1,
        head_values=values,
        sharded=False,
        snapshot_interval_tokens=interval,
    )


def _connection(config: ModelConfig, streams: StreamConfig, source: WeightSource, prefix: str) -> HyperConnection:
    count = streams.residual_streams
    rows = count * (2 + count)
    return HyperConnection(
        source.whole(f"{prefix}.fn", (rows, count * config.hidden_size)),
        source.vector(f"{prefix}.base", rows),
        source.vector(f"{prefix}.scale", 3),
        norm_eps=config.rms_norm_eps,
        eps=streams.mix_eps,
        steps=streams.sinkhorn_steps,
    )
