"""The batched sampler against a plain float64 computation of one row at a time."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_engine.sampling.philox import PURPOSE_SAMPLE, philox, uniform, uniform_torch
from tidemill_engine.sampling.sampler import Sampler
from tidemill_engine.sampling_params import SamplingParams

VOCAB = 600


def random_logits(rows: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * spread


def reference_token(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> tuple[int, float]:
    """(token, distance of the draw to the nearest border of the cumulative distribution)."""
    values = logits.double().tolist()
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            values[token] = -math.inf
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return int(np.argmax(values)), 1.0
    scaled = np.array(values) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept = probs >= params.min_p * probs.max()
    ranked = np.sort(probs)[::-1]
    if 0 < params.top_k < VOCAB:
        kept &= probs >= ranked[params.top_k - 1]
    if params.top_p < 1:
        left = np.sort(probs * kept)[::-1]
        left /= left.sum()
        last = int(np.argmax(np.cumsum(left) >= params.top_p - 1e-12))
        kept &= probs >= left[last] * (probs * kept).sum() * (1 - 1e-9)
    probs = probs * kept
    cumulative = np.cumsum(probs)
    draw = uniform(np.array([params.seed], np.uint64), np.array([len(output)]))[0] * cumulative[-1]
    return int(np.searchsorted(cumulative, draw, side="right")), float(np.abs(cumulative - draw).min())


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 300, 10_000]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20, width=16), max_size=4),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    min_tokens=st.sampled_from([0, 3]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=5), st.integers(0, 1000))
def test_every_row_of_a_batch_gets_the_token_of_the_plain_computation(rows: list[SamplingParams], seed: int) -> None:
    sampler = Sampler(8, VOCAB)
    generator = np.random.default_rng(seed)
    prompts, outputs = {}, {}
    for row, params in enumerate(rows):
        prompts[row] = generator.integers(0, VOCAB, 10).tolist()
        outputs[row] = generator.integers(0, VOCAB, 2).tolist()
        tokens = np.array(prompts[row] + outputs[row])
        sampler.start(row, params, tokens, 10)
    for step in range(3):
        logits = random_logits(len(rows), seed * 7 + step)
        order = generator.permutation(len(rows))
        positions = np.array([len(outputs[row]) for row in order])
        sampled = sampler.sample(logits[order].clone(), order, positions)
        for place, row in enumerate(order.tolist()):
            expected, border = reference_token(logits[row], rows[row], prompts[row], outputs[row])
            token = int(sampled.token_ids[place])
            # A draw that falls on a border may go either way in float32.
            assert token == expected or border < 1e-5, (rows[row], step)
            outputs[row].append(token)


def test_a_seeded_row_draws_the_same_alone_beside_others_and_after_a_move() -> None:
    params = SamplingParams(temperature=1.0, seed=1234, presence_penalty=0.5)
    logits = [random_logits(1, step) for step in range(20)]

    def run(row: int, mates: int, moves_at: int = -1) -> list[int]:
        sampler, made = Sampler(8, VOCAB), list[int]()
        sampler.start(row, params, np.array([1, 2, 3]), 3)
        for other in range(mates):
            sampler.start((row + 1 + other) % 8, SamplingParams(temperature=0.5, top_k=3, seed=other), np.array([1]), 1)
        for step in range(20):
            if step == moves_at:
                sampler = Sampler(8, VOCAB)
                sampler.start(row, params, np.array([1, 2, 3, *made]), 3)
                mates = 0
            rows = np.array([(row + 1 + other) % 8 for other in range(mates)] + [row])
            batch = torch.cat([random_logits(mates, 1000 + step), logits[step]])
            sampled = sampler.sample(batch, rows, np.full(rows.size, step))
            made.append(int(sampled.token_ids[-1]))
        return made

    alone = run(0, 0)
    assert run(5, 3) == alone
    assert run(2, 7, moves_at=9) == alone
    assert len(set(alone)) > 10


def test_logprobs_are_those_of_the_model_whatever_the_sampling_does() -> None:
    logits = random_logits(3, 5)
    sampler = Sampler(8, VOCAB)
    sampler.start(0, SamplingParams(temperature=0.0), np.array([1]), 1)
    odd = SamplingParams(temperature=2.0, logprobs=True, top_logprobs=4, logit_bias={7: 100.0}, top_k=1)
    sampler.start(1, odd, np.array([1]), 1)
    sampler.start(2, SamplingParams(temperature=0.0, logprobs=True), np.array([1]), 1)
    sampled = sampler.sample(logits.clone(), np.array([0, 1, 2]), np.zeros(3, np.int64))
    expected = torch.log_softmax(logits.double(), -1)
    assert sorted(sampled.logprobs) == [1, 2]
    logprob, rank, ids, values = sampled.logprobs[1]
    assert int(sampled.token_ids[1]) == 7
    assert logprob == pytest.approx(float(expected[1, 7]), abs=1e-4)
    assert rank == int((expected[1] > expected[1, 7]).sum()) + 1
    assert ids == expected[1].topk(4).indices.tolist()
    assert values == pytest.approx(expected[1].topk(4).values.tolist(), abs=1e-4)
    assert sampled.logprobs[2][1:] == (1, [], [])


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 400}, {"min_p": 1e-6}, {"top_p": 0.999, "min_p": 1e-4}])
def test_a_flat_distribution_needs_more_than_the_first_look(params: dict[str, Any]) -> None:
    logits = random_logits(1, 3, spread=0.05)
    sampler = Sampler(1, VOCAB)
    drawn = set()
    for position in range(200):
        full = SamplingParams(temperature=1.0, seed=position, **params)
        sampler.start(0, full, np.array([1]), 1)
        token = int(sampler.sample(logits.clone(), np.array([0]), np.array([0])).token_ids[0])
        expected, border = reference_token(logits[0], full, [1], [])
        assert token == expected or border < 1e-5
        drawn.add(token)
    assert len(drawn) > 100


def test_a_tiny_temperature_is_greedy_and_not_nan() -> None:
    logits = random_logits(2, 8)
    sampler = Sampler(2, VOCAB)
    for row, temperature in ((0, 1e-30), (1, 1e-6)):
        sampler.start(row, SamplingParams(temperature=temperature, seed=row), np.array([1]), 1)
    sampled = sampler.sample(logits.clone(), np.array([0, 1]), np.zeros(2, np.int64))
    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()


def test_philox_gives_the_published_vectors() -> None:
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in vectors:
        words = tuple(np.array([word], np.uint64) for word in counter)
        made = philox(words, (np.array([key[0]], np.uint64), np.array([key[1]], np.uint64)))  # type: ignore[arg-type]
        assert tuple(int(word[0]) for word in made) == expected


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_torch_draws_the_same_bits_as_numpy(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in pairs], np.uint64)
    positions = np.array([position for _, position in pairs])
    expected = uniform(seeds, positions)
    made = uniform_torch(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(made.numpy(), expected)
    assert ((expected >= 0) & (expected < 1)).all()


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_draws_of_another_purpose_are_others_and_alike_in_numpy_and_torch(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in pairs], np.uint64)
    positions = np.array([position for _, position in pairs])
    drawn = [uniform(seeds, positions, purpose) for purpose in range(3)]
    for purpose, numbers in enumerate(drawn):
        by_torch = uniform_torch(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions), purpose)
        assert by_torch.tolist() == numbers.tolist()
    assert (drawn[0] != drawn[1]).all()
    assert (drawn[1] != drawn[2]).all()
    assert uniform(seeds, positions).tolist() == drawn[PURPOSE_SAMPLE].tolist()
