"""Attention in latent space that reads each latent once: one copy in shared memory is keys and, as it lies, values.

Triton copies a tile ahead only where one product uses it, so this kernel says itself what lies where and who does what
(Gluon). Four warps do nothing but start copies: a warp that does waits until the memory takes them, which those that
compute must not. Two groups of four warps share the products, each with half of a tile's tokens for the scores and half
of the values for their sum. Up to 64 heads fill the tensor core's 64 rows; fewer cost the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEADS = 64
"""Query heads of a program."""
_MOST_ABOVE = gl.constexpr(8.0)
"""Powers of two by which a score may exceed the one that weights are relative to."""
_FETCHING = gl.constexpr(4)
"""Warps that copy."""
_FETCHING_REGISTERS = gl.constexpr(80)


@gluon.jit
def _rows_of(indices, first_index, token, there, BLOCK_SIZE: gl.constexpr, SELECTED: gl.constexpr):  # noqa: N803
    """Places (block * BLOCK_SIZE + offset) of tokens of an item."""
    if SELECTED:
        return gl.load(indices + first_index + token, mask=there, other=0)
    return gl.load(indices + first_index + token // BLOCK_SIZE, mask=there, other=0) * BLOCK_SIZE + token % BLOCK_SIZE


@gluon.jit
def _copy_tile(
    target,
    layer,
    slots,
    there,
    first_dim,
    block_stride,
    WIDTH: gl.constexpr,  # noqa: N803
    ROW: gl.constexpr,  # noqa: N803
    BLOCK_SIZE: gl.constexpr,  # noqa: N803
    LAYOUT: gl.constexpr,  # noqa: N803
):
    """Starts the copy of WIDTH values of each row from first_dim on; rows that are not there become zeros."""
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = (slots // BLOCK_SIZE).to(gl.int64) * block_stride + (slots % BLOCK_SIZE) * ROW + first_dim
    async_copy.async_copy_global_to_shared(target, layer + at[:, None] + dims[None, :], mask=there[:, None])


@gluon.jit
def _copy_queries(
    target,
    source,
    heads,
    row_stride,
    head_stride,
    NUM_HEADS: gl.constexpr,  # noqa: N803
    WIDTH: gl.constexpr,  # noqa: N803
    LAYOUT: gl.constexpr,  # noqa: N803
):
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = source + row_stride + heads.to(gl.int64)[:, None] * head_stride + dims[None, :]
    async_copy.async_copy_global_to_shared(target, at, mask=(heads < NUM_HEADS)[:, None])


@gluon.jit
def _fetch(
    q_latent,
    q_rope,
    layer,
    items,
    first_item,
    last_item,
    indices,
    latent_row,
    latent_head,
    rope_row,
    rope_head,
    block_stride,
    q_tile,
    q_turned,
    latents,
    turned,
    asked,
    answered,
    ready,
    free,
    BLOCK_SIZE: gl.constexpr,  # noqa: N803
    NUM_HEADS: gl.constexpr,  # noqa: N803
    HEADS: gl.constexpr,  # noqa: N803
    RANK: gl.constexpr,  # noqa: N803
    ROPE: gl.constexpr,  # noqa: N803
    BT: gl.constexpr,  # noqa: N803
    STAGES: gl.constexpr,  # noqa: N803
    SELECTED: gl.constexpr,  # noqa: N803
):
    """Copies each item's queries once those before are answered, and tile after tile into the stages that are free."""
    ROW: gl.constexpr = RANK + ROPE  # noqa: N806
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_FETCHING, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROPE, ROPE // 8], [_FETCHING, 1], [1, 0])
    # Rows that are named one by one are copied some at a time: the first copy starts before all addresses are known.
    ROWS: gl.constexpr = 16 if SELECTED else BT  # noqa: N806
    wide_span = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    narrow_span = gl.arange(0, BT, layout=gl.SliceLayout(1, narrow))
    first_head = gl.program_id(1) * HEADS
    wide_heads = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, wide))
    narrow_heads = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, narrow))
    stage = 0
    turn = 0
    for item in range(first_item, last_item):
        row = gl.load(items + 5 * item).to(gl.int64)
        mbarrier.wait(answered, (item - first_item + 1) & 1)
        _copy_queries(q_tile.index(0), q_latent, wide_heads, row * latent_row, latent_head, NUM_HEADS, RANK, wide)
        _copy_queries(q_turned.index(0), q_rope, narrow_heads, row * rope_row, rope_head, NUM_HEADS, ROPE, narrow)
        async_copy.mbarrier_arrive(asked, increment_count=False)
        first_index = gl.load(items + 5 * item + 1)
        begin = gl.load(items + 5 * item + 2)
        count = gl.load(items + 5 * item + 3)
        for start in range(0, count, BT):
            b = start + narrow_span
            narrow_slots = _rows_of(indices, first_index, begin + b, b < count, BLOCK_SIZE, SELECTED)
            a = start + wide_span
            wide_slots = _rows_of(indices, first_index, begin + a, a < count, BLOCK_SIZE, SELECTED)
            mbarrier.wait(free.index(stage), turn ^ 1)
            tile = latents.index(stage)
            for first in gl.static_range(0, BT, ROWS):
                if first > 0:
                    a = start + first + wide_span
                    wide_slots = _rows_of(indices, first_index, begin + a, a < count, BLOCK_SIZE, SELECTED)
                part = tile.slice(first, ROWS)
                _copy_tile(part, layer, wide_slots, a < count, 0, block_stride, RANK, ROW, BLOCK_SIZE, wide)
            _copy_tile(
                turned.index(stage), layer, narrow_slots, b < count, RANK, block_stride, ROPE, ROW, BLOCK_SIZE, narrow
            )
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            turn = gl.where(last, turn ^ 1, turn)


