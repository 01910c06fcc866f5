"""Admission, preemption, fairness and shared cold prefixes when blocks are scarce, over the emulated runner."""

import pytest

from tidemill_engine.messages import Abort
from tidemill_engine.scheduler import admission, cover


def test_output_in_half_the_pool_is_the_same_token_for_token(emulated_service, emulated_continuation):
    prompts = [[10 * r + i for i in range(8)] for r in range(6)]
    need = 6 * 10
    service = emulated_service(num_blocks=need // 2, admission_headroom_tokens=1)
    keys = [service.submit(f"r{r}", prompt, max_tokens=32) for r, prompt in enumerate(prompts)]
    service.run()
    for key, prompt in zip(keys, prompts, strict=True):
        assert service.tokens(key) == emulated_continuation(prompt, 32)
        assert service.finish(key) == "length"
    assert service.engine.scheduler.load_sample().preemptions_total > 0
    service.assert_nothing_held()


def test_preemptions_of_one_request_are_bounded(emulated_service):
    service = emulated_service(num_blocks=24, admission_headroom_tokens=1, max_preemptions=2)
    counts: dict[str, int] = {}

    def watch() -> None:
        for request in service.engine.scheduler.state.requests.values():
            counts[request.key.request_id] = request.num_preemptions

    service.runner.on_step = watch
    keys = [service.submit(f"r{r}", [r] * 6, max_tokens=60) for r in range(8)]
    service.run()
    assert all(service.finish(key) == "length" for key in keys)
    assert max(counts.values()) == 2
    service.assert_nothing_held()


def test_a_weaker_request_never_takes_blocks_from_a_stronger_one(emulated_service):
    service = emulated_service(num_blocks=12, admission_headroom_tokens=1)
    strong = service.submit("strong", [1] * 8, max_tokens=30, priority=5)
    weak = service.submit("weak", [2] * 8, max_tokens=30)
    finished: list[str] = []
    while service.step():
        finished = [o.key.request_id for report in service.reports for o in report.outputs if o.finish]
        for request in service.engine.scheduler.state.requests.values():
            assert request.key == weak or request.num_preemptions == 0
    assert finished == [strong.request_id, weak.request_id]


def test_a_stalled_request_gives_way_first(emulated_service):
    service = emulated_service(num_blocks=14, admission_headroom_tokens=1)
    stalled = service.submit("stalled", [1] * 20, max_tokens=8, credit_tokens=1)
    service.step()
    busy = service.submit("busy", [2] * 8, max_tokens=40)
    service.run()
    assert service.finish(busy) == "length"
    assert service.engine.scheduler.state.requests[stalled].num_preemptions == 1
    service.engine.handle(Abort(stalled))
    service.run()
    service.assert_nothing_held()


def test_small_requests_pass_an_oversized_one_but_only_so_often(emulated_service):
    service = emulated_service(num_blocks=40, max_overtakes=5, admission_headroom_tokens=1, prefill_policy="fcfs")
    held = service.submit("held", list(range(90)), max_tokens=2, stage="prefill", hold_s=60)
    service.run()
    big = service.submit("big", [500 + i for i in range(80)], max_tokens=4)
    small = [service.submit(f"s{i}", [900 - i] * 3, max_tokens=2) for i in range(12)]
    service.run()
    assert service.finish(big) is None
    assert len([key for key in small if service.finish(key)]) == 5
    service.engine.handle(Abort(held))
    service.run()
    assert service.finish(big) == "length"
    assert all(service.finish(key) for key in small)
    service.assert_nothing_held()


def test_a_prompt_keeps_advancing_under_steady_decodes(emulated_service):
    service = emulated_service(
        num_blocks=300, max_num_seqs=8, max_num_batched_tokens=8, prefill_every_steps=4, block_size=4
    )
    for i in range(7):
        service.submit(f"d{i}", [i], max_tokens=150)
    for _ in range(4):
        service.step()
    late = service.submit("late", list(range(14)), max_tokens=1)
    for _ in range(4 * 8):
        service.step()
        if service.finish(late):
            break
    assert service.finish(late) == "length"


def test_a_long_prompt_that_hardly_fits_is_computed_once(emulated_service):
    service = emulated_service(num_blocks=40, max_num_batched_tokens=16)
    decodes = [service.submit(f"d{i}", [i] * 4, max_tokens=20) for i in range(4)]
    service.step()
    long = service.submit("long", list(range(130)), max_tokens=4)
    service.run()
    assert all(service.finish(key) == "length" for key in [*decodes, long])
    computed = sum(row.num_tokens for step in service.runner.steps for row in step.rows if row.num_tokens > 1)
    assert computed <= 130 + 4 * 4


def test_requests_over_one_long_prefix_keep_room_to_decode(emulated_service):
    service = emulated_service(num_blocks=96, max_num_seqs=32, max_num_batched_tokens=64)
    prefix = list(range(59 * 4))
    keys = [service.submit(f"r{i}", [*prefix, 700 + i], max_tokens=12) for i in range(32)]
    service.run()
    assert all(service.finish(key) == "length" for key in keys)
    assert service.engine.scheduler.load_sample().preemptions_total == 0
    service.assert_nothing_held()


@pytest.mark.parametrize("snapshot_interval", [0, 8])
def test_one_cold_prefix_is_computed_once_for_all_who_want_it(emulated_service, snapshot_interval):
    service = emulated_service(num_blocks=128, max_num_seqs=16, snapshot_interval=snapshot_interval, num_snapshots=32)
    prefix = list(range(96))
    keys = [service.submit(f"r{i}", [*prefix, 500 + i, 600 + i], max_tokens=2) for i in range(16)]
    service.run()
    assert all(service.finish(key) == "length" for key in keys)
    prompt_tokens = service.runner.computed_tokens - 16
    assert prompt_tokens <= 96 + 16 * 6
    service.assert_nothing_held()


def test_followers_go_on_when_the_one_they_follow_is_gone(emulated_service):
    service = emulated_service(num_blocks=128)
    prefix = list(range(96))
    leader = service.submit("leader", [*prefix, 1], max_tokens=2)
    follower = service.submit("follower", [*prefix, 2], max_tokens=2)
    service.step()
    assert service.engine.scheduler.state.requests[follower].row == -1
    service.engine.handle(Abort(leader))
    service.run()
    assert service.finish(follower) == "length"
    service.assert_nothing_held()


def test_followers_do_not_wait_for_ever(emulated_service):
    service = emulated_service(num_blocks=128, dedupe_wait_s=2.0, onboard_enabled=True, onboard_deadline_s=50.0)
    prefix = list(range(96))
    leader = service.submit("leader", [*prefix, 1], max_tokens=2)
    service.step()
    follower = service.submit("follower", [*prefix, 2], max_tokens=2)
    service.run()
    assert service.finish(follower) is None
    service.now_s = 3.0
    service.run()
    assert [wanted.key for wanted in service.onboards] == [leader, follower]


def test_a_blocked_engine_is_idle_until_a_timer(emulated_service):
    service = emulated_service(num_blocks=10, admission_headroom_tokens=1)
    held = service.submit("held", list(range(30)), max_tokens=5, stage="prefill", hold_s=4.0)
    service.run()
    blocked = service.submit("blocked", [500 + i for i in range(30)], max_tokens=5)
    assert not service.step()
    assert service.engine.next_timer_s == pytest.approx(5.0, abs=0.1)
    service.now_s = 5.5
    service.run()
    assert service.finish(held) == "prefilled"
    assert service.finish(blocked) == "length"
    service.assert_nothing_held()


def test_growth_that_is_counted_once_a_step_stays_right_over_its_admissions(emulated_service, monkeypatch):
    checked = []
    add = admission.Growth.add

    def add_and_check(growth, request):
        add(growth, request)
        assert growth.blocks == cover.growth_blocks(growth._state)
        checked.append(request.key)

    monkeypatch.setattr(admission.Growth, "add", add_and_check)
    service = emulated_service(num_blocks=60, admission_headroom_tokens=9)
    for r in range(14):
        stage = "prefill" if r % 5 == 3 else "whole"
        service.submit(f"r{r}", [r] * (3 + r % 6), stage=stage, max_tokens=4 + 3 * r, hold_s=0.0)
    service.run()
    assert len(checked) >= 14
