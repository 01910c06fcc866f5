"""From a request to a plan: checked, tokenised, hashed, with every default filled in."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.mesh.v1.worker_pb2 import Grammar, Sampling
from tidemill_gateway.flow.plan import ChoicePlan, choice_seed, pack_tokens
from tidemill_gateway.grammar import grammar_of
from tidemill_gateway.models.served_model import ServedModel
from tidemill_gateway.spec import GenerationSpec, SamplingSpec, Tool
from tidemill_gateway.validation import (
    ModelLimits,
    check_against_model,
    check_token_ids,
    invalid,
    new_seed,
    resolve_max_tokens,
    too_long,
    with_generation_defaults,
)
from tidemill_kvcache.hashing import chain_root, hash_blocks, join_hashes, tenant_salt

INLINE_TOKENS = 16384
"""Longer prompts are hashed on a thread."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run on one revision of its model."""

    spec: GenerationSpec
    model: ServedModel
    choices: tuple[ChoicePlan, ...]
    prompt_tokens: int
    """Of all prompts."""
    stop_token_ids: frozenset[int]


async def prepare(
    spec: GenerationSpec, model: ServedModel, limits: ModelLimits, salt: bytes, default_max_tokens: int
) -> Prepared:
    """Turns a request that passed `check_request` into plans of its choices; its spec loses the input."""
    check_against_model(spec, limits)
    grammar = grammar_of(spec)
    prompts = await _tokenise(spec, model, limits)
    sampling = with_generation_defaults(spec.sampling, model.defaults)
    stop_token_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids.update(model.card.eos_token_ids)
    seed = new_seed() if sampling.seed is None else sampling.seed
    root = chain_root(model.card.hash_root, salt)
    n = sampling.n or 1
    choices = []
    for i, prompt in enumerate(prompts):
        max_tokens = resolve_max_tokens(spec, len(prompt), limits, default_max_tokens)
        _check_min_tokens(spec, sampling, max_tokens)
        packed, hashes = await _pack(prompt, root, model.card.block_size)
        for index in range(i * n, (i + 1) * n):
            own = _sampling(sampling, max_tokens, choice_seed(seed, index), stop_token_ids, grammar)
            choices.append(ChoicePlan(index, packed, len(prompt), hashes, own))
    _forget_input(spec)
    return Prepared(spec, model, tuple(choices), sum(map(len, prompts)), frozenset(stop_token_ids))


def _forget_input(spec: GenerationSpec) -> None:
    """A request may run for an hour, and its bytes count no more: of what was read it keeps what its answer needs."""
    spec.chat, spec.prompts, spec.json_schema = None, [], ""
    spec.tools = [] if spec.tool_mode == "none" else [Tool(tool.name) for tool in spec.tools]
    if spec.tool_mode != "named":
        spec.tool_name = ""


def request_salt(cache_secret: bytes, tenant: str) -> bytes:
    """The tenant's part of the block-hash chain."""
    return tenant_salt(cache_secret, tenant)


async def _tokenise(spec: GenerationSpec, model: ServedModel, limits: ModelLimits) -> list[list[int]]:
    if spec.chat is not None:
        tools = spec.tools if spec.tool_mode != "none" else []
        text = model.chat_prompt(spec.chat, tools)
        prompts = [await _encode(spec, text, model, limits, add_special_tokens=False)]
    else:
        prompts = [await _prompt_tokens(spec, prompt, model, limits) for prompt in spec.prompts]
    if not all(prompts):
        raise invalid(spec.prompt_field, "a prompt has no tokens")
    return prompts


async def _prompt_tokens(
    spec: GenerationSpec, prompt: str | list[int], model: ServedModel, limits: ModelLimits
) -> list[int]:
    if isinstance(prompt, str):
        return await _encode(spec, prompt, model, limits, add_special_tokens=True)
    if len(prompt) <= limits.context_tokens:
        check_token_ids(spec.prompt_field, prompt, limits.vocab_size)
    return prompt


async def _encode(
    spec: GenerationSpec, text: str, model: ServedModel, limits: ModelLimits, *, add_special_tokens: bool
) -> list[int]:
    space = limits.context_tokens
    ids = await model.encode_within(text, space, add_special_tokens=add_special_tokens)
    if ids is None:
        message = f"the prompt has more tokens than the {space} that the context of {limits.name} holds"
        raise too_long(spec.prompt_field, message, space)
    return ids


def _check_min_tokens(spec: GenerationSpec, sampling: SamplingSpec, max_tokens: int) -> None:
    if (sampling.min_tokens or 0) > max_tokens:
        raise invalid(f"{spec.sampling_prefix}min_tokens", "must not be above max_tokens", f"{max_tokens} tokens")


async def _pack(prompt: Sequence[int], root: bytes, block_size: int) -> tuple[bytes, bytes]:
    def work() -> tuple[bytes, bytes]:
        packed = pack_tokens(prompt)
        return packed, join_hashes(hash_blocks(root, np.frombuffer(packed, dtype="<u4"), block_size))

    return work() if len(prompt) <= INLINE_TOKENS else await asyncio.to_thread(work)


def _sampling(
    spec: SamplingSpec, max_tokens: int, seed: int, stop_token_ids: set[int], grammar: Grammar | None
) -> Sampling:
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=spec.min_tokens or 0,
        temperature=_or(spec.temperature, 1.0),
        top_p=_or(spec.top_p, 1.0),
        top_k=max(0, spec.top_k or 0),
        min_p=spec.min_p or 0.0,
        repetition_penalty=_or(spec.repetition_penalty, 1.0),
        presence_penalty=spec.presence_penalty or 0.0,
        frequency_penalty=spec.frequency_penalty or 0.0,
        logit_bias=spec.logit_bias,
        seed=seed,
        stop_token_ids=sorted(stop_token_ids),
        logprobs=spec.logprobs,
        top_logprobs=spec.top_logprobs,
    )
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)
    return sampling


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
