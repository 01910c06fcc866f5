"""Sampling parameters of the runner's rows as arrays, so that a step picks its rows by index."""

import numpy as np

from tidemill_engine.sampling_params import SamplingParams


class SamplingRows:
    """Struct of arrays over all rows; set when a request enters a row."""

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.min_p = np.zeros(num_rows, np.float32)
        self.repetition = np.ones(num_rows, np.float32)
        self.presence = np.zeros(num_rows, np.float32)
        self.frequency = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.logprobs = np.zeros(num_rows, bool)
        self.top_logprobs = np.zeros(num_rows, np.int64)
        self.stop_ids: list[np.ndarray] = [_NO_IDS] * num_rows
        self.bias_ids: list[np.ndarray] = [_NO_IDS] * num_rows
        self.bias_values: list[np.ndarray] = [_NO_VALUES] * num_rows
        self.has_bias = np.zeros(num_rows, bool)

    def set(self, row: int, params: SamplingParams, vocab_size: int) -> None:
        """Token ids outside the vocabulary have no logit and are left out."""
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k if 0 < params.top_k < vocab_size else 0
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.seed[row] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.min_tokens[row] = params.min_tokens
        self.logprobs[row] = params.logprobs
        self.top_logprobs[row] = min(params.top_logprobs, vocab_size)
        self.stop_ids[row] = np.array([t for t in params.stop_token_ids if 0 <= t < vocab_size], np.int64)
        bias = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
        self.bias_ids[row] = np.fromiter(bias.keys(), np.int64)
        self.bias_values[row] = np.fromiter(bias.values(), np.float32)
        self.has_bias[row] = bool(bias)

    def has_penalty(self, rows: np.ndarray) -> np.ndarray:
        """[rows] bool."""
        penalised: np.ndarray = (self.repetition[rows] != 1) | (self.presence[rows] != 0) | (self.frequency[rows] != 0)
        return penalised


_NO_IDS = np.zeros(0, np.int64)
_NO_VALUES = np.zeros(0, np.float32)
