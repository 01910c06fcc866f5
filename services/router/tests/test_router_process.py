"""The router process on real etcd and NATS, with emulated workers."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from tidemill.errors import detail_of
from tidemill.mesh.v1.common_pb2 import TIER_L3
from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_KVSTORE, ROLE_PREFILL
from tidemill.mesh.v1.router_pb2 import LiveReservation, Report, RestoreRequest
from tidemill.v1 import errors_pb2
from tidemill_kvcache.events import stored_event
from tidemill_kvcache.hashing import chain_root, hash_blocks
from tidemill_kvcache.kv_format import format_id


def prompt(first: int, blocks: int = 20) -> list[bytes]:
    return hash_blocks(chain_root(b"model", b""), range(first, first + blocks), 1)


async def test_events_draw_requests_to_their_holder_and_lost_ones_are_made_good(mesh: Any) -> None:
    # A prompt whose blocks can be fetched need not go to their holder.
    await mesh.start_router("--peer-fetch=false")
    p0, p1 = await mesh.add("p-0", ROLE_PREFILL), await mesh.add("p-1", ROLE_PREFILL)
    d0 = await mesh.add("d-0", ROLE_DECODE)
    p1.store(prompt(0))
    await mesh.until_indexed(p0, p1, d0)
    for i in range(3):
        placed = await mesh.glance(prompt(0), request_id=f"a{i}")
        assert placed.target.domain == p1.domain
        assert placed.expected_cached.l1 == 20 * 32

    p1.store(prompt(1000), lose=True)
    p1.remove(prompt(0)[10:][::-1], lose=True)
    p0.store(prompt(2000))
    await mesh.until_indexed(p0, p1)
    assert (await mesh.instance("p-1")).resyncs == 2
    counters = (await mesh.status()).counters
    assert (counters["replays"], counters["resyncs"]) == (1, 3), "the lost batches were sent again, and no block list"
    assert (await mesh.glance(prompt(1000))).target.domain == p1.domain
    assert (await mesh.glance(prompt(0))).expected_cached.l1 == 10 * 32
    for i in range(100):
        p1.store(prompt(10_000 + 100 * i, 5))
    await mesh.until_indexed(p1)
    assert (await mesh.instance("p-1")).resyncs == 2, "a healed gap is healed for good"

    p1.clear()
    await mesh.until_indexed(p1)
    assert (await mesh.glance(prompt(1000))).expected_cached.l1 == 0
    p0.store(prompt(3000))
    await p0.restart_domain()
    p0.report()
    await mesh.until_indexed(p0)
    assert (await mesh.instance("p-0")).domain == p0.domain
    assert (await mesh.instance("p-0")).index_blocks == 0


async def test_a_restarted_router_knows_prefixes_and_reservations_again(mesh: Any) -> None:
    await mesh.start_router()
    workers = [await mesh.add(f"p-{i}", ROLE_PREFILL) for i in range(4)]
    workers.append(await mesh.add("d-0", ROLE_DECODE))
    for number, worker in enumerate(workers[:4]):
        worker.store(prompt(1000 * number))
    await mesh.until_indexed(*workers)
    gateway, _ = await mesh.add_gateway("gateway-0")
    held = await mesh.place(prompt(0), gateway=gateway)
    await mesh.kill_router()
    workers[2].store(prompt(8000))
    workers[3].snapshots_hang = True
    await mesh.start_router("--snapshot-timeout-s=300")
    for worker in workers:
        worker.report()
    started = time.monotonic()
    await mesh.until_indexed(*workers[:3], workers[4])
    assert time.monotonic() - started < 300.0
    assert (await mesh.instance("p-3")).index_blocks == 0, "a slow worker is cold, and keeps nobody waiting"
    for number in range(3):
        placed = await mesh.place(prompt(1000 * number), request_id=f"b{number}")
        assert placed.target.domain.instance == f"p-{number}"

    alive = Report(reservation_id=held.reservation_id, kind=Report.KIND_ALIVE, domain=held.target.domain)
    answer = await mesh.report(alive, gateway=gateway)
    assert list(answer.unknown_reservation_ids) == [held.reservation_id]
    live = LiveReservation(reservation_id=held.reservation_id, request_id="q", domain=held.target.domain, tokens=660)
    await mesh.stub.Restore(RestoreRequest(gateway=gateway, reservations=[live]))
    answer = await mesh.report(alive, gateway=gateway)
    assert list(answer.unknown_reservation_ids) == []


async def test_a_lost_instance_is_fenced_until_it_proves_to_be_alive(mesh: Any) -> None:
    await mesh.start_router()
    p0, p1 = await mesh.add("p-0", ROLE_PREFILL), await mesh.add("p-1", ROLE_PREFILL)
    await mesh.add("d-0", ROLE_DECODE)
    p0.store(prompt(0))
    await mesh.until_indexed(p0, p1)
    placed = await mesh.place(prompt(0))
    assert placed.target.domain == p0.domain
    await mesh.report(
        Report(
            reservation_id=placed.reservation_id,
            kind=Report.KIND_FAILED,
            instance_lost=True,
            domain=placed.target.domain,
        )
    )
    assert (await mesh.instance("p-0")).fenced
    for i in range(5):
        assert (await mesh.place(prompt(0), request_id=f"a{i}")).target.domain == p1.domain
    await asyncio.sleep(0.15)
    p0.report()

    async def lifted() -> bool:
        return not (await mesh.instance("p-0")).fenced

    await mesh.until(lifted)
    await p0.stop()

    async def gone() -> bool:
        return all(view.domain.instance != "p-0" for view in (await mesh.status()).instances)

    await mesh.until(gone)
    assert (await mesh.status()).index_blocks == 0


async def test_holds_return_to_zero_whatever_ends_them(mesh: Any) -> None:
    await mesh.start_router("--reservation-s=10")
    workers = [await mesh.add("p-0", ROLE_PREFILL), await mesh.add("d-0", ROLE_DECODE)]
    await mesh.until_indexed(*workers)
    gateway, registration = await mesh.add_gateway("gateway-0")
    ids = []
    for place in (mesh.place, mesh.place_decode):
        # At once, since they stand for some seconds only.
        placed = [place(prompt(100 * i), request_id=f"r{i}", gateway=gateway) for i in range(30)]
        ids += [response.reservation_id for response in await asyncio.gather(*placed)]
    holds = (await mesh.status()).holds
    assert (holds["reservations_prefill"], holds["reservations_decode"]) == (30, 30)
    kinds = [Report.KIND_DONE, Report.KIND_CANCELLED, Report.KIND_FAILED]
    await mesh.report(*(Report(reservation_id=r, kind=kinds[i % 3]) for i, r in enumerate(ids[:40])), gateway=gateway)
    holds = (await mesh.status()).holds
    assert holds["reservations_prefill"] + holds["reservations_decode"] == 20
    for i in range(5):
        await mesh.place(prompt(0), request_id=f"deadline{i}")
    await registration.deregister()

    async def all_zero() -> bool:
        return not any((await mesh.status()).holds.values())

    await mesh.until(all_zero)
    counters = (await mesh.status()).counters
    assert counters["reservations_ended_gateway_lost"] >= 1
    assert counters["reservations_ended_deadline"] >= 1


async def test_refusals_travel_as_error_details(mesh: Any) -> None:
    await mesh.start_router()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.place(prompt(0))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    detail = detail_of(caught.value)
    assert detail.code == errors_pb2.ERROR_CODE_UNAVAILABLE
    assert "decode" in detail.message
    assert detail.retry_after_s > 0
    await mesh.add("d-0", ROLE_DECODE)
    await mesh.instance("d-0")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.place(prompt(0), model_revision="no such revision")
    assert detail_of(caught.value).code == errors_pb2.ERROR_CODE_MODEL_NOT_FOUND
    placed = await mesh.place(prompt(0))
    assert (placed.whole, placed.terms["degraded"]) == (True, 1.0)


async def test_blocks_in_a_store_count_for_prefill_instances_that_can_read_them(mesh: Any) -> None:
    await mesh.start_router()
    workers = [await mesh.add("p-0", ROLE_PREFILL, kv_format="exact"), await mesh.add("d-0", ROLE_DECODE)]
    store = await mesh.add("kv-0", ROLE_KVSTORE)
    await mesh.until_indexed(*workers)

    async def seen() -> bool:
        # What a store without snapshots has said before the router knew it is lost.
        store.store(prompt(0))
        return (await mesh.glance(prompt(0))).expected_cached.l3 > 0

    await mesh.until(seen)
    store.remove(prompt(0)[10:])

    async def shrunk() -> bool:
        return (await mesh.glance(prompt(0))).expected_cached.l3 == 10 * 32

    await mesh.until(shrunk)
    # Told first, so that it is known when the other one is.
    store.publish(stored_event(b"", prompt(1000), TIER_L3, format_id("rounded")))
    store.publish(stored_event(b"", prompt(2000), TIER_L3, format_id("exact")))

    async def told() -> bool:
        return (await mesh.glance(prompt(2000))).expected_cached.l3 == 20 * 32

    await mesh.until(told)
    assert (await mesh.glance(prompt(1000))).expected_cached.l3 == 0, "the instance cannot read blocks of that format"
    await store.stop()

    async def gone() -> bool:
        placed = [await mesh.glance(prompt(first)) for first in (0, 2000)]
        return not any(p.expected_cached.l3 for p in placed) and (await mesh.status()).index_blocks == 0

    await mesh.until(gone)


async def test_without_etcd_and_nats_the_last_view_serves_and_says_so(mesh: Any, own_servers: Any) -> None:
    await mesh.start_router()
    workers = [await mesh.add("p-0", ROLE_PREFILL), await mesh.add("d-0", ROLE_DECODE)]
    workers[0].store(prompt(0))
    await mesh.until_indexed(*workers)
    status = await mesh.status()
    assert (status.etcd_connected, status.nats_connected) == (True, True)
    own_servers.stop()

    async def both_away() -> bool:
        seen = await mesh.status()
        return not (seen.etcd_connected or seen.nats_connected)

    await mesh.until(both_away)
    placed = await mesh.place(prompt(0))
    assert placed.target.domain.instance == "p-0"
    assert placed.expected_cached.l1 == 20 * 32
    assert (await mesh.place_decode(prompt(0))).target.domain.instance == "d-0"


async def test_two_routers_share_reservations_and_the_one_that_stays_keeps_them(mesh: Any) -> None:
    # Longer than the second router takes to start on any machine.
    stand = "--reservation-s=100"
    await mesh.start_router(stand)
    for name in ("p-0", "p-1"):
        await mesh.add(name, ROLE_PREFILL)
    await mesh.add("d-0", ROLE_DECODE)
    gateway, _ = await mesh.add_gateway("gateway-0")
    early = await mesh.place(prompt(0), gateway=gateway, request_id="early")
    other = await mesh.add_replica("router-u", stand)

    def sees(reservations: int) -> Any:
        async def seen() -> bool:
            holds = (await other.status()).holds
            return bool(holds["reservations_prefill"] == reservations)

        return seen

    await mesh.until(sees(1))
    late = [await mesh.place(prompt(100 * i), gateway=gateway, request_id=f"late{i}") for i in range(1, 4)]
    await mesh.until(sees(4))
    ended = Report(reservation_id=late[0].reservation_id, kind=Report.KIND_DONE)
    assert not (await other.report(ended, gateway=gateway)).unknown_reservation_ids

    async def first_knows() -> bool:
        return bool((await mesh.status()).holds["reservations_prefill"] == 3)

    await mesh.until(first_knows)
    await mesh.kill_router()
    reports = [Report(reservation_id=p.reservation_id, kind=Report.KIND_DONE) for p in (early, *late[1:])]
    assert not (await other.report(*reports, gateway=gateway)).unknown_reservation_ids
    status = await other.status()
    assert sum(count for name, count in status.holds.items() if name.startswith("reservations_")) == 0
    assert status.holds["pending_prefix_blocks"] == 0
