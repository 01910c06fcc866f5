"""Between protobuf and the engine's messages nothing is lost."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_engine.sampling_params import RequestState, SamplingParams
from tidemill_mesh.errors import MeshError
from tidemill_worker import translate

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=20)
SEEDS = st.integers(-(1 << 63), (1 << 63) - 1)
KEYS = st.builds(messages.RequestKey, st.text(max_size=20), st.integers(0, 99), st.integers(0, 99))


def submit(**changes: object) -> worker_pb2.Submit:
    """A correct submit, changed."""
    fields: dict[str, object] = {
        "key": worker_pb2.RequestKey(request_id="r", choice=1, attempt=2),
        "stage": worker_pb2.Submit.STAGE_WHOLE,
        "token_ids": translate.from_tokens([1, 2, 3]),
        "prompt_tokens": 2,
        "credit_tokens": 5,
        "deadline_s": 9.0,
    }
    return worker_pb2.Submit(**(fields | changes))


def to_engine(message: worker_pb2.Submit) -> messages.Submit:
    """The engine's form with fixed defaults."""
    return translate.to_submit(message, hash_salt=b"salt", hold_s=4.0, default_slo_ttft_s=1.0, default_slo_tpot_s=0.1)


@given(KEYS)
def test_keys_survive_the_round_trip(key: messages.RequestKey) -> None:
    assert translate.to_key(translate.from_key(key)) == key


@given(TOKENS)
def test_tokens_survive_the_round_trip(tokens: list[int]) -> None:
    assert translate.to_tokens(translate.from_tokens(tokens), "token_ids") == tokens


@given(
    st.builds(
        RequestState,
        prompt_tokens=st.integers(1, 1000),
        committed_token_ids=TOKENS,
        pending_token_id=st.integers(-1, 1 << 31),
        computed_tokens=st.integers(0, 1000),
        sampler_position=st.integers(0, (1 << 31) - 1),
        seed=SEEDS,
        grammar_digest=st.text(max_size=10),
        grammar_consumed_token_ids=TOKENS,
        drafter=st.binary(max_size=10),
        rounded_kv=st.booleans(),
    ),
    KEYS,
)
def test_request_states_survive_the_round_trip(state: RequestState, key: messages.RequestKey) -> None:
    sent = translate.from_state(key, state, "v1/b32/kv", 32, [b"h" * 16])
    arrived = worker_pb2.RequestState.FromString(sent.SerializeToString())
    assert translate.to_state(arrived) == state
    assert arrived.kv.tail_tokens == state.computed_tokens % 32


def test_a_request_state_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(MeshError) as raised:
        translate.to_state(worker_pb2.RequestState(version=2))
    assert raised.value.code == errors_pb2.ERROR_CODE_UNSUPPORTED
    assert raised.value.field == "state.version"


@given(
    max_tokens=st.integers(1, 1 << 20),
    top_k=st.integers(0, 1 << 20),
    seed=SEEDS,
    bias=st.dictionaries(st.integers(0, 1 << 20), st.floats(-100, 100, width=32), max_size=4),
    stop=TOKENS,
    probabilities=st.lists(st.floats(0, 2, width=32), min_size=6, max_size=6),
)
def test_every_sampling_parameter_arrives(
    max_tokens: int, top_k: int, seed: int, bias: dict[int, float], stop: list[int], probabilities: list[float]
) -> None:
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    values = dict(zip(floats, probabilities, strict=True)) | {
        "max_tokens": max_tokens,
        "min_tokens": 1,
        "top_k": top_k,
        "seed": seed,
        "logit_bias": bias,
        "stop_token_ids": stop,
        "logprobs": True,
        "top_logprobs": 5,
    }
    made = translate.to_sampling(worker_pb2.Sampling(**values))
    assert msgspec.to_builtins(made) == msgspec.to_builtins(SamplingParams(**values))  # type: ignore[arg-type]


def test_grammars_keep_their_kind_and_unknown_kinds_are_unsupported() -> None:
    grammar = worker_pb2.Grammar(kind=worker_pb2.Grammar.KIND_JSON_SCHEMA, text="{}", digest="d")
    made = translate.to_sampling(worker_pb2.Sampling(grammar=grammar)).grammar
    assert made is not None
    assert (made.kind, made.text, made.digest) == ("json_schema", "{}", "d")
    with pytest.raises(MeshError) as raised:
        translate.to_grammar(worker_pb2.Grammar(kind=99))  # type: ignore[arg-type]
    assert raised.value.field == "sampling.grammar"


def test_a_submit_keeps_its_parts_and_gets_the_default_targets() -> None:
    made = to_engine(submit(priority=3, tenant="t", slo_tpot_s=0.5))
    assert made.key == messages.RequestKey("r", 1, 2)
    assert (made.stage, made.token_ids, made.prompt_tokens) == ("whole", [1, 2, 3], 2)
    assert (made.hash_salt, made.hold_s, made.credit_tokens, made.priority, made.tenant) == (b"salt", 4.0, 5, 3, "t")
    assert (made.slo_ttft_s, made.slo_tpot_s) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stage": 0}, "stage"),
        ({"token_ids": b"123"}, "token_ids"),
        ({"token_ids": b""}, "token_ids"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 4}, "prompt_tokens"),
        ({"credit_tokens": 0}, "credit_tokens"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
    ],
)
def test_a_wrong_submit_is_refused_by_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(MeshError) as raised:
        to_engine(submit(**changes))
    assert raised.value.code == errors_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert raised.value.field == field


def test_outputs_keep_tokens_logprobs_finish_and_cached_tokens() -> None:
    output = messages.Output(
        key=messages.RequestKey("r"),
        first_position=3,
        token_ids=[7, 8],
        logprobs=[messages.TokenLogprobs(-0.5, 1, [7], [-0.5]), messages.TokenLogprobs(-2.0, 4, [1], [-0.25])],
        finish="length",
        cached_l1=32,
        cached_l3=64,
        queue_s=0.25,
    )
    sent = translate.from_output(output)
    assert (sent.first_position, list(sent.token_ids), sent.finish) == (3, [7, 8], worker_pb2.FINISH_LENGTH)
    assert [(item.logprob, item.rank) for item in sent.logprobs] == [(-0.5, 1), (-2.0, 4)]
    assert (sent.cached.l1, sent.cached.l3, sent.queue_s) == (32, 64, 0.25)


def test_an_output_without_cached_tokens_says_nothing_of_them() -> None:
    sent = translate.from_output(messages.Output(key=messages.RequestKey("r"), first_position=0))
    assert not sent.HasField("cached")
    assert not sent.HasField("error")


def test_errors_keep_their_code_and_unknown_codes_become_internal() -> None:
    known = translate.from_error(messages.EngineError("CONTEXT_TOO_LONG", "too long", "token_ids", "8 tokens"))
    assert known.code == errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG
    assert (known.message, known.field, known.limit) == ("too long", "token_ids", "8 tokens")
    unknown = translate.from_error(messages.EngineError("NEW_CODE", "what"))
    assert unknown.code == errors_pb2.ERROR_CODE_INTERNAL
    assert "NEW_CODE" in unknown.message