@gluon.jit
def _compute(
    out,
    part_out,
    part_stats,
    items,
    first_item,
    last_item,
    scale,
    q_tile,
    q_turned,
    latents,
    turned,
    kept,
    asked,
    answered,
    ready,
    free,
    NUM_HEADS: gl.constexpr,  # noqa: N803
    HEADS: gl.constexpr,  # noqa: N803
    RANK: gl.constexpr,  # noqa: N803
    BT: gl.constexpr,  # noqa: N803
    STAGES: gl.constexpr,  # noqa: N803
):
    """Attends, item after item, and writes what came out."""
    WARPS: gl.constexpr = gl.num_warps()  # noqa: N806
    GROUPS: gl.constexpr = WARPS // 4  # noqa: N806
    by_score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BT // GROUPS, 16])
    by_value: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, min(256, RANK // GROUPS), 16])
    first_head = gl.program_id(1) * HEADS
    span = gl.arange(0, BT, layout=gl.SliceLayout(0, by_score))
    stage = 0
    turn = 0
    for item in range(first_item, last_item):
        row = gl.load(items + 5 * item).to(gl.int64)
        count = gl.load(items + 5 * item + 3)
        number = gl.load(items + 5 * item + 4).to(gl.int64)
        mbarrier.wait(asked, (item - first_item) & 1)
        top = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, by_score))
        # Of each column of the tiles; summed up at the end.
        totals = gl.zeros([HEADS, BT], gl.float32, by_score)
        acc = gl.zeros([HEADS, RANK], gl.float32, by_value)
        for start in range(0, count, BT):
            mbarrier.wait(ready.index(stage), turn)
            # What the copies wrote is read by tensor cores.
            fence_async_shared()
            tile = latents.index(stage)
            # Not known to be the same each time: descriptors of all steps, kept beside the sums, would not fit.
            only = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)
            scores = gl.zeros([HEADS, BT], gl.float32, by_score)
            asking, turning = q_tile.index(only), q_turned.index(only)
            scores = warpgroup_mma(asking, tile.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(turning, turned.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where((start + span < count)[None, :], scores, float("-inf"))
            above = scores * scale - top[:, None]
            # What was summed up is scaled anew only where scores have grown so far that it matters.
            if gl.max(above) > _MOST_ABOVE:
                new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
                fade = gl.exp2(top - new_top)
                top = new_top
                totals = totals * fade[:, None]
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, by_value))[:, None]
                above = scores * scale - top[:, None]
            weights = gl.exp2(above)
            totals += weights
            kept.store(weights.to(gl.bfloat16))
            fence_async_shared()
            acc = warpgroup_mma(kept, tile, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            # Both groups are through with the stage.
            gl.thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            turn = gl.where(last, turn ^ 1, turn)
        gl.thread_barrier()
        mbarrier.arrive(answered, count=1)
        total = gl.sum(totals, axis=1)
        heads = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, by_value))
        inside = (heads < NUM_HEADS)[:, None]
        dims = gl.arange(0, RANK, layout=gl.SliceLayout(0, by_value))
        if number < 0:
            shares = gl.convert_layout(total, gl.SliceLayout(1, by_value))
            target = (row * NUM_HEADS + heads)[:, None] * RANK + dims[None, :]
            gl.store(out + target, (acc / shares[:, None]).to(gl.bfloat16), mask=inside)
        else:
            place = number * NUM_HEADS + heads
            gl.store(part_out + place[:, None] * RANK + dims[None, :], acc, mask=inside)
            score_heads = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, by_score))
            score_place = number * NUM_HEADS + score_heads
            gl.store(part_stats + score_place * 2, top, mask=score_heads < NUM_HEADS)
            gl.store(part_stats + score_place * 2 + 1, total, mask=score_heads < NUM_HEADS)


