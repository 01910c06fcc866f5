"""What the engine does between two steps of a long prompt that is computed in chunks: the cache's part, and all of it.

`resumed` is what the scheduler does: a sequence's cursor goes on where the last chunk stopped. `rescanned` is the form
that many engines began with, on the same tree: after each chunk the prompt is hashed, matched and inserted anew.
"""

import time
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from tidemill_bench.simulation.engine_clock import CostedRunner
from tidemill_engine import engine as engine_module
from tidemill_engine.messages import RequestKey, Submit
from tidemill_engine.sampling_params import SamplingParams
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SchedulerOutput, StepResult
from tidemill_kvcache.cache import PrefixCache
from tidemill_kvcache.hashing import TokenIds, chain_root
from tidemill_kvcache.sequence import CachedSequence
from tidemill_kvcache.step_cost import StepCost

ROOT = chain_root(b"model", b"")
COST = StepCost(base_s=0.008, prefill_token_s=1 / 20_000)
"""Moves the simulated clock; no part of what is measured."""


def _setup(prompt_tokens: int, block_size: int) -> tuple[PrefixCache, np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    ids = np.random.default_rng(5).integers(0, 100_000, prompt_tokens).astype(np.uint32)
    return PrefixCache(2 * prompt_tokens // block_size, block_size), ids


def resumed(prompt_tokens: int, block_size: int, chunk_tokens: int) -> list[float]:
    """Seconds of cache work for each chunk."""
    cache, ids = _setup(prompt_tokens, block_size)
    seq = cache.open(ROOT)
    cache.match_prefix(seq, ids, prompt_tokens - 1)
    gaps = []
    for end in range(chunk_tokens, prompt_tokens + 1, chunk_tokens):
        start = time.perf_counter()
        assert cache.allocate(seq, end) is not None
        cache.commit(seq, ids, end)
        gaps.append(time.perf_counter() - start)
    return gaps


def rescanned(prompt_tokens: int, block_size: int, chunk_tokens: int) -> list[float]:
    """The same, with all that precedes the chunk hashed, matched and referenced again."""
    cache, ids = _setup(prompt_tokens, block_size)
    seq = cache.open(ROOT)
    gaps = []
    for end in range(chunk_tokens, prompt_tokens + 1, chunk_tokens):
        start = time.perf_counter()
        again = cache.open(ROOT)
        cache.match_prefix(again, ids[:end], end)
        cache.free(seq)
        seq = again
        assert cache.allocate(seq, end) is not None
        cache.commit(seq, ids[:end], end)
        gaps.append(time.perf_counter() - start)
    return gaps


class RescanningCache(PrefixCache):
    """Hashes, matches and references all that precedes a chunk again before it commits the chunk."""

    def commit(self, seq: CachedSequence, token_ids: TokenIds, computed_tokens: int) -> None:
        """As the product's cache."""
        again = self.open(seq.root)
        self.match_prefix(again, token_ids, computed_tokens)
        seq.hash_chain = again.hash_chain
        self.free(again)
        super().commit(seq, token_ids, computed_tokens)


@dataclass
class TimedRunner(CostedRunner):
    """Computes nothing, and knows how long that took."""

    spent_s: float = 0.0

    def execute(self, out: SchedulerOutput) -> StepResult:
        """One step."""
        start = time.perf_counter()
        result = super().execute(out)
        self.spent_s += time.perf_counter() - start
        return result


def engine_steps(
    prompt_tokens: int, block_size: int, chunk_tokens: int, cache: type[PrefixCache] = PrefixCache
) -> list[float]:
    """Seconds of `Engine.step` for each chunk of one prompt, less those of the runner: planning, cache and reports."""
    num_blocks = 2 * prompt_tokens // block_size
    runner = TimedRunner(COST, num_blocks)
    settings = EngineSettings(
        model_dir="", block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=chunk_tokens
    )
    with patch.object(engine_module, "PrefixCache", cache):
        engine = engine_module.Engine(settings, runner, lambda: runner.now_s)
    ids = np.random.default_rng(5).integers(0, 100_000, prompt_tokens).tolist()
    submit = Submit(
        key=RequestKey("long"),
        stage="prefill",
        token_ids=ids,
        prompt_tokens=prompt_tokens,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        hash_salt=ROOT,
        deadline_s=1e9,
    )
    engine.handle(submit)
    gaps = []
    while runner.num_prefill_tokens < prompt_tokens:
        spent_s, start = runner.spent_s, time.perf_counter()
        worked, _ = engine.step()
        gaps.append(time.perf_counter() - start - (runner.spent_s - spent_s))
        assert worked, "the engine stands still"
    return gaps
