"""Kernels of latent attention, its indexer and routed experts on one CUDA device, beside their floors.

Shapes are GLM-5.2's: latents of 512 + 64 values, an indexer of 32 heads that chooses 2,048 rows in 21 of 78 layers, 256
experts of 6,144 -> 2,048, 8 of them for a token. Blocks are shuffled and lie in a pool of two layers; times are medians
of replayed graphs (of one launch, of two or four for MLA decode), torch's grouped product is timed launch by launch.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton

from tidemill_bench.benchmarks.gpu_engine import copy_gigabytes_per_s
from tidemill_bench.latent_parts import launched_ms
from tidemill_bench.options import Options
from tidemill_bench.report import Row
from tidemill_engine.cuda.dispatch import by_expert
from tidemill_engine.cuda.experts import DeviceExperts, ExpertMatrices
from tidemill_engine.cuda.item_plan import most_items, most_programs, plan_items
from tidemill_engine.cuda.kernels.gate import silu_mul
from tidemill_engine.cuda.kernels.index_scores import score_rows
from tidemill_engine.cuda.kernels.latent_decode import LatentTiles, attend_latent, latent_tiles
from tidemill_engine.cuda.kernels.row_choice import choose_rows
from tidemill_engine.cuda.timing import graph_ms
from tidemill_engine.cuda.weight_formats import FP8, Weight

RANK, ROPE, BLOCK = 512, 64, 64
INDEX_HEADS, INDEX_DIM, TOP_K = 32, 128, 2048
LAYERS, INDEXERS = 78, 21
BATCH = 64
EXPERTS, HIDDEN, INNER, CHOICES = 256, 6144, 2048, 8
FLASHINFER = "FlashInfer 0.6.13's MLA wrapper, own measurement 2026-11-30"
FLASHINFER_GB_S = 3746.0
"""16 heads, 64 rows of 4,096 tokens, blocks of 64."""
LIBRARY = "torch._grouped_mm"
_SHORT = 16_384
_PAUSE_S = 0.3


@dataclass(frozen=True)
class Pool:
    """Rows of two layers and the blocks of BATCH sequences of equal length."""

    layers: tuple[torch.Tensor, torch.Tensor]
    indices: torch.Tensor
    context: int

    @property
    def layer(self) -> torch.Tensor:
        """The second one."""
        return self.layers[1]

    @property
    def firsts(self) -> torch.Tensor:
        """[rows] first of each row's blocks."""
        return torch.arange(BATCH, dtype=torch.int32, device="cuda") * (self.context // BLOCK)


def make_pool(context: int, dim: int) -> Pool:
    """Random rows in shuffled blocks."""
    blocks = BATCH * context // BLOCK
    slab = torch.empty((blocks, 2, BLOCK, dim), dtype=torch.bfloat16, device="cuda").normal_()
    return Pool((slab[:, 0], slab[:, 1]), torch.randperm(blocks, device="cuda").int(), context)


def dense_ms(pool: Pool, heads: int, tiles: LatentTiles) -> float:
    """Decode over all rows: of two or four launches, as a step has one for each layer, over two layers by turns."""
    lengths, firsts = np.full(BATCH, pool.context), pool.firsts.cpu().numpy()
    runs = [decoder(layer, pool.indices, lengths, firsts, heads, tiles, selected=False) for layer in pool.layers]
    rounds = 2 if pool.context <= _SHORT else 1
    # A device that has just drawn its power for long lowers its clock.
    time.sleep(_PAUSE_S)
    return graph_ms(lambda: [run() for run in runs * rounds]) / (2 * rounds)


def decoder(
    layer: torch.Tensor,
    indices: torch.Tensor,
    lengths: np.ndarray,
    firsts: np.ndarray,
    heads: int,
    tiles: LatentTiles,
    *,
    selected: bool,
) -> Callable[[], torch.Tensor]:
    """One layer's attention of single tokens."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count * tiles.programs_per_sm
    plan = plan_items(lengths, firsts, programs, tiles.tokens)
    items, item_firsts = torch.from_numpy(plan.items).cuda(), torch.from_numpy(plan.item_firsts).cuda()
    by_program = np.full(most_programs(BATCH, programs) + 1, plan.program_firsts[-1])
    by_program[: plan.program_firsts.size] = plan.program_firsts
    program_firsts = torch.from_numpy(by_program).cuda()
    count = most_items(BATCH, programs)
    parts = torch.empty((count, heads, RANK), device="cuda"), torch.empty((count, heads, 2), device="cuda")
    q = torch.randn(heads, BATCH, RANK, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    q_rope = torch.randn(BATCH, heads, ROPE, device="cuda", dtype=torch.bfloat16)
    cut = (items, item_firsts, program_firsts)
    return lambda: attend_latent(q, q_rope, layer, *cut, indices, parts, 0.04, tiles, selected=selected)


def decode_rows(quick: bool, bandwidth: float, machine: str) -> Iterator[Row]:
    """Decode over all rows at growing contexts."""
    for context in (4096, 16384) if quick else (4096, 16384, 65536, 131072):
        pool = make_pool(context, RANK + ROPE)
        num_bytes = BATCH * context * (RANK + ROPE) * 2
        for heads in (16, 64):
            rate = num_bytes / dense_ms(pool, heads, latent_tiles(heads, RANK)) / 1e6
            known = FLASHINFER_GB_S if (context, heads) == (4096, 16) else None
            yield Row(
                metric=f"MLA decode, {heads} heads, context {context}", unit="GB/s", value=rate, higher_is_better=True,
                workload=f"{BATCH} rows; a device copy moves {bandwidth:.0f} GB/s", machine=machine,
                baseline=FLASHINFER if known else None, baseline_value=known, goal=f">= {0.85 * bandwidth:.0f}",
            )  # fmt: skip


def sparse_rows(quick: bool, bandwidth: float, machine: str) -> Iterator[Row]:
    """Indexer, choice and attention to chosen rows at the longest context, beside attention to all rows."""
    context = 16384 if quick else 131072
    latents, keys = make_pool(context, RANK + ROPE), make_pool(context, INDEX_DIM)
    q = torch.randn(BATCH, INDEX_HEADS, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(BATCH, INDEX_HEADS, device="cuda")
    scores = torch.empty((BATCH, context), device="cuda")
    visible = torch.full((BATCH,), context, dtype=torch.int32, device="cuda")

    def score() -> None:
        score_rows(q, weights, keys.layer, scores, visible, keys.firsts, keys.indices, TOP_K, one_table=False)

    def choose() -> torch.Tensor:
        return choose_rows(scores, visible, keys.firsts, keys.indices, TOP_K, BLOCK)

    score_ms, choose_ms = graph_ms(score), graph_ms(choose)
    workload = f"{BATCH} rows of {context} tokens"

    def row(metric: str, value: float, note: str, more: dict[str, object] | None = None) -> Row:
        fields: dict[str, object] = {"unit": "ms", "higher_is_better": False} | (more or {})
        return Row(metric=metric, value=value, workload=f"{workload}; {note}", machine=machine, **fields)  # type: ignore[arg-type]

    floor_ms = BATCH * context * INDEX_DIM * 2 / bandwidth / 1e6
    yield row("DSA decode: scores", score_ms, f"keys' bytes {floor_ms:.3f} ms")
    yield row("DSA decode: choice of 2048", choose_ms, "several blocks a row, up to four passes")
    slots = choose()
    for heads in (16, 64):
        tiles, lengths = latent_tiles(heads, RANK), np.full(BATCH, TOP_K)
        firsts = np.arange(BATCH) * TOP_K
        run = decoder(latents.layer, slots.view(-1), lengths, firsts, heads, tiles, selected=True)
        chosen_ms, all_ms = graph_ms(run), dense_ms(latents, heads, tiles)
        yield row(f"DSA decode: chosen rows, {heads} heads", chosen_ms, "2048 rows each")
        whole_ms = score_ms + choose_ms + chosen_ms
        dense = {"baseline": "attention to all rows", "baseline_value": all_ms}
        yield row(f"DSA decode: layer with indexer, {heads} heads", whole_ms, "sum of its parts", dense)
        model_ms = LAYERS * chosen_ms + INDEXERS * (score_ms + choose_ms)
        note = f"{LAYERS} layers, {INDEXERS} of them with an indexer, sum of parts"
        more = {"unit": "x", "higher_is_better": True, "goal": ">= 5"}
        yield row(f"DSA decode: GLM-5.2's layers, {heads} heads", LAYERS * all_ms / model_ms, note, more)


def prefill_rows(quick: bool, machine: str) -> Iterator[Row]:
    """The indexer over a chunk of 2,048 queries that ends the longest context."""
    context, count = 16384 if quick else 131072, 2048
    keys = make_pool(context // BATCH, INDEX_DIM)
    q = torch.randn(count, INDEX_HEADS, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(count, INDEX_HEADS, device="cuda")
    visible = torch.arange(context - count + 1, context + 1, dtype=torch.int32, device="cuda")
    firsts, scores = torch.zeros_like(visible), torch.empty((count, context), device="cuda")

    def score() -> None:
        score_rows(q, weights, keys.layer, scores, visible, firsts, keys.indices, TOP_K, one_table=True)

    score_ms = graph_ms(score)
    choose_ms = graph_ms(lambda: choose_rows(scores, visible, firsts, keys.indices, TOP_K, BLOCK))
    flops = 2 * count * context * INDEX_HEADS * INDEX_DIM
    workload = f"{count} queries that end a context of {context}"
    for metric, value, note in (
        ("scores", score_ms, f"{flops / score_ms / 1e9:.0f} TFLOP/s of about 790"),
        ("choice of 2048", choose_ms, f"{4 * 4 * count * context / choose_ms / 1e6:.0f} GB/s if all passes are made"),
    ):
        yield Row(
            metric=f"indexer prefill: {metric}", unit="ms", value=value, higher_is_better=False,
            workload=f"{workload}; {note}", machine=machine,
        )  # fmt: skip


def expert_rows(quick: bool, bandwidth: float, machine: str) -> Iterator[Row]:
    """A layer's routed experts in bfloat16 and in FP8 with a scale for each block."""
    for form in ("bf16", "fp8_block"):
        gate_up, down = (random_experts(shape, form) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
        for tokens in (16, 256) if quick else (16, 256, 4096):
            yield expert_row(DeviceExperts(gate_up, down), form, tokens, bandwidth, machine)
        del gate_up, down
        torch.cuda.empty_cache()


def expert_row(experts: DeviceExperts, form: str, tokens: int, bandwidth: float, machine: str) -> Row:
    """Uniformly routed tokens."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES, dim=-1).indices
    weights = torch.rand(tokens, CHOICES, device="cuda")
    used = int(chosen.flatten().bincount(minlength=EXPERTS).count_nonzero())
    byte_ms = (experts.gate_up.num_bytes + experts.down.num_bytes) * used / EXPERTS / bandwidth / 1e6
    rate = 790e9 if form == "bf16" else 1400e9
    flop_ms = 6 * tokens * CHOICES * HIDDEN * INNER / rate
    library = None
    if form == "bf16":
        matrices = experts.gate_up.values, experts.down.values
        library = launched_ms(lambda: by_library(x, *matrices, weights, chosen), rounds=7, warm_ups=2)
    return Row(
        metric=f"experts, {form}, {tokens} tokens",
        unit="ms",
        value=graph_ms(lambda: experts(x, weights, chosen)),
        higher_is_better=False,
        workload=f"{used} of {EXPERTS} chosen; weights' bytes {byte_ms:.3f} ms, arithmetic {flop_ms:.3f} ms",
        machine=machine,
        baseline=LIBRARY if library else None,
        baseline_value=library,
        goal=f"<= {1.25 * max(byte_ms, flop_ms):.3f}",
    )


def random_experts(shape: tuple[int, int], form: str) -> ExpertMatrices:
    """EXPERTS matrices of a shape; views of one, copied."""
    matrices = []
    scale = torch.rand((-(-shape[0] // 128), -(-shape[1] // 128)), device="cuda") / 64 if form != "bf16" else None
    for _ in range(8):
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        matrices.append(Weight(values * shape[1] ** -0.5 if scale is None else values.to(FP8), scale))
    return ExpertMatrices(matrices * (EXPERTS // 8))


@torch.inference_mode()
def run(options: Options) -> list[Row]:
    """All sections one after the other."""
    machine = f"1 x {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    bandwidth, quick = copy_gigabytes_per_s(), options.quick
    rows: list[Row] = []
    for section in (
        decode_rows(quick, bandwidth, machine),
        sparse_rows(quick, bandwidth, machine),
        prefill_rows(quick, machine),
        expert_rows(quick, bandwidth, machine),
    ):
        rows += section
        torch.cuda.empty_cache()
    return rows


def by_library(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """The same sum by torch's grouped product, for bfloat16 matrices [experts, out, in]."""
    tokens, top_k = experts.shape
    order, ends = by_expert(experts, down.shape[0])
    made = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends.int())
    inner = torch._grouped_mm(silu_mul(made), down.transpose(1, 2), offs=ends.int())
    out = torch.empty_like(inner)
    out[order] = inner
    return (out.view(tokens, top_k, -1) * weights[..., None]).sum(dim=1).to(x.dtype)
