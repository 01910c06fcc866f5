"""Prefill, hand-over to decode, onboarding and pins, over the emulated runner."""

from collections.abc import Callable
from typing import Any

import pytest

from tidemill_engine.messages import (
    Abort,
    EngineError,
    ExportState,
    KVFailed,
    KVReady,
    OnboardReady,
    PinBlocks,
    Release,
    UnpinBlocks,
)
from tidemill_kvcache.hashing import hash_blocks

LOST = EngineError("WORKER_LOST", "the peer is gone")


def copy_blocks(source: Any, source_ids: list[int], target: Any, target_ids: list[int]) -> None:
    """What a transfer does, on emulated KV."""
    size = source.runner.settings.block_size
    for a, b in zip(source_ids, target_ids, strict=True):
        for offset in range(size):
            target.runner.kv[b, offset] = source.runner.kv.get((a, offset), -1)


def prefill(service: Any, prompt: list[int], **options: Any) -> Any:
    key = service.submit("a", prompt, stage="prefill", **({"max_tokens": 6} | options))
    service.engine.handle(ExportState(key))
    service.run()
    return key


def blocks_of(service: Any) -> list[int]:
    return [block for progress in service.progress for block in progress.block_ids]


def test_prefill_reports_each_chunks_blocks_and_then_holds(emulated_service, emulated_continuation):
    service = emulated_service(max_num_batched_tokens=16)
    prompt = list(range(42))
    key = prefill(service, prompt)
    assert service.tokens(key) == emulated_continuation(prompt, 1)
    assert service.finish(key) == "prefilled"
    assert [p.computed_tokens for p in service.progress] == [0, 16, 32, 42]
    assert [(p.first_block, len(p.block_ids), len(p.block_hashes), p.final) for p in service.progress] == [
        (0, 0, 0, False),
        (0, 4, 4, False),
        (4, 4, 4, False),
        (8, 3, 2, True),
    ]
    hashes = [h for p in service.progress for h in p.block_hashes]
    assert hashes == hash_blocks(b"r" * 16, prompt, 4)
    assert service.engine.cache.used_blocks == 11
    assert service.engine.scheduler.load_sample().held_requests == 1
    state = service.exported[0].state
    assert (state.computed_tokens, state.sampler_position) == (42, 1)
    assert state.committed_token_ids == [*prompt, state.pending_token_id]
    service.engine.handle(Release(key))
    service.run()
    service.assert_nothing_held()


def test_a_hit_is_reported_before_the_first_chunk(emulated_service):
    service = emulated_service()
    service.submit("warm", list(range(20)), max_tokens=1)
    service.run()
    prefill(service, list(range(26)))
    assert [(p.first_block, len(p.block_ids), p.final) for p in service.progress] == [(0, 5, False), (5, 2, True)]


@pytest.mark.parametrize("ends_by", ["stop", "length"])
def test_a_first_token_that_ends_the_request_leaves_nothing_to_hold(emulated_service, emulated_continuation, ends_by):
    service = emulated_service()
    options = {"max_tokens": 1} if ends_by == "length" else {"stop_token_ids": emulated_continuation([1, 2, 3], 1)}
    key = prefill(service, [1, 2, 3], **options)
    assert service.finish(key) == ends_by
    assert not service.exported
    service.assert_nothing_held()


def test_a_hold_ends_by_itself_on_an_idle_engine(emulated_service):
    service = emulated_service()
    key = prefill(service, [1, 2, 3], hold_s=2.0)
    service.now_s = 3.1
    assert not service.step()
    assert service.finish(key) == "prefilled"
    service.assert_nothing_held()


def test_a_release_before_the_prompt_is_computed_holds_nothing(emulated_service):
    service = emulated_service(max_num_batched_tokens=8)
    key = service.submit("a", list(range(20)), stage="prefill", max_tokens=4)
    service.step()
    service.engine.handle(Release(key))
    service.run()
    assert service.finish(key) == "prefilled"
    service.assert_nothing_held()


