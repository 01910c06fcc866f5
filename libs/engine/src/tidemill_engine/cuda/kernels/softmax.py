"""The step of a softmax that is summed tile by tile, base 2."""

import triton
import triton.language as tl


@triton.jit
def fold(scores, top, total):
    """Scores [rows, tile] of base 2 come to the running `top` and `total` [rows]: weights of the tile, the factor on
    what was summed before, and both anew."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    return weights, fade, new_top, total * fade + tl.sum(weights, axis=1)
