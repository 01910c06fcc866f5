"""Routed and shared experts on the device: no loop over experts, no wait for the device."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from tidemill_engine.cuda.dispatch import dispatch
from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.grouped import FP8_TILES, GroupedTiles, grouped_down, grouped_up
from tidemill_engine.cuda.kernels.launch import INTERPRETED
from tidemill_engine.cuda.kernels.quantise import quantise
from tidemill_engine.cuda.kernels.route import MOST_FEW, Routing, dispatch_few, route
from tidemill_engine.cuda.mlp import DenseMlp, whole
from tidemill_engine.cuda.weight_formats import Weight
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.moe_config import MoeConfig

EXPERT_FORMATS = ("auto", "bf16", "fp8_block")
MakeWeight = Callable[[torch.Tensor], Weight]


class ExpertMatrices:
    """One matrix of each expert: [experts, out, in] with the scales of its format."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        first = weights[0]
        self.values = torch.empty((len(weights), *first.values.shape), dtype=first.values.dtype, device="cuda")
        self.scale: torch.Tensor | None = None
        if first.scale is not None:
            self.scale = torch.empty((len(weights), *first.scale.shape), device="cuda")
        for index, weight in enumerate(weights):
            self.values[index].view(torch.uint8).copy_(weight.values.view(torch.uint8))
            if self.scale is not None and weight.scale is not None:
                self.scale[index].copy_(weight.scale)

    @property
    def num_bytes(self) -> int:
        """Of the values with their scales."""
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)


class DeviceExperts:
    """Gated MLPs, each over the tokens that chose it."""

    def __init__(self, gate_up: ExpertMatrices, down: ExpertMatrices, limit: float = 0.0) -> None:
        """`limit`, where it is not 0, bounds gate and up (`kernels.gate`)."""
        self.gate_up = gate_up
        self.down = down
        self.limit = limit

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] bfloat16, weights float32 and experts int64 [tokens, top_k] -> [tokens, hidden]."""
        num_experts, top_k = self.down.values.shape[0], experts.shape[1]
        tiles = tiles_for(experts.numel(), num_experts, is_fp8=self.gate_up.scale is not None)
        send = dispatch_few if experts.numel() <= MOST_FEW else dispatch
        sent = send(experts, num_experts, tiles.m)
        source, x_scale = self._rounded(x)
        made = grouped_up(source, self.gate_up.values, sent, top_k, tiles, self.gate_up.scale, x_scale)
        inner, inner_scale = self._rounded(silu_mul(made, self.limit))
        out = grouped_down(inner, self.down.values, sent, weights, tiles, self.down.scale, inner_scale)
        return out.sum(dim=1)

    def _rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return quantise(x, by_block=True) if self.gate_up.scale is not None else (x, None)


class DeviceRouter:
    """Scores every expert for each token and keeps the best, or those that a table of token ids names."""

    def __init__(
        self, weight: torch.Tensor, routing: Routing, bias: torch.Tensor | None, table: torch.Tensor | None
    ) -> None:
        """weight [experts, hidden] and bias float32, table [vocab, top_k] int64."""
        self.weight = weight
        self.routing = routing
        self.bias = bias
        self.table = table

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 and experts int64, both [tokens, top_k]."""
        logits = functional.linear(x.float(), self.weight)
        return route(logits, self.routing, self.bias, self.table, token_ids)


class DeviceMoe:
    """Routed experts, and shared ones that see every token."""

    def __init__(self, router: DeviceRouter, experts: DeviceExperts, shared: DenseMlp | None) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, hidden] bfloat16; token_ids [tokens] where the layer routes by them."""
        weights, experts = self.router(x, token_ids)
        out = self.experts(x, weights, experts)
        return out if self.shared is None else out + whole(self.shared(x))

    @property
    def num_bytes(self) -> int:
        """Of the routed experts."""
        return self.experts.gate_up.num_bytes + self.experts.down.num_bytes


def tiles_for(num_rows: int, num_experts: int, *, is_fp8: bool) -> GroupedTiles:
    """Tiles about as high as an expert's rows are many; what was fastest of a few on an H200."""
    rows = num_rows / num_experts
    if rows <= 16:
        return GroupedTiles(16, n=128, k=128, warps=4, stages=3)
    if is_fp8 and rows > 48 and not INTERPRETED:
        return FP8_TILES
    if is_fp8:
        # Sums are scaled and added up at each step, which wants room in registers.
        return GroupedTiles(64, n=128, k=128, warps=4, stages=4, together=4)
    if rows <= 64:
        return GroupedTiles(64, n=128, k=128, warps=4, stages=3, together=4)
    return GroupedTiles(128, n=256, k=64, warps=8, stages=4, together=4)


def make_moe(
    moe: MoeConfig,
    config: ModelConfig,
    source: WeightSource,
    prefix: str,
    make_weight: MakeWeight,
    *,
    hashed: bool,
) -> DeviceMoe:
    """Experts of a layer; `hashed` where a table of token ids names them."""
    gate_up, down = [], []
    for index in range(moe.num_experts):
        name, inner, hidden = f"{prefix}.experts.{index}", moe.expert_size, config.hidden_size
        parts = [source.checkpoint.take(f"{name}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")]
        gate_up.append(make_weight(torch.cat([part.cuda() for part in parts])))
        down.append(make_weight(source.checkpoint.take(f"{name}.down_proj.weight", (hidden, inner)).cuda()))
    experts = DeviceExperts(ExpertMatrices(gate_up), ExpertMatrices(down), moe.clamp)
    shared = None
    if moe.shared_size:
        shared = DenseMlp(source, f"{prefix}.shared_experts", config.hidden_size, moe.shared_size, limit=moe.clamp)
    return DeviceMoe(_router(moe, config, source, f"{prefix}.gate", hashed=hashed), experts, shared)


def _router(moe: MoeConfig, config: ModelConfig, source: WeightSource, name: str, *, hashed: bool) -> DeviceRouter:
    routing = Routing(
        moe.top_k, moe.scoring, moe.renormalise, moe.weight_floor, moe.scale, moe.num_groups, moe.kept_groups
    )
    weight = source.whole(f"{name}.weight", (moe.num_experts, config.hidden_size)).cuda()
    bias = table = None
    if hashed:
        table = source.integers(f"{name}.tid2eid", (config.vocab_size, moe.top_k), moe.num_experts).cuda()
    elif moe.has_bias:
        bias = source.vector(f"{name}.e_score_correction_bias", moe.num_experts).cuda()
    return DeviceRouter(weight, routing, bias, table)