@pytest.mark.parametrize("prompt_length", [1, 8, 9, 30])
@pytest.mark.parametrize("warm_tokens", [0, 8, 30])
def test_a_hand_over_continues_the_stream(emulated_service, emulated_continuation, prompt_length, warm_tokens):
    source, target = emulated_service(), emulated_service()
    prompt = list(range(prompt_length))
    if warm_tokens:
        target.submit("warm", list(range(warm_tokens)), max_tokens=1)
        target.run()
    source_key = prefill(source, prompt)
    key = target.submit("a", prompt, stage="decode", max_tokens=6)
    assert not target.step()
    wanted = target.wanted[0]
    assert wanted.have_blocks == min(warm_tokens, prompt_length) // 4
    assert wanted.have_hash == (
        hash_blocks(b"r" * 16, prompt, 4)[wanted.have_blocks - 1] if wanted.have_blocks else b""
    )
    copy_blocks(source, blocks_of(source)[wanted.have_blocks :], target, wanted.block_ids)
    target.engine.handle(KVReady(key, source.exported[0].state))
    target.run()
    assert target.outputs[key][0].first_position == 1
    assert source.tokens(source_key) + target.tokens(key) == emulated_continuation(prompt, 6)
    assert all(output.cached_l1 == -1 for output in target.outputs[key])
    target.assert_nothing_held()
    again = target.submit("again", prompt, max_tokens=1)
    target.run()
    assert target.outputs[again][0].cached_l1 == (prompt_length - 1) // 4 * 4


def test_kv_that_was_rounded_on_its_way_serves_its_own_request_only(emulated_service, emulated_continuation):
    source, target = emulated_service(), emulated_service()
    prompt = list(range(30))
    prefill(source, prompt)
    key = target.submit("a", prompt, stage="decode", max_tokens=6)
    target.step()
    copy_blocks(source, blocks_of(source), target, target.wanted[0].block_ids)
    state = source.exported[0].state
    state.rounded_kv = True
    target.engine.handle(KVReady(key, state))
    target.run()
    assert target.tokens(key) == emulated_continuation(prompt, 6)[1:]
    again = target.submit("again", prompt, max_tokens=1)
    target.run()
    assert target.outputs[again][0].cached_l1 == 0
    target.assert_nothing_held()


def test_a_handed_over_request_that_is_preempted_computes_what_it_lost(emulated_service, emulated_continuation):
    source, target = emulated_service(), emulated_service(num_blocks=10, admission_headroom_tokens=1)
    prompt = list(range(12))
    prefill(source, prompt, max_tokens=20)
    strong = target.submit("strong", [900] * 12, max_tokens=24, priority=9)
    target.step()
    key = target.submit("a", prompt, stage="decode", max_tokens=20)
    target.step()
    copy_blocks(source, blocks_of(source), target, target.wanted[0].block_ids)
    target.engine.handle(KVReady(key, source.exported[0].state))
    target.run()
    assert target.finish(strong) == "length"
    assert target.engine.scheduler.load_sample().preemptions_total >= 1
    assert len(target.wanted) == 1
    assert target.tokens(key) == emulated_continuation(prompt, 20)[1:]
    target.assert_nothing_held()


def test_the_state_may_leave_out_the_pending_token(emulated_service, emulated_continuation):
    source, target = emulated_service(), emulated_service()
    prefill(source, [1, 2, 3])
    key = target.submit("a", [1, 2, 3], stage="decode", max_tokens=4)
    target.step()
    copy_blocks(source, blocks_of(source), target, target.wanted[0].block_ids)
    state = source.exported[0].state
    state.committed_token_ids = state.committed_token_ids[:-1]
    target.engine.handle(KVReady(key, state))
    target.run()
    assert target.tokens(key) == emulated_continuation([1, 2, 3], 4)[1:]


