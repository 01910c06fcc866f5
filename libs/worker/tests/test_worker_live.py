"""Two workers with real ranks on a tiny model: requests, hand-over, aborts, and nothing left afterwards."""

import asyncio
import random
import re
from collections.abc import AsyncIterator

import pytest
from emulated_peer import flipping_peer
from gateway_rig import GatewayRig, key, read_asset, read_card
from worker_rig import Connect, StartWorker, WorkerProcess

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2

PROMPT = [(7 * i) % 250 for i in range(200)]
CHUNK_TOKENS = 64
MARK = 0.25
"""Of 96 blocks of 32 tokens."""
LOOP = {"logit_bias": {7: 100.0}, "logprobs": True, "top_logprobs": 2}
LOOP_TOKENS = 500
LOOP_CREDIT = 330


@pytest.fixture(scope="module")
def workers(start_worker: StartWorker) -> tuple[WorkerProcess, WorkerProcess]:
    """A prefill and a decode worker."""
    prefill = start_worker(
        "prefill", "live-p", max_num_batched_tokens=CHUNK_TOKENS, kv_high_water=MARK, log_level="debug"
    )
    return prefill, start_worker("decode", "live-d")


@pytest.fixture
async def pair(
    workers: tuple[WorkerProcess, WorkerProcess], connect: Connect
) -> AsyncIterator[tuple[GatewayRig, GatewayRig]]:
    """Gateway streams to both; at the end of each test nothing may be held by either."""
    prefill, decode = workers
    async with connect(prefill) as p, connect(decode) as d:
        yield p, d
        await p.until_idle()
        await d.until_idle()


