"""DeepSeek-V4 on CUDA: a residual of several streams, attention over a window and a compressed stream, experts."""

from collections.abc import Iterator

import torch

from tidemill_engine.cuda.attention import StepAttention
from tidemill_engine.cuda.experts import MakeWeight, make_moe
from tidemill_engine.cuda.kernels.hyper import HyperSite, collapse, hyper_site, spread_weigh
from tidemill_engine.cuda.kernels.stream_store import norm_turn
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.linear import DeviceLinear, GatedLinear, LinearMaker
from tidemill_engine.cuda.mlp import on_device, whole
from tidemill_engine.cuda.model import dense_matrices, embedding_and_head, expert_bytes, gated_of, vector_of
from tidemill_engine.cuda.stream_attention import CompressorWeights, StreamPagedAttention
from tidemill_engine.cuda.weight_formats import plain
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.stream_config import StreamConfig
from tidemill_engine.models.streams import HEAVY, INDEX, SPARSE, WINDOW, stream_groups


class StreamDeviceLayer:
    """Weights of one decoder layer.

    What reads the layer's input is two matrices: one of queries and keys, in the format of the settings, and one of
    compressors and the indexer's weights, always bfloat16 (checkpoints in FP8 keep those in more).
    """

    def __init__(
        self,
        config: ModelConfig,
        streams: StreamConfig,
        source: WeightSource,
        plain_source: WeightSource,
        index: int,
        make_weight: MakeWeight,
    ) -> None:
        prefix, hidden, dim, heads = f"model.layers.{index}", config.hidden_size, config.head_dim, config.num_heads
        own, kind, groups = f"{prefix}.self_attn", streams.kinds[index], streams.output_groups
        self.kind = kind
        self.stream_layer = streams.layers(kind).index(index)
        self.attention_site = _connection(config, streams, source, f"{prefix}.attn_hc")
        self.input_norm = vector_of(source, f"{prefix}.input_layernorm.weight", hidden)
        names, rows = [f"{own}.q_a_proj", f"{own}.kv_proj"], [streams.q_rank, dim]
        self.down = on_device(source.columns(names, rows, hidden))
        self.q_norm = vector_of(source, f"{own}.q_a_norm.weight", streams.q_rank)
        self.q_up = on_device(source.columns([f"{own}.q_b_proj"], [heads * dim], streams.q_rank))
        self.kv_norm = vector_of(source, f"{own}.kv_norm.weight", dim)
        self.sinks = vector_of(source, f"{own}.sinks", heads)
        shape = (groups * streams.output_rank, heads * dim // groups)
        taken = source.checkpoint.take(f"{own}.o_a_proj.weight", shape).to("cuda", torch.bfloat16)
        self.out_down = taken.view(groups, streams.output_rank, -1)
        self.out_up = on_device(source.row(f"{own}.o_b_proj", hidden, groups * streams.output_rank))
        self.compressors: list[CompressorWeights] = []
        self.reads: list[int] = []
        """Outputs of `compressing`: values with gates of each compressor, then the indexer's weights."""
        self.compressing: DeviceLinear | None = None
        self.index_up: DeviceLinear | None = None
        if kind != WINDOW:
            self._add_compressors(config, streams, source, plain_source, f"{own}.compressor")
        self.mlp_site = _connection(config, streams, source, f"{prefix}.ffn_hc")
        self.mlp_norm = vector_of(source, f"{prefix}.post_attention_layernorm.weight", hidden)
        assert config.moe is not None
        hashed = config.moe.kinds[index] == "hash"
        self.mlp = make_moe(config.moe, config, source, f"{prefix}.mlp", make_weight, hashed=hashed)

    def _add_compressors(
        self, config: ModelConfig, streams: StreamConfig, source: WeightSource, plain_source: WeightSource, prefix: str
    ) -> None:
        parts: list[tuple[str, str, int]] = [(self.kind, prefix, config.head_dim)]
        if self.kind == SPARSE:
            parts.append((INDEX, f"{prefix}.indexer", streams.index_dim))
        names: list[str] = []
        rows: list[int] = []
        for group, name, dim in parts:
            ratio = streams.heavy_ratio if group == HEAVY else streams.sparse_ratio
            channels = dim if group == HEAVY else 2 * dim
            bias = source.whole(f"{name}.position_bias", (ratio, channels)).cuda().contiguous()
            norm = vector_of(source, f"{name}.kv_norm.weight", dim)
            self.compressors.append(CompressorWeights(group, ratio, group != HEAVY, bias, norm, config.rms_norm_eps))
            names += [f"{name}.kv_proj", f"{name}.gate_proj"]
            rows += [channels, channels]
            self.reads.append(2 * channels)
        if self.kind == SPARSE:
            names.append(f"{prefix}.indexer.scorer.weights_proj")
            rows.append(streams.index_heads)
            self.reads.append(streams.index_heads)
            outputs = streams.index_heads * streams.index_dim
            self.index_up = on_device(source.replicated(f"{prefix}.indexer.q_b_proj", outputs, streams.q_rank))
        self.compressing = on_device(plain_source.columns(names, rows, config.hidden_size))

    def matrices(self) -> Iterator[DeviceLinear]:
        """All of them, without routed experts."""
        yield from (self.down, self.q_up, self.out_up)
        if self.compressing is not None:
            yield self.compressing
        if self.index_up is not None:
            yield self.index_up
        yield from dense_matrices(self.mlp)


class CudaStreamModel:
    """A window ring, compressed streams and compressors' state; bfloat16 but for the state."""

    def __init__(self, config: ModelConfig, source: WeightSource, kv_dtype: str, make_weight: MakeWeight) -> None:
        streams = config.streams
        assert streams is not None
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.groups = stream_groups(config, kv_dtype)
        self._config, self._streams, self._eps = config, streams, config.rms_norm_eps
        self.embedding, self.head = embedding_and_head(config, source, batch_invariant=False)
        maker = LinearMaker(plain, batch_invariant=False)
        plain_source = WeightSource(source.checkpoint, source.tp, maker, source.elementwise)
        self.layers = [
            StreamDeviceLayer(config, streams, source, plain_source, index, make_weight)
            for index in range(config.num_layers)
        ]
        width = streams.residual_streams * config.hidden_size
        self._last_site = hyper_site(
            source.whole("model.hc_head.hc_fn", (streams.residual_streams, width)).cuda(),
            vector_of(source, "model.hc_head.hc_base", streams.residual_streams),
            vector_of(source, "model.hc_head.hc_scale", 1),
            norm_eps=config.rms_norm_eps,
            eps=streams.mix_eps,
            steps=0,
        )
        self._last_norm = vector_of(source, "model.norm.weight", config.hidden_size)

    def open_attention(self, pool: CudaKVPool, prefill_backend: str) -> StreamPagedAttention:
        """What attends over rings and blocks; it has one way to compute chunks."""
        return StreamPagedAttention(pool, self._config)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the layers' matrices, all experts counted."""
        sites = sum(
            site.high.nbytes + site.low.nbytes
            for layer in self.layers
            for site in (layer.attention_site, layer.mlp_site)
        )
        grouped = sum(layer.out_down.nbytes for layer in self.layers)
        matrices = sum(matrix.num_bytes for matrix in self.matrices())
        return matrices + grouped + sites + expert_bytes(layer.mlp for layer in self.layers)

    def matrices(self) -> Iterator[DeviceLinear]:
        """Of all layers, without routed experts."""
        for layer in self.layers:
            yield from layer.matrices()

    def gated(self) -> Iterator[GatedLinear]:
        """The first products of all shared experts."""
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
        assert isinstance(attention, StreamPagedAttention)
        attention.start(positions, block_ids)
        streams = hidden[:, None].expand(-1, self._streams.residual_streams, -1).contiguous()
        output = mixing = None
        for index, layer in enumerate(self.layers):
            streams, parts = spread_weigh(streams, output, mixing, layer.attention_site)
            x, mixing = collapse(streams, parts, layer.attention_site, layer.input_norm, self._eps)
            output = self._attend(x, layer, index, attention)
            streams, parts = spread_weigh(streams, output, mixing, layer.mlp_site)
            x, mixing = collapse(streams, parts, layer.mlp_site, layer.mlp_norm, self._eps)
            output = layer.mlp(x, token_ids)
        streams, parts = spread_weigh(streams, output, mixing, self._last_site)
        if wanted is not None:
            streams, parts = streams.index_select(0, wanted), parts.index_select(1, wanted)
        return collapse(streams, parts, self._last_site, self._last_norm, self._eps)[0]

    def _attend(
        self, x: torch.Tensor, layer: StreamDeviceLayer, index: int, attention: StreamPagedAttention
    ) -> torch.Tensor:
        """[tokens, hidden] bfloat16."""
        tokens, heads = x.shape[0], self._config.num_heads
        has_stream = layer.kind != WINDOW
        angles = attention.angles(has_stream=has_stream)
        down = whole(layer.down(x))
        asked, kept = down[:, : self._streams.q_rank], down[:, self._streams.q_rank :]
        inner = norm_turn(asked, 1, norm=layer.q_norm, eps=self._eps)[:, 0]
        rows = norm_turn(kept, 1, norm=layer.kv_norm, eps=self._eps, angles=angles)[:, 0]
        q = norm_turn(whole(layer.q_up(inner)), heads, unit_norm=True, eps=self._eps, angles=angles)
        stream, slots = None, None
        if layer.compressing is not None:
            stream = (layer.kind, layer.stream_layer)
            made = torch.split(whole(layer.compressing(x)), layer.reads, dim=1)  # type: ignore[no-untyped-call]
            for part, how in zip(made, layer.compressors, strict=False):
                attention.compress(layer.stream_layer, part, how)
            if layer.index_up is not None:
                index_q = norm_turn(whole(layer.index_up(inner)), self._streams.index_heads, angles=angles)
                # How large all weights are together does not matter for the choice.
                slots = attention.choose(layer.stream_layer, index_q, made[-1].float().contiguous())
        attended = attention.run(index, q, rows, layer.sinks, stream, slots)
        by_group = attended.view(tokens, len(layer.out_down), -1).transpose(0, 1)
        narrow = torch.bmm(by_group, layer.out_down.transpose(1, 2)).transpose(0, 1).flatten(1)
        return whole(layer.out_up(narrow))


def _connection(config: ModelConfig, streams: StreamConfig, source: WeightSource, prefix: str) -> HyperSite:
    count = streams.residual_streams
    rows = count * (2 + count)
    return hyper_site(
        source.whole(f"{prefix}.fn", (rows, count * config.hidden_size)).cuda(),
        vector_of(source, f"{prefix}.base", rows),
        vector_of(source, f"{prefix}.scale", 3),
        norm_eps=config.rms_norm_eps,
        eps=streams.mix_eps,
        steps=streams.sinkhorn_steps,
    )
