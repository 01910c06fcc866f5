"""Greedy choice or a draw by temperature, at the Philox numbers of the CPU sampler, in two passes over the logits.

The first pass sums each chunk of the vocabulary, the second finds the chunk that the draw falls in and reads only that.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill_engine.cuda.kernels.launch import dependent

_CHUNK = 4096


@triton.jit
def _sum_chunks(
    logits,
    temperatures,
    tops,
    sums,
    places,
    vocab,
    CHUNK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + columns, mask=columns < vocab, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    top = tl.max(x, axis=0)
    scaled = (x - top) / tl.where(temperature > 0, temperature, 1.0)
    at = row * tl.num_programs(1) + chunk
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(scaled), axis=0))
    tl.store(places + at, chunk * CHUNK + tl.argmax(x, axis=0, tie_break_left=True))


@triton.jit
def _pick(
    logits,
    temperatures,
    seeds,
    counts,
    tops,
    sums,
    places,
    rows,
    tokens,
    row_tokens,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,  # noqa: N803
    CHUNKS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    top_of = tl.load(tops + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    top = tl.max(top_of, axis=0)
    if temperature > 0:
        sum_of = tl.load(sums + row * num_chunks + chunks, mask=inside, other=0.0)
        weights = sum_of.to(tl.float64) * tl.exp((top_of - top) / temperature).to(tl.float64)
        count = tl.load(counts + row)
        zero = count * 0
        w0, w1, _w2, _w3 = tl.philox(tl.load(seeds + row), count, zero, zero, zero)
        bits = (w0.to(tl.uint64) << 21) | (w1.to(tl.uint64) >> 11)
        target = bits.to(tl.float64) * 1.1102230246251565e-16 * tl.sum(weights, axis=0)
        passed = (tl.cumsum(weights, axis=0) <= target) & inside
        chunk = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), num_chunks - 1)
        before = tl.sum(tl.where(chunks < chunk, weights, 0.0), axis=0)
        inner = tl.arange(0, CHUNK)
        columns = chunk * CHUNK + inner
        x = tl.load(logits + row * vocab + columns, mask=columns < vocab, other=float("-inf"))
        probs = tl.exp((x - top) / temperature)
        below = before + tl.cumsum(probs.to(tl.float64), axis=0) <= target
        # Rounding may leave the chunk's end below the target: then its last possible token is taken.
        last = tl.max(tl.where(probs > 0, inner, 0), axis=0)
        token = chunk * CHUNK + tl.minimum(tl.sum(below.to(tl.int32), axis=0), last)
    else:
        token = tl.load(places + row * num_chunks + tl.argmax(top_of, axis=0, tie_break_left=True))
    tl.store(tokens + row, token)
    tl.store(row_tokens + tl.load(rows + row), token)


def draw_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    counts: torch.Tensor,
    rows_of_runner: torch.Tensor,
    out: torch.Tensor,
    row_tokens: torch.Tensor,
) -> None:
    """Writes one token for each row of logits [rows, vocab] float32 into out (int32) and, at the runner's row of each,
    into row_tokens (int32). temperatures (float32) of 0 take
    the most probable token; seeds (int64) and counts (int32, output tokens so far) name the Philox number."""
    rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    tops = torch.empty((rows, num_chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(tops)
    places = torch.empty((rows, num_chunks), dtype=torch.int32, device=logits.device)
    _sum_chunks[(rows, num_chunks)](
        logits, temperatures, tops, sums, places, vocab, CHUNK=_CHUNK, num_warps=8, **dependent()
    )
    _pick[(rows,)](
        logits,
        temperatures,
        seeds,
        counts,
        tops,
        sums,
        places,
        rows_of_runner,
        out,
        row_tokens,
        vocab,
        num_chunks,
        CHUNK=_CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
        **dependent(),
    )
