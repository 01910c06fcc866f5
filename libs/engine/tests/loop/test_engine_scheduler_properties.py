"""Random lives of random requests over the emulated runner: nothing leaks, starves or ends twice."""

import random
from collections.abc import Callable, Iterator
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
    MoveRefused,
    OnboardReady,
    OnboardWanted,
    PinBlocks,
    Release,
    RequestKey,
    ResetCache,
    Resume,
    Suspend,
    UnpinBlocks,
)
from tidemill_engine.sampling_params import RequestState
from tidemill_engine.scheduler import decode_guard, output_lengths

ACTIONS = ["submit"] * 6 + ["step"] * 12 + ["abort", "credit", "release", "answer", "answer", "wait", "reset", "pin"]
ACTIONS += ["suspend", "suspend", "resume"]
GUARDS = st.fixed_dictionaries(
    {
        "kv_high_water": st.sampled_from([0.3, 0.6, 0.95, 2.0]),
        "forecast_growth": st.booleans(),
        "most_tpot_load": st.sampled_from([0.0, 0.01, 1.0]),
        "move_wait_s": st.sampled_from([0.0, 1.0]),
        "small_chunk_load": st.sampled_from([0.0, 1.0]),
        "runaway_wait_s": st.sampled_from([0.5, 30.0]),
        "prefill_policy": st.sampled_from(["fair", "quota", "shortest", "fcfs"]),
        "tenant_burst_s": st.sampled_from([0.05, 1.0]),
        "growth_wait_s": st.sampled_from([0.0, 0.05, 0.5]),
    }
)


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
        self.num_offers = 0
        self.num_growth_waits = 0
        self.overdue: dict[RequestKey, int] = {}
        self.is_settling = False

    def act(self, action: str) -> None:
        getattr(self, action)()
        self.answer_offers()
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
        self.prompts[key], self.stages[key], self.max_tokens[key] = prompt, stage, r.choice([1, 3, 3, 3, 5, 8, 30, 60])
        self.service.submit(
            "",
            prompt,
            key=key,
            stage=stage,
            max_tokens=self.max_tokens[key],
            credit_tokens=r.choice([0, 2, 1000, 1000]),
            priority=r.randrange(3),
            tenant=r.choice("ab"),
            tenant_weight=r.choice([1.0, 3.0]),
            slo_ttft_s=r.choice([0.0, 0.3, 30.0]),
            slo_tpot_s=r.choice([0.0, 0.05]),
            hold_s=r.choice([0.5, 100.0]),
        )

    def step(self) -> None:
        state, planned_s = self.service.engine.scheduler.state, self.service.now_s
        worked = self.service.step()
        waiting = {r.key: r.outgrown_since_s for r in state.running if r.outgrown_since_s >= 0}
        limit_s = state.settings.growth_wait_s
        # One whose time is over may miss a step whose rows are taken, not more.
        self.overdue = {
            k: self.overdue.get(k, 0) + 1 for k, since_s in waiting.items() if planned_s >= since_s + limit_s
        }
        assert max(self.overdue.values(), default=0) <= state.settings.max_num_seqs, "growth waits beyond its time"
        if waiting and not worked:
            assert state.timers.next_due_s <= min(waiting.values()) + limit_s, "nothing would end the wait"
        self.num_growth_waits += len(waiting)

    def abort(self) -> None:
        if self.prompts:
            self.service.engine.handle(Abort(self.random.choice(list(self.prompts))))

    def credit(self) -> None:
        if self.prompts:
            self.service.engine.handle(AddCredit(self.random.choice(list(self.prompts)), 10))

    def release(self) -> None:
        if not self.prompts:
            return
        key, state = self.random.choice(list(self.prompts)), self.service.engine.scheduler.state
        held = state.held.get(key)
        # A suspended request that is released goes on elsewhere: it has no end here.
        if key not in state.suspending and not (held and held.is_suspended):
            self.service.engine.handle(Release(key))

    def suspend(self) -> None:
        if self.prompts:
            key = self.random.choice(list(self.prompts))
            self.service.engine.handle(Suspend(key, 1, self.random.choice([0.5, 100.0])))

    def resume(self) -> None:
        if self.prompts:
            self.service.engine.handle(Resume(self.random.choice(list(self.prompts))))

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

    def answer_offers(self) -> None:
        """A request that the engine would rather give away goes, stays, or nobody says anything. What is released is
        not taken: it would go on elsewhere and have no end here."""
        for offer in self.service.moves_wanted:
            self.num_offers += 1
            match self.random.randrange(3):
                case 0:
                    self.service.engine.handle(MoveRefused(offer.key))
                case 1 if not self.is_settling:
                    self.service.engine.handle(Suspend(offer.key, 1, 0.5))
        self.service.moves_wanted.clear()

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
        self.is_settling = True
        self.end_all()
        # Pins that nobody gives back are over by then: who needs all of the pool goes on.
        self.service.now_s += 100.0
        self.end_all()
        self.service.now_s += 100.0
        self.service.run()

    def end_all(self) -> None:
        """Up to 400 steps, until every request has ended."""
        for _ in range(400):
            while self.unanswered:
                self.act("answer")
            for key in self.prompts:
                self.service.engine.handle(Resume(key))
                self.service.engine.handle(AddCredit(key, 100))
                self.service.engine.handle(Release(key))
            self.act("step")
            if all(self.service.finish(key) for key in self.prompts) and not self.unanswered:
                return

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


@pytest.fixture(scope="module", autouse=True)
def low_marks() -> Iterator[None]:
    """A few tokens are enough to be looked at, and few ends to know a class: lives here are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_guard, "_CHECK_TOKENS", 4)
        patch.setattr(decode_guard, "_FAR_PAST", 1.0)
        patch.setattr(output_lengths, "_ENOUGH", 2)
        yield


def live(make: Any, continuation: Any, actions: list[str], seed: int, **options: Any) -> World:
    """One life from its first action to rest, checked."""
    fixed = {"num_snapshots": 6, "max_num_seqs": 4, "onboard_deadline_s": 0.5, "credit_stall_s": 20.0}
    world = World(make(**fixed | options), continuation, seed)
    for action in actions:
        world.act(action)
    world.settle()
    world.check()
    return world


@pytest.mark.parametrize("snapshot_interval", [0, 8])
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=10, max_size=150),
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([20, 30, 100]),
    onboard=st.booleans(),
    budget=st.sampled_from([4, 9, 32]),
    guards=GUARDS,
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_every_request_ends_exactly_once_and_nothing_is_left(
    emulated_service, emulated_continuation, snapshot_interval, actions, seed, num_blocks, onboard, budget, guards
):
    live(
        emulated_service,
        emulated_continuation,
        actions,
        seed,
        num_blocks=num_blocks,
        snapshot_interval=snapshot_interval,
        onboard_enabled=onboard,
        max_num_batched_tokens=budget,
        **guards,
    )


def test_such_lives_meet_every_guard(emulated_service, emulated_continuation):
    runaways = preemptions = offers = growth_waits = 0
    for seed in range(3):
        actions = random.Random(seed).choices(ACTIONS, k=150)
        guards = {"kv_high_water": 0.3, "move_wait_s": 1.0, "runaway_wait_s": 0.5}
        world = live(emulated_service, emulated_continuation, actions, seed, num_blocks=20, **guards)
        sample = world.service.engine.scheduler.load_sample()
        runaways, preemptions = runaways + sample.runaways_total, preemptions + sample.preemptions_total
        offers, growth_waits = offers + world.num_offers, growth_waits + world.num_growth_waits
    found = (runaways, preemptions, offers, growth_waits)
    assert min(found) > 0, found
