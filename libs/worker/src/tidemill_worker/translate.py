"""Between the mesh's protobuf and the engine's messages; the only file that knows both shapes of a request."""

import numpy as np

from tidemill.mesh.v1 import common_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_engine.sampling_params import GrammarKind, GrammarSpec, RequestState, SamplingParams
from tidemill_kvcache.hashing import join_hashes
from tidemill_mesh.errors import MeshError, code_from_name, code_name

REQUEST_STATE_VERSION = 1

STAGES: dict[int, messages.Stage] = {
    worker_pb2.Submit.STAGE_PREFILL: "prefill",
    worker_pb2.Submit.STAGE_DECODE: "decode",
    worker_pb2.Submit.STAGE_WHOLE: "whole",
}
FINISHES: dict[messages.FinishReason, "worker_pb2.Finish.ValueType"] = {
    "stop": worker_pb2.FINISH_STOP,
    "length": worker_pb2.FINISH_LENGTH,
    "prefilled": worker_pb2.FINISH_PREFILLED,
    "aborted": worker_pb2.FINISH_ABORTED,
    "error": worker_pb2.FINISH_ERROR,
}
GRAMMARS: dict[int, GrammarKind] = {
    worker_pb2.Grammar.KIND_JSON_OBJECT: "json_object",
    worker_pb2.Grammar.KIND_JSON_SCHEMA: "json_schema",
    worker_pb2.Grammar.KIND_LARK: "lark",
}


def to_key(key: worker_pb2.RequestKey) -> messages.RequestKey:
    """The engine's key."""
    return messages.RequestKey(key.request_id, key.choice, key.attempt)


def from_key(key: messages.RequestKey) -> worker_pb2.RequestKey:
    """The mesh's key."""
    return worker_pb2.RequestKey(request_id=key.request_id, choice=key.choice, attempt=key.attempt)


def to_tokens(packed: bytes, field: str) -> list[int]:
    """Token ids from uint32 little endian."""
    if len(packed) % 4:
        raise invalid(f"{len(packed)} bytes are no whole number of token ids", field)
    tokens: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return tokens


def from_tokens(tokens: list[int]) -> bytes:
    """uint32 little endian."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def invalid(message: str, field: str) -> MeshError:
    """An INVALID_ARGUMENT that names a field."""
    return MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=field)


def to_sampling(sampling: worker_pb2.Sampling) -> SamplingParams:
    """The engine's sampling parameters; the gateway has validated the values."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        grammar=to_grammar(sampling.grammar) if sampling.HasField("grammar") else None,
    )


def to_grammar(grammar: worker_pb2.Grammar) -> GrammarSpec:
    """The engine's constraint; UNSUPPORTED for a kind that this worker does not know."""
    kind = GRAMMARS.get(grammar.kind)
    if kind is None:
        raise MeshError(
            errors_pb2.ERROR_CODE_UNSUPPORTED, f"grammar kind {grammar.kind} is not known", field="sampling.grammar"
        )
    return GrammarSpec(kind=kind, text=grammar.text, digest=grammar.digest)


def to_submit(
    submit: worker_pb2.Submit, *, hash_salt: bytes, hold_s: float, default_slo_ttft_s: float, default_slo_tpot_s: float
) -> messages.Submit:
    """The engine's submit; INVALID_ARGUMENT names the field that is wrong."""
    stage = STAGES.get(submit.stage)
    if stage is None:
        raise invalid(f"stage {submit.stage} is not known", "stage")
    tokens = to_tokens(submit.token_ids, "token_ids")
    if not tokens:
        raise invalid("a request needs at least one token", "token_ids")
    if not 0 < submit.prompt_tokens <= len(tokens):
        raise invalid(f"prompt_tokens is {submit.prompt_tokens} of {len(tokens)} tokens", "prompt_tokens")
    if submit.credit_tokens < 1:
        raise invalid("a request starts with credit for at least one token", "credit_tokens")
    if not submit.deadline_s > 0:
        raise invalid("a request has a deadline", "deadline_s")
    return messages.Submit(
        key=to_key(submit.key),
        stage=stage,
        token_ids=tokens,
        prompt_tokens=submit.prompt_tokens,
        sampling=to_sampling(submit.sampling),
        hash_salt=hash_salt,
        tenant=submit.tenant,
        tenant_weight=submit.tenant_weight or 1.0,
        priority=submit.priority,
        deadline_s=submit.deadline_s,
        credit_tokens=submit.credit_tokens,
        slo_ttft_s=submit.slo_ttft_s or default_slo_ttft_s,
        slo_tpot_s=submit.slo_tpot_s or default_slo_tpot_s,
        hold_s=hold_s,
    )


