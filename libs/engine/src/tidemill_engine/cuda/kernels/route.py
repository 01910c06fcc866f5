"""Who computes which token: scores of all experts, the best of them and their weights in one launch, and for few tokens
the tables of the grouped products (`cuda.dispatch` says what they hold) in another."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.dispatch import Dispatch, most_tiles
from tidemill_engine.cuda.kernels.launch import dependent

MOST_FEW = 1024
"""Rows (tokens times choices) up to which `dispatch_few` is faster than torch's sort."""
_AT_ONCE = 64
"""Rows that a program of `_dispatch` places."""
_TILES_AT_ONCE = 16


@dataclass(frozen=True)
class Routing:
    """How experts are chosen; as `layers.moe.Router`."""

    top_k: int
    scoring: str
    renormalise: bool
    weight_floor: float
    scale: float
    num_groups: int = 1
    kept_groups: int = 1


@triton.jit
def _route(
    logits,
    bias,
    table,
    token_ids,
    weights,
    experts,
    weight_floor,
    factor,
    EXPERTS: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
    SCORING: tl.constexpr,  # noqa: N803
    BIASED: tl.constexpr,  # noqa: N803
    HASHED: tl.constexpr,  # noqa: N803
    RENORMALISE: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    KEPT_GROUPS: tl.constexpr,  # noqa: N803
    G: tl.constexpr,  # noqa: N803
    E: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)
    member = tl.arange(0, E)
    there = (group < GROUPS)[:, None] & (member < EXPERTS // GROUPS)[None, :]
    number = group[:, None] * (EXPERTS // GROUPS) + member[None, :]
    x = tl.load(logits + token * EXPERTS + number, mask=there, other=float("-inf"))
    if SCORING == "softmax":
        powers = tl.exp(x - tl.max(tl.max(x, axis=1), axis=0))
        scores = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    elif SCORING == "sigmoid":
        scores = tl.sigmoid(x)
    else:
        # log(1 + z), also where 1 + z is rounded.
        z = tl.exp(tl.minimum(x, 20.0))
        above = 1.0 + z
        soft = tl.where(above == 1.0, z, tl.log(above) * (z / tl.where(above == 1.0, 1.0, above - 1.0)))
        scores = tl.sqrt(tl.where(x > 20.0, x, soft))
    k = tl.arange(0, K)
    if HASHED:
        named = table + tl.load(token_ids + token).to(tl.int64) * TOP_K + k
        picked = tl.load(named, mask=k < TOP_K, other=0).to(tl.int32)
        taken = tl.zeros((K,), tl.float32)
        for i in tl.static_range(TOP_K):
            one = tl.sum(tl.where(k == i, picked, 0), axis=0)
            share = tl.sum(tl.sum(tl.where(there & (number == one), scores, 0.0), axis=1), axis=0)
            taken = tl.where(k == i, share, taken)
    else:
        ranked = tl.where(there, scores, float("-inf"))
        if BIASED:
            ranked += tl.load(bias + number, mask=there, other=0.0)
        if GROUPS > 1:
            best = tl.max(ranked, axis=1)
            at_best = tl.min(tl.where(ranked == best[:, None], member[None, :], E), axis=1)
            second = tl.max(tl.where(member[None, :] == at_best[:, None], float("-inf"), ranked), axis=1)
            left = tl.where(group < GROUPS, best + second, float("-inf"))
            kept = group < 0
            for _ in tl.static_range(KEPT_GROUPS):
                at = tl.min(tl.where(left == tl.max(left, axis=0), group, G), axis=0)
                kept = kept | (group == at)
                left = tl.where(group == at, float("-inf"), left)
            ranked = tl.where(kept[:, None], ranked, float("-inf"))
        picked = tl.zeros((K,), tl.int32)
        taken = tl.zeros((K,), tl.float32)
        for i in tl.static_range(TOP_K):
            top = tl.max(tl.max(ranked, axis=1), axis=0)
            one = tl.min(tl.min(tl.where(ranked == top, number, EXPERTS - 1), axis=1), axis=0)
            hit = there & (number == one)
            picked = tl.where(k == i, one, picked)
            taken = tl.where(k == i, tl.sum(tl.sum(tl.where(hit, scores, 0.0), axis=1), axis=0), taken)
            ranked = tl.where(hit, float("-inf"), ranked)
    if RENORMALISE:
        taken = taken / (tl.sum(tl.where(k < TOP_K, taken, 0.0), axis=0) + weight_floor)
    tl.store(weights + token * TOP_K + k, taken * factor, mask=k < TOP_K)
    tl.store(experts + token * TOP_K + k, picked.to(tl.int64), mask=k < TOP_K)


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and experts int64, both [tokens, top_k], for logits [tokens, experts] float32; of equal ones the
    earlier expert. bias [experts] float32 is added for the choice only; a table [vocab, top_k] int64 chooses by
    token_ids [tokens] instead."""
    assert (table is None) == (token_ids is None)
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, routing.top_k), dtype=torch.int64, device=logits.device)
    size = triton.next_power_of_2(num_experts // routing.num_groups)
    _route[(tokens,)](
        logits,
        logits if bias is None else bias,
        logits if table is None else table,
        logits if token_ids is None else token_ids,
        weights,
        experts,
        routing.weight_floor,
        routing.scale,
        EXPERTS=num_experts,
        TOP_K=routing.top_k,
        K=triton.next_power_of_2(routing.top_k),
        SCORING=routing.scoring,
        BIASED=bias is not None,
        HASHED=table is not None,
        RENORMALISE=routing.renormalise,
        GROUPS=routing.num_groups,
        KEPT_GROUPS=routing.kept_groups,
        G=triton.next_power_of_2(routing.num_groups),
        E=size,
        num_warps=1 if num_experts <= 256 else 2,
        **dependent(),
    )
    return weights, experts


@triton.jit
def _dispatch(
    experts,
    order,
    ends,
    tiles,
    num_rows,
    num_experts,
    num_tiles,
    row_programs,
    TILE_ROWS: tl.constexpr,  # noqa: N803
    E: tl.constexpr,  # noqa: N803
    AT_ONCE: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    if program < row_programs:
        # A row's place is the number of rows before it in order of expert and place.
        i = program * AT_ONCE + tl.arange(0, AT_ONCE)
        mine = tl.load(experts + i, mask=i < num_rows, other=0).to(tl.int32)
        rank = tl.zeros((AT_ONCE,), tl.int32)
        for start in range(0, num_rows, AT_ONCE):
            j = start + tl.arange(0, AT_ONCE)
            other = tl.load(experts + j, mask=j < num_rows, other=1 << 30).to(tl.int32)
            before = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
            rank += tl.sum(before.to(tl.int32), axis=1)
        tl.store(order + rank, i, mask=i < num_rows)
    else:
        e = tl.arange(0, E)
        begin = tl.zeros((E,), tl.int32)
        end = tl.zeros((E,), tl.int32)
        for start in range(0, num_rows, AT_ONCE):
            j = start + tl.arange(0, AT_ONCE)
            other = tl.load(experts + j, mask=j < num_rows, other=1 << 30).to(tl.int32)
            begin += tl.sum((other[None, :] < e[:, None]).to(tl.int32), axis=1)
            end += tl.sum((other[None, :] <= e[:, None]).to(tl.int32), axis=1)
        tl.store(ends + e, end, mask=(e < num_experts) & (program == row_programs))
        counts = (end - begin + TILE_ROWS - 1) // TILE_ROWS
        tile_ends = tl.cumsum(counts, axis=0)
        tile_firsts = tile_ends - counts
        t = (program - row_programs) * TILES + tl.arange(0, TILES)
        hit = (tile_firsts[None, :] <= t[:, None]) & (t[:, None] < tile_ends[None, :])
        first = begin[None, :] + (t[:, None] - tile_firsts[None, :]) * TILE_ROWS
        found = tl.sum(hit.to(tl.int32), axis=1) > 0
        expert = tl.sum(tl.where(hit, e[None, :], 0), axis=1)
        at = tiles + 3 * t
        there = t < num_tiles
        tl.store(at, tl.where(found, expert, -1), mask=there)
        tl.store(at + 1, tl.sum(tl.where(hit, first, 0), axis=1), mask=there)
        tl.store(at + 2, tl.sum(tl.where(hit, end[None, :], 0), axis=1), mask=there)


def dispatch_few(experts: torch.Tensor, num_experts: int, tile_rows: int) -> Dispatch:
    """As `dispatch`, in one launch; every row is compared with every other."""
    num_rows = experts.numel()
    num_tiles = most_tiles(num_rows, num_experts, tile_rows)
    numbers = torch.empty(num_rows + num_experts + 3 * num_tiles, dtype=torch.int32, device=experts.device)
    order, rest = numbers[:num_rows], numbers[num_rows:]
    ends, tiles = rest[:num_experts], rest[num_experts:]
    row_programs = triton.cdiv(num_rows, _AT_ONCE)
    _dispatch[(row_programs + triton.cdiv(num_tiles, _TILES_AT_ONCE),)](
        experts,
        order,
        ends,
        tiles,
        num_rows,
        num_experts,
        num_tiles,
        row_programs,
        TILE_ROWS=tile_rows,
        E=triton.next_power_of_2(num_experts),
        AT_ONCE=_AT_ONCE,
        TILES=_TILES_AT_ONCE,
        num_warps=4,
        **dependent(),
    )
    return Dispatch(order, ends, tiles.view(-1, 3), tile_rows)
