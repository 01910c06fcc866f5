"""Sampling parameters and hand-over state as the engine sees them (torch-free)."""

from typing import Literal

import msgspec

GrammarKind = Literal["json_object", "json_schema", "lark"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on the output; `digest` names it in a RequestState."""

    kind: GrammarKind
    text: str
    digest: str


class SamplingParams(msgspec.Struct, kw_only=True):
    """Validated by the gateway; defaults mean "off"."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens, as in HF transformers."""
    presence_penalty: float = 0.0
    """Over output tokens."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: list[int] = []
    """Includes the model's eos tokens unless the request ignores them."""
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: GrammarSpec | None = None


class RequestState(msgspec.Struct, kw_only=True):
    """All that a request needs to go on elsewhere, beside its KV; mirrors tidemill.mesh.v1.RequestState, version 1."""

    version: int = 1
    prompt_tokens: int
    committed_token_ids: list[int]
    """Prompt, then output."""
    pending_token_id: int
    """Last sampled token, whose KV is not computed; -1: none."""
    computed_tokens: int
    """Tokens whose KV (and sequence state) is complete."""
    sampler_position: int
    """Next position of the counter-based generator: output tokens sampled so far."""
    seed: int
    grammar_digest: str = ""
    grammar_consumed_token_ids: list[int] = []
    drafter: bytes = b""
    rounded_kv: bool = False
    """Its KV was once held in a less precise type than its pool's: good for this request, not for others."""
