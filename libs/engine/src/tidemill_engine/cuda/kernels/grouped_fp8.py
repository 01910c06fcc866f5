"""Products of many FP8 matrices with a scale for each 128 x 128 values, for experts with many rows.

What limits them is how often a value travels from L2, so that tiles are as large as the sums leave room for: 128 rows
by 256 outputs, of which 64 outputs at a time are multiplied over a step of 128 and added to the sums with their scales
while the next 64 are multiplied. Programs stay: the copies of a tile begin while the one before it is written. Tiles
of rows are those of `cuda.dispatch`.
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

_STEP = gl.constexpr(128)
"""Values along the inner side that have one scale."""
_PART = gl.constexpr(64)
"""Outputs that are multiplied at once."""
_FETCHING = gl.constexpr(4)
"""Warps that copy."""
_FETCHING_REGISTERS = gl.constexpr(96)


@gluon.jit
def _place(index, tiles, num_tiles, outputs, OUTPUTS: gl.constexpr, TOGETHER: gl.constexpr):  # noqa: N803
    """Tile of rows, expert and first output of a piece of work; tiles of one expert follow each other."""
    in_group = TOGETHER * gl.cdiv(outputs, OUTPUTS)
    rest = index % in_group
    tile = index // in_group * TOGETHER + rest % TOGETHER
    expert = gl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
    return tile, expert, rest // TOGETHER * OUTPUTS


@gluon.jit
def _fetch(
    x,
    w,
    order,
    tiles,
    num_tiles,
    outputs,
    width,
    total,
    x_tiles,
    w_tiles,
    ready,
    free,
    TOP_K: gl.constexpr,  # noqa: N803
    GATHER: gl.constexpr,  # noqa: N803
    TOGETHER: gl.constexpr,  # noqa: N803
    ROWS: gl.constexpr,  # noqa: N803
    OUTPUTS: gl.constexpr,  # noqa: N803
    STAGES: gl.constexpr,  # noqa: N803
):
    """Copies step after step of all pieces into the stages that are free."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [_FETCHING, 1], [1, 0])
    span = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_row))
    output_span = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, by_row))
    k = gl.arange(0, _STEP, layout=gl.SliceLayout(0, by_row))
    stage = 0
    turn = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        tile, expert, first_output = _place(index, tiles, num_tiles, outputs, OUTPUTS, TOGETHER)
        if expert >= 0:
            rows = gl.load(tiles + 3 * tile + 1) + span
            there = rows < gl.load(tiles + 3 * tile + 2)
            source = gl.load(order + rows, mask=there, other=0) // TOP_K if GATHER else rows
            n = first_output + output_span
            known = n < outputs
            # Few registers: what changes is one address, what differs are 32 bits.
            x_offsets = source[:, None] * width + k[None, :]
            w_offsets = n[:, None] * width + k[None, :]
            x_at = x
            w_at = w + expert.to(gl.int64) * outputs * width
            for start in range(0, width, _STEP):
                inside = (k + start < width)[None, :]
                mbarrier.wait(free.index(stage), turn ^ 1)
                async_copy.async_copy_global_to_shared(
                    x_tiles.index(stage), x_at + x_offsets, mask=there[:, None] & inside
                )
                async_copy.async_copy_global_to_shared(
                    w_tiles.index(stage), w_at + w_offsets, mask=known[:, None] & inside
                )
                async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
                x_at += _STEP
                w_at += _STEP
                last = stage == STAGES - 1
                stage = gl.where(last, 0, stage + 1)
                turn = gl.where(last, turn ^ 1, turn)


@gluon.jit
def _part(x_tile, w_tile, FIRST: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):  # noqa: N803
    """Starts the product of one step with _PART outputs from FIRST on."""
    sums = gl.zeros([ROWS, _PART], gl.float32, layout)
    outputs = w_tile.slice(FIRST, _PART).permute((1, 0))
    return warpgroup_mma(x_tile, outputs, sums, use_acc=False, is_async=True)


@gluon.jit
def _write(
    acc,
    out,
    target,
    there,
    first,
    outputs,
    factor,
    sides: gl.constexpr,
):
    n = first + gl.arange(0, _PART, layout=gl.SliceLayout(0, sides))
    result = gl.convert_layout((acc * factor[:, None]).to(gl.bfloat16), sides)
    at = out + target.to(gl.int64)[:, None] * outputs + n[None, :]
    gl.store(at, result, mask=there[:, None] & (n < outputs)[None, :])


