"""Workers that lose ranks, peers or their place: everything ends by name, and nothing is left."""

import asyncio
import os
import signal
import time

import pytest
from gateway_rig import GatewayRig
from worker_rig import Connect, StartWorker, WorkerProcess

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2

PROMPT = [(11 * i) % 250 for i in range(150)]


@pytest.fixture(scope="module")
def fleet(start_worker: StartWorker) -> dict[str, WorkerProcess]:
    """All workers of these tests, started at the same time: two that come back, and three that end."""
    settings = {"restart_backoff_s": 0.05, "restart_limit": 100, "hold_s": 6.0}
    return {
        "prefill": start_worker("prefill", "fault-p", **settings),
        "decode": start_worker("decode", "fault-d", **settings),
        "killed": start_worker("prefill", "fault-p2", max_num_batched_tokens=16),
        "drained": start_worker("decode", "drain-d", drain_s=300),
        "hurried": start_worker("decode", "drain-d2", drain_s=0.3),
    }


@pytest.fixture
def workers(fleet: dict[str, WorkerProcess]) -> tuple[WorkerProcess, WorkerProcess]:
    """The prefill and the decode worker that come back from what is done to them."""
    return fleet["prefill"], fleet["decode"]


def wait_ended(pids: list[int]) -> None:
    """Waits until none of the processes exists."""
    give_up_at = time.monotonic() + 120
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < give_up_at, f"ranks outlive their service: {pids}"
        time.sleep(0.05)


async def next_epoch(rig: GatewayRig, old: str) -> None:
    """Waits until the worker's domain is up under another epoch."""
    async with asyncio.timeout(300):
        while True:
            domains = (await rig.status()).record.domains
            if domains and domains[0].epoch != old:
                return
            await asyncio.sleep(0.1)


async def test_a_killed_rank_ends_its_requests_by_name_and_comes_back(
    workers: tuple[WorkerProcess, WorkerProcess], connect: Connect
) -> None:
    _, decode = workers
    async with connect(decode) as d:
        epoch = d.welcome.domains[0].epoch
        d.submit("lost", PROMPT, max_tokens=800)
        await d.until(lambda: bool(d.tokens("lost")))
        os.kill(decode.rank_pids()[0], signal.SIGKILL)
        output = await d.finished("lost")
        assert output.error.code == errors_pb2.ERROR_CODE_WORKER_LOST
        assert "SIGKILL" in output.error.message
        d.submit("early", PROMPT)
        assert (await d.finished("early")).error.code == errors_pb2.ERROR_CODE_UNAVAILABLE
        await next_epoch(d, epoch)
        d.submit("again", PROMPT)
        assert (await d.finished("again")).finish == worker_pb2.FINISH_LENGTH
        await d.until_idle()


async def test_a_prefill_rank_that_dies_with_the_kv_costs_decode_an_error_and_no_hang(
    workers: tuple[WorkerProcess, WorkerProcess], connect: Connect
) -> None:
    prefill, decode = workers
    async with connect(prefill) as p, connect(decode) as d:
        epoch = p.welcome.domains[0].epoch
        p.submit("orphan", PROMPT, "PREFILL")
        await p.finished("orphan")
        source = await p.ticket("orphan", d)
        os.kill(prefill.rank_pids()[0], signal.SIGKILL)
        await next_epoch(p, epoch)
        d.submit("orphan", PROMPT, "DECODE", source=source)
        assert (await d.finished("orphan")).error.code == errors_pb2.ERROR_CODE_WORKER_LOST
        await p.until_idle()
        await d.until_idle()


async def test_a_frozen_prefill_rank_ends_the_hand_over_within_the_hold(
    workers: tuple[WorkerProcess, WorkerProcess], connect: Connect
) -> None:
    prefill, decode = workers
    async with connect(prefill) as p, connect(decode) as d:
        p.submit("frozen", PROMPT, "PREFILL")
        await p.finished("frozen")
        source = await p.ticket("frozen", d)
        pid = prefill.rank_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            d.submit("frozen", PROMPT, "DECODE", source=source)
            assert (await d.finished("frozen")).error.code == errors_pb2.ERROR_CODE_WORKER_LOST
        finally:
            os.kill(pid, signal.SIGCONT)
        await p.until_idle()
        await d.until_idle()


async def test_kv_that_nobody_fetches_is_given_up_at_its_deadline(
    workers: tuple[WorkerProcess, WorkerProcess], connect: Connect
) -> None:
    prefill, decode = workers
    async with connect(prefill) as p, connect(decode) as d:
        p.submit("unfetched", PROMPT, "PREFILL")
        await p.finished("unfetched")
        source = await p.ticket("unfetched", d)
        assert (await p.status()).holds["held_requests"] == 1
        await p.until_idle()
        assert (await p.status()).counters["expired_hold"] >= 1
        d.submit("unfetched", PROMPT, "DECODE", source=source)
        assert (await d.finished("unfetched")).error.code == errors_pb2.ERROR_CODE_WORKER_LOST
        await d.until_idle()


async def test_a_prefill_worker_that_is_killed_costs_decode_an_error_and_no_hang(
    fleet: dict[str, WorkerProcess], connect: Connect
) -> None:
    prefill, decode = fleet["killed"], fleet["decode"]
    async with connect(prefill) as p, connect(decode) as d:
        p.submit("killed", PROMPT * 4, "PREFILL")
        await p.due("killed")
        source = await p.ticket("killed", d)
        ranks = prefill.rank_pids()
        os.kill(prefill.process.pid, signal.SIGKILL)
        d.submit("killed", PROMPT * 4, "DECODE", source=source)
        assert (await d.finished("killed")).error.code == errors_pb2.ERROR_CODE_WORKER_LOST
        await d.until_idle()
        await asyncio.to_thread(wait_ended, ranks)


async def test_a_drain_ends_running_work_well_and_refuses_new_work(
    fleet: dict[str, WorkerProcess], connect: Connect
) -> None:
    worker = fleet["drained"]
    async with connect(worker) as d:
        d.submit("running", PROMPT, max_tokens=300)
        await d.until(lambda: bool(d.tokens("running")))
        await d.stub.Drain(worker_pb2.DrainRequest(deadline_s=300))
        d.submit("late", PROMPT)
        assert (await d.finished("late")).error.code == errors_pb2.ERROR_CODE_UNAVAILABLE
        assert (await d.status()).record.draining
        assert (await d.finished("running")).finish == worker_pb2.FINISH_LENGTH
        await d.until_ended()
    worker.wait_gone()


async def test_what_outlives_the_drain_is_told_so_that_it_is_placed_anew(
    fleet: dict[str, WorkerProcess], connect: Connect
) -> None:
    worker = fleet["hurried"]
    async with connect(worker) as d:
        d.submit("long", PROMPT, max_tokens=800)
        await d.until(lambda: bool(d.tokens("long")))
        worker.terminate()
        output = await d.finished("long")
        assert output.error.code == errors_pb2.ERROR_CODE_WORKER_LOST
        assert "drained" in output.error.message
    worker.wait_gone()