@gluon.jit
def attend_once(
    q_latent,
    q_rope,
    layer,
    out,
    part_out,
    part_stats,
    items,
    program_firsts,
    indices,
    scale,
    latent_row,
    latent_head,
    rope_row,
    rope_head,
    block_stride,
    BLOCK_SIZE: gl.constexpr,  # noqa: N803
    NUM_HEADS: gl.constexpr,  # noqa: N803
    HEADS: gl.constexpr,  # noqa: N803
    RANK: gl.constexpr,  # noqa: N803
    ROPE: gl.constexpr,  # noqa: N803
    BT: gl.constexpr,  # noqa: N803
    STAGES: gl.constexpr,  # noqa: N803
    SELECTED: gl.constexpr,  # noqa: N803
    PDL: gl.constexpr,  # noqa: N803
):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    first_item = gl.load(program_firsts + gl.program_id(0))
    last_item = gl.load(program_firsts + gl.program_id(0) + 1)
    if first_item < last_item:
        lies: gl.constexpr = gl.NVMMASharedLayout(min(128, RANK * 2), 16)
        rope_lies: gl.constexpr = gl.NVMMASharedLayout(min(128, ROPE * 2), 16)
        weights_lie: gl.constexpr = gl.NVMMASharedLayout(min(128, BT * 2), 16)
        q_tile = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, RANK], lies)
        q_turned = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, ROPE], rope_lies)
        latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BT, RANK], lies)
        turned = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BT, ROPE], rope_lies)
        kept = gl.allocate_shared_memory(gl.bfloat16, [HEADS, BT], weights_lie)
        # Barriers of the queries and of each stage: filled, and read for the last time.
        asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        answered = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(asked, count=32 * _FETCHING)
        mbarrier.init(answered, count=1)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(ready.index(stage), count=32 * _FETCHING)
            mbarrier.init(free.index(stage), count=1)
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (
                    _compute,
                    (
                        out, part_out, part_stats, items, first_item, last_item, scale, q_tile, q_turned, latents,
                        turned, kept, asked, answered, ready, free, NUM_HEADS, HEADS, RANK, BT, STAGES,
                    ),
                ),
                (
                    _fetch,
                    (
                        q_latent, q_rope, layer, items, first_item, last_item, indices, latent_row, latent_head,
                        rope_row, rope_head, block_stride, q_tile, q_turned, latents, turned, asked, answered, ready,
                        free, BLOCK_SIZE, NUM_HEADS, HEADS, RANK, ROPE, BT, STAGES, SELECTED,
                    ),
                ),
            ],
            [_FETCHING],
            [_FETCHING_REGISTERS],
        )  # fmt: skip
