"""Routed and shared experts on the device: no loop over experts, no wait for the device."""

from collections.abc import Callable, Sequence

import torch

from tidemill_engine.cuda.dispatch import dispatch
from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.grouped import FP8_TILES, GroupedTiles, grouped_down, grouped_up
from tidemill_engine.cuda.kernels.launch import INTERPRETED
from tidemill_engine.cuda.kernels.quantise import quantise
from tidemill_engine.cuda.mlp import DenseMlp, whole
from tidemill_engine.cuda.weight_formats import Weight
from tidemill_engine.layers.moe import Router
from tidemill_engine.loading.weights import WeightSource
from tidemill_engine.models.config import ModelConfig
from tidemill_engine.models.mlp import make_router
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

    def __init__(self, gate_up: ExpertMatrices, down: ExpertMatrices) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] bfloat16, weights float32 and experts int64 [tokens, top_k] -> [tokens, hidden]."""
        num_experts, top_k = self.down.values.shape[0], experts.shape[1]
        tiles = tiles_for(experts.numel(), num_experts, is_fp8=self.gate_up.scale is not None)
        sent = dispatch(experts, num_experts, tiles.m)
        source, x_scale = self._rounded(x)
        made = grouped_up(source, self.gate_up.values, sent, top_k, tiles, self.gate_up.scale, x_scale)
        inner, inner_scale = self._rounded(silu_mul(made))
        out = grouped_down(inner, self.down.values, sent, weights, tiles, self.down.scale, inner_scale)
        return out.sum(dim=1)

    def _rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return quantise(x, by_block=True) if self.gate_up.scale is not None else (x, None)


class DeviceMoe:
    """Routed experts, and shared ones that see every token."""

    def __init__(self, router: Router, experts: DeviceExperts, shared: DenseMlp | None) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] bfloat16"""
        # No token ids: what routes by them takes the reference path.
        weights, experts = self.router(x.float(), x)
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
) -> DeviceMoe:
    """Experts of a layer."""
    router = make_router(moe, config, source, f"{prefix}.gate", hashed=False)
    router.weight = router.weight.cuda()
    router.bias = None if router.bias is None else router.bias.cuda()
    gate_up, down = [], []
    for index in range(moe.num_experts):
        name, inner, hidden = f"{prefix}.experts.{index}", moe.expert_size, config.hidden_size
        parts = [source.checkpoint.take(f"{name}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")]
        gate_up.append(make_weight(torch.cat([part.cuda() for part in parts])))
        down.append(make_weight(source.checkpoint.take(f"{name}.down_proj.weight", (hidden, inner)).cuda()))
    experts = DeviceExperts(ExpertMatrices(gate_up), ExpertMatrices(down))
    shared = None
    if moe.shared_size:
        shared = DenseMlp(source, f"{prefix}.shared_experts", config.hidden_size, moe.shared_size)
    return DeviceMoe(router, experts, shared)
