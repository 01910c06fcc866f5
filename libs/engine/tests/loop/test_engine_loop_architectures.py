"""The whole engine on latents, indexers and compressed streams: hits, preemption and hand-over say what transformers
says. Where they stay on one machine with the same chunk borders, KV and tokens are the same bit for bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.oracle_checkpoints import make_oracle
from transformers import AutoModelForCausalLM

from tidemill_engine.engine import Engine
from tidemill_engine.messages import ExportState, KVReady
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.settings import EngineSettings

ARCHITECTURES = [
    "deepseek_v4",
    pytest.param("glm_moe_dsa", marks=pytest.mark.full),
    pytest.param("deepseek_v3", marks=pytest.mark.full),
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": True}
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (130, 75, 33, 96)]
LOGPROB_BOUND = 1e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("oracles")

    def folder(name: str) -> Path:
        return root / name if (root / name).exists() else make_oracle(name, root / name)

    return folder


@pytest.fixture
def start(folders: Callable[[str], Path], engine_driver: Any) -> Callable[..., Any]:
    """start(architecture, **settings) -> a driver of an engine over its checkpoint."""

    def make(architecture: str, **options: Any) -> Any:
        fields = {"block_size": 16, "num_blocks": 128, "max_num_seqs": 8, "torch_threads": 1, "num_snapshots": 32}
        settings = EngineSettings(model_dir=str(folders(architecture)), **(fields | options))
        runner = ModelRunner(settings, TensorParallel())
        runner.warm_up()
        holder: list[Any] = []
        engine = Engine(settings, runner, clock=lambda: holder[0].now_s if holder else 0.0)
        holder.append(engine_driver(engine, runner))
        return holder[0]

    return make


@pytest.fixture
def check(folders: Callable[[str], Path]) -> Callable[[str, Sequence[int], Sequence[Any]], None]:
    """Holds greedy outputs to the reference: each token the likeliest, each log-probability the reference's."""
    models: dict[str, Any] = {}

    @torch.inference_mode()
    def right(architecture: str, prompt: Sequence[int], outputs: Sequence[Any]) -> None:
        if architecture not in models:
            models[architecture] = AutoModelForCausalLM.from_pretrained(folders(architecture), dtype=torch.float32)
        tokens = [token for output in outputs for token in output.token_ids]
        given = [entry.logprob for output in outputs for entry in output.logprobs]
        logits = models[architecture](torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        # Two candidates may lie closer together than sums in another order.
        assert (logprobs.max(-1).values - chosen).max() < 2 * LOGPROB_BOUND
        assert (chosen - torch.tensor(given)).abs().max() < LOGPROB_BOUND

    return right


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mixed_batch_and_hits_say_what_the_reference_says(start, check, architecture):
    service = start(architecture, max_num_batched_tokens=40)
    keys = [service.submit(f"r{i}", prompt, max_tokens=20, **GREEDY) for i, prompt in enumerate(PROMPTS)]
    service.run()
    for key, prompt in zip(keys, PROMPTS, strict=True):
        check(architecture, prompt, service.outputs[key])
    turn = [*PROMPTS[0], *service.tokens(keys[0]), *PROMPTS[2]]
    again = service.submit("turn", turn, max_tokens=20, **GREEDY)
    service.run()
    # Streams resume at a snapshot, every 64 tokens; latents at any block.
    assert service.outputs[again][0].cached_l1 >= 128
    check(architecture, turn, service.outputs[again])
    service.assert_nothing_held()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_the_pool_preempts_and_changes_nothing(start, check, architecture):
    need = sum(-(-(len(prompt) + 47) // 16) for prompt in PROMPTS)
    service = start(architecture, num_blocks=need // 2 + 1, admission_headroom_tokens=1)
    keys = [service.submit(f"r{i}", prompt, max_tokens=48, **GREEDY) for i, prompt in enumerate(PROMPTS)]
    service.run()
    assert service.engine.scheduler.load_sample().preemptions_total > 0
    for key, prompt in zip(keys, PROMPTS, strict=True):
        check(architecture, prompt, service.outputs[key])
    service.assert_nothing_held()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("length", [130, pytest.param(128, marks=pytest.mark.full), 45])
def test_a_hand_over_goes_on_bit_for_bit(start, check, architecture, length):
    prompt = [*PROMPTS[0]][:length]
    source, target, alone = (start(architecture, weights="fp32") for _ in range(3))
    key = source.submit("moved", prompt, stage="prefill", max_tokens=24, **GREEDY)
    source.engine.handle(ExportState(key))
    source.run()
    target.submit("moved", prompt, stage="decode", max_tokens=24, **GREEDY)
    target.run()
    wanted = target.wanted[-1]
    blocks = [block for p in source.progress if p.key == key for block in p.block_ids]
    heads = source.runner.head_range
    data = source.runner.pool.gather(blocks, *heads, sequence_slot=source.progress[-1].sequence_slot)
    target.runner.pool.scatter(data, wanted.block_ids, *heads, "float32", sequence_slot=wanted.sequence_slot)
    back = target.runner.pool.gather(wanted.block_ids, *heads, sequence_slot=wanted.sequence_slot)
    assert (back == data).all()
    target.engine.handle(KVReady(key, source.exported[-1].state))
    target.run()
    stayed = alone.submit("stayed", prompt, max_tokens=24, **GREEDY)
    alone.run()
    moved = [*source.outputs[key], *target.outputs[key]]
    check(architecture, prompt, moved)
    assert [o.token_ids for o in moved] == [o.token_ids for o in alone.outputs[stayed]]
    assert [p.logprob for o in moved for p in o.logprobs] == [
        p.logprob for o in alone.outputs[stayed] for p in o.logprobs
    ]
    target.assert_nothing_held()