@gluon.jit
def _multiply(
    out,
    order,
    tiles,
    weights,
    x_scale,
    w_scale,
    num_tiles,
    outputs,
    width,
    total,
    x_tiles,
    w_tiles,
    ready,
    free,
    TOP_K: gl.constexpr,  # noqa: N803
    GATHER: gl.constexpr,  # noqa: N803
    TOGETHER: gl.constexpr,  # noqa: N803
    ROWS: gl.constexpr,  # noqa: N803
    OUTPUTS: gl.constexpr,  # noqa: N803
    STAGES: gl.constexpr,  # noqa: N803
):
    """Sums up and writes piece after piece."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, _PART, 32])
    sides: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    blocks = gl.cdiv(width, 128)
    span = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
    written_span = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sides))
    stage = 0
    turn = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        tile, expert, first_output = _place(index, tiles, num_tiles, outputs, OUTPUTS, TOGETHER)
        if expert >= 0:
            first = gl.load(tiles + 3 * tile + 1)
            rows = first + span
            there = rows < gl.load(tiles + 3 * tile + 2)
            source = gl.load(order + rows, mask=there, other=0) // TOP_K if GATHER else gl.where(there, rows, first)
            x_offsets = source * blocks
            x_scales = x_scale
            output_blocks = gl.cdiv(outputs, 128)
            block = first_output // 128
            low_scales = w_scale + (expert.to(gl.int64) * output_blocks + block) * blocks
            # There is a second block, or nothing is written of it.
            high_scales = low_scales + gl.where(block + 1 < output_blocks, blocks, 0)
            acc0 = gl.zeros([ROWS, _PART], gl.float32, sums)
            acc1 = gl.zeros([ROWS, _PART], gl.float32, sums)
            acc2 = gl.zeros([ROWS, _PART], gl.float32, sums)
            acc3 = gl.zeros([ROWS, _PART], gl.float32, sums)
            for step in range(blocks):
                of_x = gl.load(x_scales + x_offsets)
                low = of_x * gl.load(low_scales + step)
                high = of_x * gl.load(high_scales + step)
                x_scales += 1
                mbarrier.wait(ready.index(stage), turn)
                fence_async_shared()
                x_tile, w_tile = x_tiles.index(stage), w_tiles.index(stage)
                part0 = _part(x_tile, w_tile, 0, ROWS, sums)
                part1 = _part(x_tile, w_tile, _PART, ROWS, sums)
                acc0 += warpgroup_mma_wait(1, deps=[part0]) * low[:, None]
                part2 = _part(x_tile, w_tile, 2 * _PART, ROWS, sums)
                acc1 += warpgroup_mma_wait(1, deps=[part1]) * low[:, None]
                part3 = _part(x_tile, w_tile, 3 * _PART, ROWS, sums)
                acc2 += warpgroup_mma_wait(1, deps=[part2]) * high[:, None]
                done = warpgroup_mma_wait(0, deps=[part3])
                # Both groups are through with the stage.
                gl.thread_barrier()
                mbarrier.arrive(free.index(stage), count=1)
                acc3 += done * high[:, None]
                last = stage == STAGES - 1
                stage = gl.where(last, 0, stage + 1)
                turn = gl.where(last, turn ^ 1, turn)
            # Read once more: registers are short in the loop.
            first = gl.load(tiles + 3 * tile + 1)
            end = gl.load(tiles + 3 * tile + 2)
            written = first + written_span
            kept = written < end
            target = written if GATHER else gl.load(order + written, mask=kept, other=0)
            factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, sums))
            if not GATHER:
                there = first + span < end
                place = gl.load(order + first + span, mask=there, other=0)
                factor = gl.load(weights + place, mask=there, other=0.0)
            _write(acc0, out, target, kept, first_output, outputs, factor, sides)
            _write(acc1, out, target, kept, first_output + _PART, outputs, factor, sides)
            _write(acc2, out, target, kept, first_output + 2 * _PART, outputs, factor, sides)
            _write(acc3, out, target, kept, first_output + 3 * _PART, outputs, factor, sides)


@gluon.jit
def grouped_fp8(
    x,
    w,
    out,
    order,
    tiles,
    weights,
    x_scale,
    w_scale,
    num_tiles,
    outputs,
    width,
    total,
    TOP_K: gl.constexpr,  # noqa: N803
    GATHER: gl.constexpr,  # noqa: N803
    TOGETHER: gl.constexpr,  # noqa: N803
    ROWS: gl.constexpr,  # noqa: N803
    OUTPUTS: gl.constexpr,  # noqa: N803
    STAGES: gl.constexpr,  # noqa: N803
    PDL: gl.constexpr,  # noqa: N803
):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    lies: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, _STEP], lies)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, OUTPUTS, _STEP], lies)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=32 * _FETCHING)
        mbarrier.init(free.index(stage), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, order, tiles, weights, x_scale, w_scale, num_tiles, outputs, width, total, x_tiles, w_tiles,
                    ready, free, TOP_K, GATHER, TOGETHER, ROWS, OUTPUTS, STAGES,
                ),
            ),
            (
                _fetch,
                (
                    x, w, order, tiles, num_tiles, outputs, width, total, x_tiles, w_tiles, ready, free, TOP_K, GATHER,
                    TOGETHER, ROWS, OUTPUTS, STAGES,
                ),
            ),
        ],
        [_FETCHING],
        [_FETCHING_REGISTERS],
    )  # fmt: skip