async def hand_over(p: GatewayRig, d: GatewayRig, request_id: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Runs a request over both and returns its tokens."""
    p.submit(request_id, prompt, "PREFILL", max_tokens=max_tokens)
    await p.due(request_id)
    source = await p.ticket(request_id, d)
    d.submit(request_id, prompt, "DECODE", max_tokens=max_tokens, source=source)
    finish = await d.finished(request_id)
    assert finish.finish == worker_pb2.FINISH_LENGTH, finish
    return p.tokens(request_id) + d.tokens(request_id)


async def refusal(rig: GatewayRig, request_id: str) -> errors_pb2.ErrorDetail:
    """The error that a request ended with."""
    output = await rig.finished(request_id)
    assert output.finish == worker_pb2.FINISH_ERROR
    return output.error


async def test_a_whole_request_streams_its_tokens_step_by_step(pair: tuple[GatewayRig, GatewayRig]) -> None:
    _, d = pair
    d.submit("whole", PROMPT, max_tokens=10)
    assert (await d.finished("whole")).finish == worker_pb2.FINISH_LENGTH
    assert len(d.tokens("whole")) == 10
    assert d.outputs["whole"][0].HasField("cached")
    # A report between steps, of load or that a domain goes on, has the last one's number and no tokens.
    steps = [step.step for step in d.steps if any(output.token_ids for output in step.outputs)]
    assert steps == sorted(set(steps)), "one message for each step"


async def test_all_tokens_of_an_engine_step_travel_in_one_message(pair: tuple[GatewayRig, GatewayRig]) -> None:
    _, d = pair
    names = ["first", "second", "third"]
    for name in names:
        d.submit(name, PROMPT[: 40 + len(name)], max_tokens=30)
    for name in names:
        await d.finished(name)
        assert len(d.tokens(name)) == 30
    # A report between steps, of load or that a domain goes on, has the last one's number and no tokens.
    steps = [step.step for step in d.steps if any(output.token_ids for output in step.outputs)]
    assert steps == sorted(set(steps)), "one message for each step"
    together = [len({output.key.request_id for output in step.outputs if output.token_ids}) for step in d.steps]
    assert together.count(3) > 10, "they decode side by side"


async def test_blocks_leave_while_prefill_still_computes(
    workers: tuple[WorkerProcess, WorkerProcess], pair: tuple[GatewayRig, GatewayRig]
) -> None:
    (prefill, _), (p, d) = workers, pair
    slabs: list[int] = []
    while max(slabs, default=0) < 2:
        assert len(slabs) < 8, "each of eight prompts left in one piece, though a slab has room for all of it only then"
        request_id, prompt = f"early-{len(slabs)}", [(5 * i + 60 * len(slabs)) % 250 for i in range(15 * CHUNK_TOKENS)]
        p.submit(request_id, prompt, "PREFILL", max_tokens=6)
        # Not when it is due, but at once.
        d.submit(request_id, prompt, "DECODE", max_tokens=6, source=await p.ticket(request_id, d))
        assert (await d.finished(request_id)).finish == worker_pb2.FINISH_LENGTH
        d.submit(f"whole-{request_id}", prompt, max_tokens=6)
        await d.finished(f"whole-{request_id}")
        assert p.tokens(request_id) + d.tokens(request_id) == d.tokens(f"whole-{request_id}")
        await p.until_idle()
        [left] = re.findall(rf"hand-over left .*request_id={request_id}.* slabs=(\d+)", prefill.log_tail())
        slabs.append(int(left))


async def test_a_handed_over_request_goes_on_as_if_it_had_stayed(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    prompt = PROMPT[::-1]
    tokens = await hand_over(p, d, "moved", prompt, max_tokens=12)
    assert p.outputs["moved"][-1].finish == worker_pb2.FINISH_PREFILLED
    assert p.outputs["moved"][-1].first_position == 0
    assert next(o for o in d.outputs["moved"] if o.token_ids).first_position == 1
    assert sum(output.hand_over_done for output in d.outputs["moved"]) == 1
    d.submit("stayed", prompt, max_tokens=12)
    await d.finished("stayed")
    assert tokens == d.tokens("stayed")


async def offered(worker: GatewayRig, request_id: str, prompt: list[int]) -> None:
    """Runs a request in a loop until its worker wants it elsewhere; it lacks the credit to end before."""
    worker.submit(request_id, prompt, max_tokens=LOOP_TOKENS, sampling=LOOP, credit_tokens=LOOP_CREDIT)
    await worker.until(lambda: any(output.move_due for output in worker.outputs[request_id]))


async def test_a_running_request_goes_on_at_another_worker_with_its_kv(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    prompt = [(11 * i) % 250 for i in range(520)]
    await offered(p, "moving", prompt)
    source = await p.ticket("moving", d)
    # The gateway expects nothing of what stands still, and does not name it.
    p.send(roll_call=worker_pb2.RollCall())
    known = [*prompt, *p.tokens("moving")[:-1]]
    options = {"prompt_tokens": len(prompt), "max_tokens": LOOP_TOKENS, "sampling": LOOP}
    d.submit("moving", known, "DECODE", source=source, **options)
    assert (await d.finished("moving")).finish == worker_pb2.FINISH_LENGTH
    assert sum(output.hand_over_done for output in d.outputs["moving"]) == 1
    assert 256 <= len(p.tokens("moving")) <= LOOP_CREDIT
    d.submit("stayed", prompt, **options)
    await d.finished("stayed")
    assert p.tokens("moving") + d.tokens("moving") == d.tokens("stayed")
    moved = [entry for rig in (p, d) for output in rig.outputs["moving"] for entry in output.logprobs]
    stayed = [entry for output in d.outputs["stayed"] for entry in output.logprobs]
    assert [list(entry.top_token_ids) for entry in moved] == [list(entry.top_token_ids) for entry in stayed]
    assert [entry.logprob for entry in moved] == pytest.approx([entry.logprob for entry in stayed], abs=1e-3)
    assert (await p.status()).counters["moves_done"] >= 1


async def test_a_request_that_nobody_takes_over_goes_on_where_it_stood(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    await offered(p, "staying", [(13 * i) % 250 for i in range(520)])
    source = await p.ticket("staying", d)
    source.ticket.secret = b"0" * 16
    d.submit("staying", [9] * 40, "DECODE", source=source, max_tokens=9)
    assert (await refusal(d, "staying")).code == errors_pb2.ERROR_CODE_WORKER_LOST
    assert not any(output.finish for output in p.outputs["staying"]), "it stands still"
    p.send(stays=[key("staying")], credits=[worker_pb2.Credit(key=key("staying"), tokens=LOOP_TOKENS)])
    assert (await p.finished("staying")).finish == worker_pb2.FINISH_LENGTH
    assert p.tokens("staying") == [7] * LOOP_TOKENS
    assert (await p.status()).counters["moves_failed"] >= 1


async def test_only_the_blocks_that_decode_lacks_travel(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    prompt = [(3 * i) % 250 for i in range(160)]
    first = await hand_over(p, d, "cold", prompt)
    before = (await d.status()).counters["transfer_bytes_received"]
    assert await hand_over(p, d, "warm", prompt) == first
    card = await read_card(d)
    received = (await d.status()).counters["transfer_bytes_received"] - before
    assert received <= card.kv_bytes_per_token * card.block_size, "a block at most: the one that must be computed again"


async def test_hand_over_is_due_once_and_not_for_a_request_of_one_token(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, _ = pair
    p.submit("single", PROMPT, "PREFILL", max_tokens=1)
    assert (await p.finished("single")).finish == worker_pb2.FINISH_LENGTH
    assert len(p.tokens("single")) == 1
    assert not any(output.hand_over_due for output in p.outputs["single"])
    p.submit("long", [9, *PROMPT], "PREFILL")
    await p.finished("long")
    assert sum(output.hand_over_due for output in p.outputs["long"]) == 1
    p.send(aborts=[key("long")])


async def test_an_abort_ends_a_request_in_any_state(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    d.submit("decoding", PROMPT, max_tokens=700)
    await d.until(lambda: bool(d.tokens("decoding")))
    p.submit("held", PROMPT, "PREFILL")
    await p.finished("held")
    source = await p.ticket("held", d)
    source.ticket.secret = b"0" * 16
    d.submit("waiting", PROMPT, "DECODE", source=source)
    d.send(aborts=[key("decoding"), key("waiting"), key("unknown")])
    p.send(aborts=[key("held")])
    assert (await d.finished("decoding")).finish == worker_pb2.FINISH_ABORTED
    assert (await d.finished("waiting")).finish in (worker_pb2.FINISH_ABORTED, worker_pb2.FINISH_ERROR)


async def test_a_ticket_works_once_and_a_forged_one_never(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    p.submit("once", PROMPT, "PREFILL")
    await p.due("once")
    source = await p.ticket("once", d)
    forged = worker_pb2.HandOverSource(prefill=source.prefill, ticket=source.ticket)
    forged.ticket.secret = b"f" * 16
    d.submit("once", PROMPT, "DECODE", source=forged, attempt=1)
    assert (await refusal(d, "once")).code == errors_pb2.ERROR_CODE_WORKER_LOST
    d.outputs.clear()
    d.submit("once", PROMPT, "DECODE", source=source)
    assert (await d.finished("once")).finish == worker_pb2.FINISH_LENGTH
    d.outputs.clear()
    d.submit("once", PROMPT, "DECODE", source=source, attempt=2)
    error = await refusal(d, "once")
    assert error.code == errors_pb2.ERROR_CODE_WORKER_LOST
    assert "unknown or spent" in error.message


async def test_damaged_hand_overs_fail_and_their_source_is_reported_as_not_to_be_taken_from(
    pair: tuple[GatewayRig, GatewayRig],
) -> None:
    _, d = pair
    card = await read_card(d)
    prompt = [(3 * i + 111) % 250 for i in range(3 * card.block_size)]

    async def quarantined() -> set[str]:
        return {source for load in (await d.status()).loads for source in load.quarantined}

    async with flipping_peer(card.block_size * card.kv_bytes_per_token, "ucx") as (peer, target):
        peer.pull_blocks = 3
        for hit in range(3):
            assert await quarantined() == set(), f"after {hit} damaged transfers"
            ticket = worker_pb2.Ticket(
                secret=b"t" * 16, prefill=target.domain, decode=d.target().domain, deadline_s=300.0
            )
            source = worker_pb2.HandOverSource(prefill=target, ticket=ticket)
            d.submit(f"damaged-{hit}", prompt, "DECODE", source=source)
            error = await refusal(d, f"damaged-{hit}")
            assert error.code == errors_pb2.ERROR_CODE_WORKER_LOST
            assert "not the bytes sent" in error.message
            assert d.tokens(f"damaged-{hit}") == []
    assert await quarantined() == {"flipping"}
    assert (await d.status()).counters["damaged_transfers"] == 3


async def test_a_hand_over_of_an_ended_request_is_answered_with_an_error(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    p.send(hand_overs=[worker_pb2.HandOver(key=key("never"), target=d.target())])
    assert (await refusal(p, "never")).code == errors_pb2.ERROR_CODE_NOT_FOUND


async def test_what_cannot_start_is_refused_by_name(pair: tuple[GatewayRig, GatewayRig]) -> None:
    _, d = pair
    d.submit("revision", PROMPT, model_revision="other")
    d.submit("adapter", PROMPT, adapter="lora")
    d.submit("domain", PROMPT, domain=5)
    d.submit("credit", PROMPT, credit_tokens=0)
    d.submit("source", PROMPT, "DECODE")
    d.submit("context", PROMPT * 20)
    expected = {
        "revision": (errors_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model_revision"),
        "adapter": (errors_pb2.ERROR_CODE_UNSUPPORTED, "adapter"),
        "domain": (errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "domain"),
        "credit": (errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "credit_tokens"),
        "source": (errors_pb2.ERROR_CODE_INVALID_ARGUMENT, "source"),
    }
    for request_id, (code, field) in expected.items():
        error = await refusal(d, request_id)
        assert (error.code, error.field) == (code, field)
    assert (await refusal(d, "context")).code == errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG


async def test_a_live_attempt_is_not_started_twice_and_a_newer_one_ends_it(pair: tuple[GatewayRig, GatewayRig]) -> None:
    _, d = pair
    d.submit("twice", PROMPT, max_tokens=600)
    d.submit("twice", PROMPT, max_tokens=600)
    assert (await refusal(d, "twice")).code == errors_pb2.ERROR_CODE_ALREADY_EXISTS
    d.outputs.clear()
    d.submit("twice", PROMPT, max_tokens=4, attempt=1)
    await d.finished("twice")
    await d.until_idle()


async def test_a_request_waits_for_credit_alone(pair: tuple[GatewayRig, GatewayRig]) -> None:
    _, d = pair
    d.submit("poor", PROMPT, max_tokens=20, credit_tokens=3)
    d.submit("rich", PROMPT[1:], max_tokens=20)
    await d.finished("rich")
    assert len(d.tokens("poor")) == 3
    d.send(credits=[worker_pb2.Credit(key=key("poor"), tokens=100)])
    await d.finished("poor")
    assert len(d.tokens("poor")) == 20


async def test_a_silent_gateway_and_a_gateway_that_leaves_lose_their_requests(
    workers: tuple[WorkerProcess, WorkerProcess], pair: tuple[GatewayRig, GatewayRig], connect: Connect
) -> None:
    prefill, decode = workers
    async with connect(prefill) as silent:
        silent.submit("silent", PROMPT, "PREFILL")
        silent.stop_pinging()
        await silent.until_ended()
        assert "fallen silent" in str(silent.ended)
    async with connect(decode) as leaving:
        leaving.submit("leaving", PROMPT, max_tokens=700)
        await leaving.until(lambda: bool(leaving.tokens("leaving")))


async def test_another_incarnation_is_refused(pair: tuple[GatewayRig, GatewayRig]) -> None:
    _, d = pair
    hello = worker_pb2.Hello(gateway=d.welcome.instance, expected_incarnation="old")
    call = d.stub.Connect(iter([worker_pb2.ConnectRequest(hello=hello)]))
    with pytest.raises(Exception, match="incarnation old has ended"):
        await call.read()


async def test_the_card_names_files_that_can_be_fetched(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    card = await read_card(p)
    assert (await read_card(d)).revision == card.revision == p.welcome.model.revision
    assert (card.block_size, card.vocab_size, list(card.eos_token_ids)) == (32, 264, [258])
    assert p.welcome.model.kv_format == card.kv_format != ""
    assert b'"model"' in await read_asset(p, card.tokenizer_digest)
    assert b"im_start" in await read_asset(p, card.chat_template_digest)


async def test_the_snapshot_follows_the_cache_and_a_reset_acts_on_an_idle_worker(
    pair: tuple[GatewayRig, GatewayRig],
) -> None:
    _, d = pair
    d.submit("cached", PROMPT)
    await d.finished("cached")

    async def blocks() -> int:
        parts = [part async for part in d.stub.GetSnapshot(worker_pb2.GetSnapshotRequest())]
        assert parts[-1].last
        return sum(len(run.block_hashes) // 16 for part in parts for run in part.blocks)

    assert await blocks() >= len(PROMPT) // 32
    response = await d.stub.ResetCache(worker_pb2.ResetCacheRequest())
    assert response.blocks >= len(PROMPT) // 32
    async with asyncio.timeout(120):
        while await blocks():
            await d.status()


async def test_aborts_at_random_moments_of_hand_overs_leave_nothing(pair: tuple[GatewayRig, GatewayRig]) -> None:
    p, d = pair
    moments = random.Random(5)

    async def one(number: int) -> None:
        request_id, prompt = f"random-{number}", [(number * 17 + 3 * i) % 250 for i in range(30 + 5 * number)]
        p.submit(request_id, prompt, "PREFILL", max_tokens=40)
        if moments.random() < 0.2:
            p.send(aborts=[key(request_id)])
            return
        await p.due(request_id)
        source = await p.ticket(request_id, d)
        d.submit(request_id, prompt, "DECODE", max_tokens=40, source=source)
        await asyncio.sleep(moments.random() * 0.2)
        legs = moments.choice([[p], [d], [p, d], []])
        for leg in legs:
            leg.send(aborts=[key(request_id)])
        await d.finished(request_id)
        if not any(output.hand_over_done for output in d.outputs[request_id]):
            p.send(aborts=[key(request_id)])

    await asyncio.gather(*(one(number) for number in range(40)))
    finishes = {output.finish for number in range(40) for output in d.outputs[f"random-{number}"] if output.finish}
    assert worker_pb2.FINISH_LENGTH in finishes
    assert worker_pb2.FINISH_ABORTED in finishes


async def test_a_roll_call_ends_what_the_gateway_lost_and_names_what_the_worker_has_not(
    pair: tuple[GatewayRig, GatewayRig],
) -> None:
    p, d = pair
    d.submit("kept", PROMPT, max_tokens=800, credit_tokens=4)
    d.submit("lost by the gateway", PROMPT, max_tokens=800, credit_tokens=4)
    p.submit("held", PROMPT, "PREFILL")
    await p.finished("held")
    await d.until(lambda: len(d.tokens("kept")) == len(d.tokens("lost by the gateway")) == 4)
    ended = (await d.status()).counters.get("requests_whole_aborted", 0)
    d.send(roll_call=worker_pb2.RollCall(keys=[key("kept"), key("never came")]))
    await d.until(lambda: bool(d.missing))
    assert d.missing == {"never came"}
    assert (await d.status()).counters["requests_whole_aborted"] == ended + 1
    assert (await d.status()).holds["requests"] == 1
    assert not any(output.finish for output in d.outputs["lost by the gateway"])
    # Its last output is out: who still waits for one has lost it, and the KV stays for decode.
    p.send(roll_call=worker_pb2.RollCall(keys=[key("held")]))
    await p.until(lambda: "held" in p.missing)
    assert (await p.status()).holds["held_requests"] == 1
    p.send(aborts=[key("held")])
    d.send(aborts=[key("kept")])


async def test_credit_that_was_lost_comes_back_with_the_next_roll_call(pair: tuple[GatewayRig, GatewayRig]) -> None:
    _, d = pair
    d.submit("credited", PROMPT, max_tokens=12, credit_tokens=4)
    d.submit("of an older gateway", PROMPT, max_tokens=12, credit_tokens=4)
    keys = [key("credited"), key("of an older gateway")]
    await d.until(lambda: len(d.tokens("credited")) == len(d.tokens("of an older gateway")) == 4)
    lost = (await d.status()).counters.get("forgotten_credit", 0)
    d.send(roll_call=worker_pb2.RollCall(keys=keys))
    d.send(roll_call=worker_pb2.RollCall(keys=keys, emit_until=[9, 0]))
    await d.until(lambda: len(d.tokens("credited")) == 9)
    assert len(d.tokens("of an older gateway")) == 4
    d.send(roll_call=worker_pb2.RollCall(keys=keys, emit_until=[12, 12]))
    assert (await d.finished("credited")).finish == worker_pb2.FINISH_LENGTH
    assert (await d.finished("of an older gateway")).finish == worker_pb2.FINISH_LENGTH
    assert (await d.status()).counters["forgotten_credit"] == lost + 3


async def test_afterwards_ranks_and_services_have_agreed_at_every_roll_call(
    pair: tuple[GatewayRig, GatewayRig],
) -> None:
    for rig in pair:
        counters = (await rig.status()).counters
        assert counters.get("forgotten_rank", 0) == counters.get("forgotten_service", 0) == 0