def test_a_state_of_another_request_is_refused(emulated_service):
    source, target = emulated_service(), emulated_service()
    prefill(source, [1, 2, 3])
    key = target.submit("a", [1, 2, 9], stage="decode", max_tokens=4)
    target.step()
    target.engine.handle(KVReady(key, source.exported[0].state))
    target.run()
    assert target.outputs[key][-1].error.code == "INTERNAL"
    target.assert_nothing_held()


def test_a_failed_hand_over_is_recomputed_or_ends_by_name(emulated_service, emulated_continuation):
    service = emulated_service()
    recomputed = service.submit("a", [1, 2, 3], stage="decode", max_tokens=4)
    ended = service.submit("b", [4, 5, 6], stage="decode", max_tokens=4)
    service.run()
    service.engine.handle(KVFailed(recomputed, recompute=True, error=LOST))
    service.engine.handle(KVFailed(ended, recompute=False, error=LOST))
    service.run()
    assert service.tokens(recomputed) == emulated_continuation([1, 2, 3], 4)
    assert service.outputs[ended][-1].error == LOST
    service.assert_nothing_held()


def leave_by_abort(service: Any, key: Any) -> None:
    service.engine.handle(Abort(key))


def leave_by_deadline(service: Any, key: Any) -> None:
    service.now_s += 700


@pytest.mark.parametrize("leave", [leave_by_abort, leave_by_deadline])
@pytest.mark.parametrize("answered", [True, False])
def test_blocks_of_a_transfer_stay_out_of_reach_until_it_is_over(
    emulated_service, leave: Callable[[Any, Any], None], answered: bool
):
    service = emulated_service(num_blocks=10)
    key = service.submit("a", list(range(30)), stage="decode", max_tokens=6)
    service.step()
    leave(service, key)
    service.step()
    assert service.finish(key) in ("aborted", "error")
    assert service.engine.cache.used_blocks == 8
    other = service.submit("other", [500 + i for i in range(20)], max_tokens=1)
    service.run()
    assert service.finish(other) is None
    if answered:
        service.engine.handle(KVFailed(key, recompute=True, error=LOST))
    else:
        service.now_s += 31.5
    service.run()
    assert service.finish(other) == "length"
    service.assert_nothing_held()
    assert service.engine.scheduler.state.load.overdue_reservations_total == int(not answered)


@pytest.mark.parametrize("loaded", [0, 1, 3])
def test_onboarded_blocks_are_not_computed_again(emulated_service, emulated_continuation, loaded):
    prompt = list(range(18))
    stored, service = emulated_service(), emulated_service(onboard_enabled=True)
    prefill(stored, prompt)
    service.submit("warm", prompt[:4], max_tokens=1)
    service.run()
    computed = service.runner.computed_tokens
    key = service.submit("a", prompt, max_tokens=3)
    assert not service.step()
    wanted = service.onboards[-1]
    assert (wanted.first_block, len(wanted.block_ids), wanted.snapshot_ids) == (1, 3, [-1] * 3)
    assert wanted.block_hashes == hash_blocks(b"r" * 16, prompt, 4)[1:]
    copy_blocks(stored, blocks_of(stored)[1 : 1 + loaded], service, wanted.block_ids[:loaded])
    service.engine.handle(OnboardReady(key, loaded))
    service.run()
    assert service.tokens(key) == emulated_continuation(prompt, 3)
    first = service.outputs[key][0]
    assert (first.cached_l1, first.cached_l3) == (4, 4 * loaded)
    assert service.runner.computed_tokens - computed == 18 - 4 - 4 * loaded + 2
    service.assert_nothing_held()