def from_output(output: messages.Output) -> worker_pb2.Output:
    """One request's part of a step."""
    sent = worker_pb2.Output(
        key=from_key(output.key),
        first_position=output.first_position,
        token_ids=output.token_ids,
        logprobs=[from_logprobs(item) for item in output.logprobs],
        finish=FINISHES[output.finish] if output.finish else worker_pb2.FINISH_UNSPECIFIED,
        queue_s=output.queue_s,
    )
    if output.error is not None:
        sent.error.CopyFrom(from_error(output.error))
    if output.cached_l1 >= 0:
        sent.cached.CopyFrom(common_pb2.TierTokens(l1=output.cached_l1, l2=output.cached_l2, l3=output.cached_l3))
    return sent


def from_logprobs(item: messages.TokenLogprobs) -> worker_pb2.Logprobs:
    """One token's log probabilities."""
    return worker_pb2.Logprobs(
        logprob=item.logprob, rank=item.rank, top_token_ids=item.top_token_ids, top_logprobs=item.top_logprobs
    )


def failed_output(key: messages.RequestKey, error: MeshError) -> worker_pb2.Output:
    """The last output of a stage that failed."""
    return worker_pb2.Output(key=from_key(key), finish=worker_pb2.FINISH_ERROR, error=error.to_detail())


def from_error(error: messages.EngineError) -> errors_pb2.ErrorDetail:
    """The error that travels; a code that this version does not know becomes INTERNAL and keeps its name."""
    return to_mesh_error(error).to_detail()


def to_mesh_error(error: messages.EngineError) -> MeshError:
    """An engine's error as the service's own."""
    try:
        code = code_from_name(error.code)
    except ValueError:
        code = errors_pb2.ERROR_CODE_INTERNAL
        return MeshError(code, f"{error.code}: {error.message}", field=error.field, limit=error.limit)
    return MeshError(code, error.message, field=error.field, limit=error.limit)


def to_engine_error(error: MeshError) -> messages.EngineError:
    """A service's error as the engine's."""
    return messages.EngineError(code_name(error.code), error.message, error.field, error.limit)


def from_state(
    key: messages.RequestKey, state: RequestState, kv_format: str, block_size: int, block_hashes: list[bytes]
) -> worker_pb2.RequestState:
    """The state that travels at a hand-over."""
    return worker_pb2.RequestState(
        version=state.version,
        key=from_key(key),
        prompt_tokens=state.prompt_tokens,
        committed_token_ids=from_tokens(state.committed_token_ids),
        pending_token_id=state.pending_token_id,
        computed_tokens=state.computed_tokens,
        sampler=worker_pb2.SamplerState(
            position=state.sampler_position, seed=state.seed, emitted_tokens=state.sampler_position
        ),
        constraint=worker_pb2.ConstraintState(
            grammar_digest=state.grammar_digest,
            consumed_token_ids=from_tokens(state.grammar_consumed_token_ids),
        ),
        kv=worker_pb2.KVManifest(
            kv_format=kv_format,
            block_size=block_size,
            block_hashes=join_hashes(block_hashes),
            tail_tokens=state.computed_tokens % block_size,
        ),
        drafter=state.drafter,
        rounded_kv=state.rounded_kv,
    )


def to_state(state: worker_pb2.RequestState) -> RequestState:
    """The engine's state; UNSUPPORTED for a version that this worker does not know."""
    if state.version != REQUEST_STATE_VERSION:
        raise MeshError(
            errors_pb2.ERROR_CODE_UNSUPPORTED,
            f"request state version {state.version} is not known",
            field="state.version",
            limit=f"version {REQUEST_STATE_VERSION}",
        )
    return RequestState(
        version=state.version,
        prompt_tokens=state.prompt_tokens,
        committed_token_ids=to_tokens(state.committed_token_ids, "state.committed_token_ids"),
        pending_token_id=state.pending_token_id,
        computed_tokens=state.computed_tokens,
        sampler_position=state.sampler.position,
        seed=state.sampler.seed,
        grammar_digest=state.constraint.grammar_digest,
        grammar_consumed_token_ids=to_tokens(state.constraint.consumed_token_ids, "state.constraint"),
        drafter=state.drafter,
        rounded_kv=state.rounded_kv,
    )
