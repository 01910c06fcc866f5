"""Batch-invariant: a request that goes on by recompute says bit for bit what it would have said had it stayed.

What goes on elsewhere is what the mesh hands over when KV is lost: the prompt, the tokens that were emitted, and the
sampling parameters. Engines serve others beside it, so that no batch is like the one before.
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import json
import random
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
pytest.importorskip("flashinfer")

from gpu.driver import prompt
from gpu.test_gpu_engine import CUDA, SHAPE, settings
from tokenizers import Tokenizer

from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.engine import Engine
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.smollm2 import convert
from tidemill_engine.loading.tiny import make_tiny
from tidemill_engine.messages import Abort, FinishReason, Output, RequestKey, ResetCache, Submit, TokenLogprobs
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.sampling_params import GrammarSpec, SamplingParams
from tidemill_engine.settings import EngineSettings

TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"
LENGTH = 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 60}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
LARK = GrammarSpec("lark", 'start: "x" /[a-f]{30,60}/ "y"', "lark")
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA), "schema")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with logprobs": {"temperature": 0.0, **LOGPROBS},
    "greedy with penalties": {"temperature": 0.0, **PENALTIES, "logit_bias": {5: 2.0}},
    "greedy schema": {"temperature": 0.0, **LOGPROBS, "grammar": JSON},
    "drawn by temperature": {"temperature": 0.9, "seed": 11},
    "sampled": SAMPLED,
    "another seed": {**SAMPLED, "seed": 12, "min_tokens": 20},
    "sampled with all": {**SAMPLED, **PENALTIES, **LOGPROBS, "min_p": 0.01, "logit_bias": {7: 1.5}},
    "sampled grammar": {**SAMPLED, **LOGPROBS, "grammar": LARK},
    "sampled schema with penalties": {**SAMPLED, **PENALTIES, **LOGPROBS, "grammar": JSON},
}
MODELS = ["llama", "qwen3", pytest.param("smollm2", marks=pytest.mark.real_model)]


class Service:
    """An engine and what it said of each request."""

    def __init__(self, fields: EngineSettings, runner: ModelRunner) -> None:
        self.engine = Engine(fields, runner)
        self.outputs: dict[RequestKey, list[Output]] = {}

    def submit(self, key: RequestKey, token_ids: list[int], prompt_tokens: int, sampling: SamplingParams) -> None:
        self.engine.handle(
            Submit(
                key=key, stage="whole", token_ids=token_ids, prompt_tokens=prompt_tokens, sampling=sampling,
                hash_salt=bytes(16),
            )
        )  # fmt: skip

    def step(self) -> bool:
        """False when there was nothing to do."""
        worked, reports = self.engine.step()
        for report in reports:
            for output in getattr(report, "outputs", ()):
                assert output.error is None, output.error
                self.outputs.setdefault(output.key, []).append(output)
        return worked

    def run(self) -> None:
        while self.step():
            pass


Said = tuple[list[int], list[TokenLogprobs], FinishReason | None]


def said(services: list[Service], key: RequestKey) -> Said:
    """Tokens of all attempts by their positions, none missing and none twice, their logprobs, and the end."""
    outputs = [output for service in services for output in service.outputs.get(key, [])]
    outputs.sort(key=lambda output: (output.first_position, bool(output.finish)))
    tokens: list[int] = []
    for output in outputs:
        assert output.first_position == len(tokens) or not output.token_ids, "a gap or a repeat"
        tokens += output.token_ids
    ends = [output.finish for output in outputs if output.finish not in (None, "aborted")]
    return tokens, [entry for output in outputs for entry in output.logprobs], ends[0] if ends else None


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / request.param
    if request.param != "smollm2":
        return make_tiny(request.param, out, **SHAPE)
    try:
        return convert(out)
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def services(folder: Path) -> list[Service]:
    """Two engines; each test resets their caches."""
    return [make_service(folder) for _ in range(2)]


def make_service(folder: Path, **options: Any) -> Service:
    fields = msgspec.structs.replace(settings(folder, **CUDA, batch_invariant=True, max_num_seqs=8), **options)
    return Service(fields, make_runner(fields))


def make_runner(fields: EngineSettings) -> ModelRunner:
    return CudaModelRunner(fields, TensorParallel())


def prompt_of(folder: Path) -> list[int]:
    """75 tokens of text."""
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text("utf-8")).ids
    return ids[:75]


def sampling_of(folder: Path, name: str, **more: Any) -> SamplingParams:
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return SamplingParams(max_tokens=LENGTH, stop_token_ids=[eos], **SAMPLINGS[name], **more)


def stayed(services: list[Service], token_ids: list[int], sampling: SamplingParams) -> Said:
    """What the request says alone in an engine."""
    key = RequestKey("stayed")
    for service in services:
        service.run()
        service.outputs.clear()
        service.engine.handle(ResetCache())
    services[0].submit(key, token_ids, len(token_ids), sampling)
    services[0].run()
    result = said(services, key)
    services[0].outputs.clear()
    services[0].engine.handle(ResetCache())
    return result


def wander(services: list[Service], token_ids: list[int], sampling: SamplingParams, rng: random.Random) -> RequestKey:
    """Moves the request between the engines at random tokens; its blocks are sometimes found there and mostly not."""
    key, here, moves = RequestKey("moved"), 0, 0
    for index, service in enumerate(services):
        for mate in range(3):
            mate_ids = prompt(20 + 31 * mate, seed=index + 5 * mate)
            mate_sampling = SamplingParams(temperature=0.7 * (mate % 2), seed=mate, max_tokens=90, logprobs=mate == 2)
            service.submit(RequestKey(f"mate {index} {mate}"), mate_ids, len(mate_ids), mate_sampling)
    services[0].submit(key, token_ids, len(token_ids), sampling)
    while True:
        for _ in range(rng.randint(3, 9)):
            for service in services:
                service.step()
        tokens, _, finish = said(services, key)
        if finish is not None:
            assert moves >= max(1, len(tokens) // 20)
            return key
        if tokens:
            services[here].engine.handle(Abort(key))
            services[here].step()
            here, moves = 1 - here, moves + 1
            if rng.random() < 0.7:
                services[here].engine.handle(ResetCache())
            services[here].submit(key, token_ids + said(services, key)[0], len(token_ids), sampling)


@pytest.mark.parametrize("folder", MODELS, indirect=True)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_moves_by_recompute_change_nothing(services: list[Service], folder: Path, name: str) -> None:
    token_ids, sampling = prompt_of(folder), sampling_of(folder, name)
    expected = stayed(services, token_ids, sampling)
    assert len(expected[0]) >= 12
    key = wander(services, token_ids, sampling, random.Random(len(name)))
    assert said(services, key) == expected


@pytest.mark.parametrize("folder", MODELS, indirect=True)
def test_a_stop_token_after_a_move_ends_it_where_it_would_have_ended(services: list[Service], folder: Path) -> None:
    token_ids = prompt_of(folder)
    plain = sampling_of(folder, "sampled", min_tokens=20)
    free, _, _ = stayed(services, token_ids, plain)
    # A stop token is masked before min_tokens, which may change what follows.
    for token in free[22:]:
        sampling = msgspec.structs.replace(plain, stop_token_ids=[*plain.stop_token_ids, token])
        expected = stayed(services, token_ids, sampling)
        if expected[2] == "stop":
            break
    assert len(expected[0]) > 20
    assert expected[0][-1] == token
    assert said(services, wander(services, token_ids, sampling, random.Random(1))) == expected


@pytest.mark.parametrize("folder", MODELS, indirect=True)
def test_a_stop_string_that_has_begun_before_a_move_is_found_after_it(services: list[Service], folder: Path) -> None:
    """The gateway's text goes on over the attempts; the move comes while it holds a part of the stop string back."""
    pytest.importorskip("tidemill.mesh.v1.worker_pb2")
    from tidemill_gateway.text.choice_text import ChoiceText
    from tidemill_gateway.text.token_bytes import TokenBytes

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_bytes = TokenBytes(tokenizer)
    # Letters only: random weights say bytes that are no text.
    letters = {tokenizer.token_to_id(letter): 30.0 for letter in string.ascii_letters}
    sampling = sampling_of(folder, "sampled with all", min_tokens=LENGTH)
    sampling = msgspec.structs.replace(sampling, logit_bias=letters)
    token_ids = prompt_of(folder)
    free, logprobs, _ = stayed(services, token_ids, sampling)
    assert len(logprobs) == len(free) == LENGTH
    stop = ChoiceText(token_bytes, [], []).push(free[20:26], []).text
    assert len(stop) >= 6

    def shown(cut: int, tail: list[int]) -> tuple[str, list[int], str]:
        text = ChoiceText(token_bytes, [stop], [])
        deltas = [text.push(part, []) for part in (free[:cut], tail)]
        return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], deltas[-1].stop_string

    expected = shown(20, free[20:])
    assert expected[2] == stop
    for cut in (21, 23, 25):
        held = ChoiceText(token_bytes, [stop], []).push(free[:cut], []).token_ids
        assert len(held) < cut, "a part of the stop string is held back at the move"
        services[1].engine.handle(ResetCache())
        key = RequestKey(f"cut {cut}")
        services[1].submit(key, [*token_ids, *free[:cut]], len(token_ids), sampling)
        services[1].run()
        tail = [token for output in services[1].outputs[key] for token in output.token_ids]
        assert shown(cut, tail) == expected
        assert [entry for output in services[1].outputs[key] for entry in output.logprobs] == logprobs[cut:]


@pytest.mark.parametrize("folder", MODELS, indirect=True)
@pytest.mark.parametrize("budget", [64, 512])
def test_preemption_changes_nothing_of_any_way_of_sampling(folder: Path, budget: int) -> None:
    """The same requests, one for each way of sampling, with room for all and with room for half."""
    prompts = [prompt(length, seed=length) for length in (75, 130, 33, 64, 96, 20, 48, 17, 81, 110)]
    need = sum(-(-(len(token_ids) + LENGTH) // 16) for token_ids in prompts)
    results: list[list[Said]] = []
    preemptions: list[int] = []
    for num_blocks in (2 * need, need // 3):
        service = make_service(
            folder, num_blocks=num_blocks, admission_headroom_tokens=1, max_num_batched_tokens=budget
        )
        keys = [RequestKey(name) for name in SAMPLINGS]
        for key, token_ids, name in zip(keys, prompts, SAMPLINGS, strict=True):
            service.submit(key, token_ids, len(token_ids), sampling_of(folder, name))
        service.run()
        results.append([said([service], key) for key in keys])
        preemptions.append(service.engine.scheduler.load_sample().preemptions_total)
    assert preemptions[0] == 0
    assert preemptions[1] >= 3
    assert results[0] == results[1]