def test_a_late_onboard_answer_finds_the_request_gone_on_elsewhere(emulated_service, emulated_continuation):
    service = emulated_service(onboard_enabled=True, onboard_deadline_s=1.0)
    prompt = list(range(18))
    key = service.submit("a", prompt, max_tokens=20)
    service.step()
    wanted = service.onboards[0]
    service.now_s = 1.5
    service.step()
    for block in wanted.block_ids:
        for offset in range(4):
            service.runner.kv[block, offset] = -7
    for _ in range(5):
        service.step()
    service.engine.handle(OnboardReady(key, 4))
    service.run()
    assert service.tokens(key) == emulated_continuation(prompt, 20)
    service.assert_nothing_held()


@pytest.mark.parametrize("boundary_blocks", [0, 2, 4])
def test_onboarded_blocks_are_usable_to_a_loaded_snapshot(emulated_service, emulated_continuation, boundary_blocks):
    prompt = list(range(18))
    stored = emulated_service(snapshot_interval=8)
    service = emulated_service(snapshot_interval=8, onboard_enabled=True)
    prefill(stored, prompt)
    key = service.submit("a", prompt, max_tokens=3)
    service.step()
    wanted = service.onboards[0]
    assert [i >= 0 for i in wanted.snapshot_ids] == [False, True, False, True]
    copy_blocks(stored, blocks_of(stored)[:4], service, wanted.block_ids)
    if boundary_blocks:
        service.runner.snapshots[wanted.snapshot_ids[boundary_blocks - 1]] = tuple(prompt[: 4 * boundary_blocks])
    service.engine.handle(OnboardReady(key, 4, boundary_blocks))
    service.run()
    assert service.tokens(key) == emulated_continuation(prompt, 3)
    assert service.outputs[key][0].cached_l3 == 4 * boundary_blocks
    service.assert_nothing_held()


def test_a_hand_over_fills_the_sequence_slot(emulated_service, emulated_continuation):
    source, target = emulated_service(snapshot_interval=8), emulated_service(snapshot_interval=8)
    prompt = list(range(21))
    prefill(source, prompt)
    key = target.submit("a", prompt, stage="decode", max_tokens=6)
    target.step()
    wanted = target.wanted[0]
    copy_blocks(source, blocks_of(source), target, wanted.block_ids)
    target.runner.slots[wanted.sequence_slot] = source.runner.slots[source.progress[-1].sequence_slot]
    target.engine.handle(KVReady(key, source.exported[0].state))
    target.run()
    assert target.tokens(key) == emulated_continuation(prompt, 6)[1:]
    target.assert_nothing_held()


def test_a_prefix_is_resumed_from_its_deepest_snapshot(emulated_service, emulated_continuation):
    service = emulated_service(snapshot_interval=8)
    prompt = list(range(30))
    service.submit("a", prompt, max_tokens=4)
    service.run()
    again = service.submit("b", prompt, max_tokens=4)
    service.run()
    assert service.outputs[again][0].cached_l1 == 24
    assert service.tokens(again) == emulated_continuation(prompt, 4)
    turn = service.submit("c", [*prompt, *emulated_continuation(prompt, 4), 7, 7], max_tokens=4)
    service.run()
    assert service.outputs[turn][0].cached_l1 == 32
    service.assert_nothing_held()


def test_pinned_blocks_stay_until_unpinned_or_the_pins_bound(emulated_service):
    service = emulated_service(num_blocks=8)
    service.submit("a", list(range(12)), max_tokens=1)
    service.run()
    hashes = hash_blocks(b"r" * 16, list(range(12)), 4)
    for pin_id in (1, 2):
        service.engine.handle(PinBlocks(pin_id, [*hashes, b"x" * 16]))
    service.step()
    assert [len(pinned.block_ids) for pinned in service.pinned] == [3, 3]
    service.engine.handle(UnpinBlocks(1))
    service.engine.handle(UnpinBlocks(1))
    service.submit("b", [500 + i for i in range(20)], max_tokens=1)
    service.run()
    assert service.engine.cache.lookup(hashes)[0] == service.pinned[1].block_ids
    service.now_s = 61.0
    service.step()
    service.assert_nothing_held()
