"""Random lives of random requests over the emulated runner: nothing leaks, starves or ends twice."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill_engine.messages import (
    Abort,
    AddCredit,
    EngineError,
    KVFailed,
    KVReady,
    KVWanted,
    OnboardReady,
    OnboardWanted,
    PinBlocks,
    Release,
    RequestKey,
    ResetCache,
    UnpinBlocks,
)
from tidemill_engine.sampling_params import RequestState

ACTIONS = ["submit"] * 6 + ["step"] * 12 + ["abort", "credit", "release", "answer", "answer", "wait", "reset", "pin"]


class World:
    """A service that does anything at any time, as long as the contract allows it."""

    def __init__(self, service: Any, continuation: Callable[[list[int], int], list[int]], seed: int) -> None:
        self.service = service
        self.continuation = continuation
        self.random = random.Random(seed)
        self.prompts: dict[RequestKey, list[int]] = {}
        self.max_tokens: dict[RequestKey, int] = {}
        self.stages: dict[RequestKey, str] = {}
        self.unanswered: list[KVWanted | OnboardWanted] = []
        self.num_pins = 0

    def act(self, action: str) -> None:
        getattr(self, action)()
        self.unanswered += [*self.service.wanted, *self.service.onboards]
        self.service.wanted.clear()
        self.service.onboards.clear()
        self.service.engine.cache.check_invariants()

    def submit(self) -> None:
        r = self.random
        prefix = [r.randrange(3)] * r.choice([0, 4, 8, 24, 40])
        prompt = prefix + [r.randrange(1000) for _ in range(r.randrange(1, 12))]
        stage = r.choice(["whole", "whole", "whole", "prefill", "decode"])
        key = RequestKey(f"r{len(self.prompts)}")
        self.prompts[key], self.stages[key], self.max_tokens[key] = prompt, stage, r.randrange(1, 30)
        self.service.submit(
            "",
            prompt,
            key=key,
            stage=stage,
            max_tokens=self.max_tokens[key],
            credit_tokens=r.choice([0, 2, 1000, 1000]),
            priority=r.randrange(3),
            hold_s=r.choice([0.5, 100.0]),
        )

    def step(self) -> None:
        self.service.step()

    def abort(self) -> None:
        if self.prompts:
            self.service.engine.handle(Abort(self.random.choice(list(self.prompts))))

    def credit(self) -> None:
        if self.prompts:
            self.service.engine.handle(AddCredit(self.random.choice(list(self.prompts)), 10))

    def release(self) -> None:
        if self.prompts:
            self.service.engine.handle(Release(self.random.choice(list(self.prompts))))

    def wait(self) -> None:
        self.service.now_s += self.random.choice([0.1, 1.0])

    def reset(self) -> None:
        self.service.engine.handle(ResetCache())

    def pin(self) -> None:
        hashes = [h for run in self.service.engine.cache.snapshot_blocks() for h in run.hashes]
        self.service.engine.handle(PinBlocks(self.num_pins, hashes[: self.random.randrange(4)]))
        self.service.engine.handle(UnpinBlocks(self.num_pins - self.random.randrange(3)))
        self.num_pins += 1

    def answer(self) -> None:
        if not self.unanswered:
            return
        wanted = self.unanswered.pop(self.random.randrange(len(self.unanswered)))
        if isinstance(wanted, KVWanted):
            self.answer_hand_over(wanted)
        else:
            self.answer_onboard(wanted)

    def answer_hand_over(self, wanted: KVWanted) -> None:
        prompt = self.prompts[wanted.key]
        if self.random.random() < 0.3:
            error = EngineError("WORKER_LOST", "lost")
            self.service.engine.handle(KVFailed(wanted.key, self.random.random() < 0.5, error))
            return
        self.write(prompt, wanted.have_blocks, wanted.block_ids)
        if wanted.sequence_slot >= 0:
            self.service.runner.slots[wanted.sequence_slot] = tuple(prompt)
        first = self.continuation(prompt, 1)
        state = RequestState(
            prompt_tokens=len(prompt),
            committed_token_ids=prompt + first,
            pending_token_id=first[0],
            computed_tokens=len(prompt),
            sampler_position=1,
            seed=0,
        )
        self.service.engine.handle(KVReady(wanted.key, state))

    def answer_onboard(self, wanted: OnboardWanted) -> None:
        loaded = self.random.randrange(len(wanted.block_ids) + 1)
        prompt, end = self.prompts[wanted.key], wanted.first_block + loaded
        # A preempted request asks for blocks of its output too.
        tokens = prompt + self.continuation(prompt, self.max_tokens[wanted.key])
        self.write(tokens, wanted.first_block, wanted.block_ids[:loaded])
        boundary = 0
        for index in range(loaded):
            if wanted.snapshot_ids[index] >= 0 and self.random.random() < 0.7:
                boundary = wanted.first_block + index + 1
                self.service.runner.snapshots[wanted.snapshot_ids[index]] = tuple(tokens[: 4 * boundary])
        assert boundary <= end
        self.service.engine.handle(OnboardReady(wanted.key, loaded, boundary))

    def write(self, tokens: list[int], first_block: int, block_ids: list[int]) -> None:
        for index, block in enumerate(block_ids, first_block):
            for offset, token in enumerate(tokens[4 * index : 4 * index + 4]):
                self.service.runner.kv[block, offset] = token

    def settle(self) -> None:
        """The service comes to rest: answers, credits and releases everything."""
        for _ in range(400):
            while self.unanswered:
                self.act("answer")
            for key in self.prompts:
                self.service.engine.handle(AddCredit(key, 100))
                self.service.engine.handle(Release(key))
            self.act("step")
            if all(self.service.finish(key) for key in self.prompts) and not self.unanswered:
                break
        self.service.now_s += 100.0
        self.service.run()

    def check(self) -> None:
        for key, prompt in self.prompts.items():
            finish = self.service.finish(key)
            assert finish is not None, f"{key} never ended"
            tokens = self.service.tokens(key)
            first = self.service.outputs[key][0].first_position
            expected = self.continuation(prompt, self.max_tokens[key])
            assert tokens == expected[first : first + len(tokens)], f"{key} has other tokens"
            if finish == "length":
                assert first + len(tokens) == self.max_tokens[key]
        self.service.assert_nothing_held()


@pytest.mark.parametrize("snapshot_interval", [0, 8])
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=10, max_size=150),
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([20, 30, 100]),
    onboard=st.booleans(),
    budget=st.sampled_from([4, 9, 32]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_ends_exactly_once_and_nothing_is_left(
    emulated_service, emulated_continuation, snapshot_interval, actions, seed, num_blocks, onboard, budget
):
    service = emulated_service(
        num_blocks=num_blocks,
        snapshot_interval=snapshot_interval,
        num_snapshots=6,
        onboard_enabled=onboard,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        onboard_deadline_s=0.5,
        credit_stall_s=20.0,
    )
    world = World(service, emulated_continuation, seed)
    for action in actions:
        world.act(action)
    world.settle()
    world.check()
