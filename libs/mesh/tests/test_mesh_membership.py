"""Membership on a real etcd: registration under a lease, its loss, and a view that outlives etcd."""

import asyncio
import os
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tidemill.mesh.v1 import membership_pb2
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.membership import InstanceView, Membership
from tidemill_mesh.membership import view as view_module
from tidemill_mesh.membership.etcd import EtcdClient, LeaseClient, prefix_end
from tidemill_mesh.membership.registration import instances_prefix, lease_ttl_s
from tidemill_mesh.tasks import wait_up_to

SettingsMaker = Callable[..., ServiceSettings]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]
Record = membership_pb2.MembershipRecord
SHORT_S = 0.6
"""Of silence that is noticed as a loss; a lease lasts 5 s then."""
RESTART_S = 3.0
"""For what has to find a server again soon, and keeps its lease meanwhile."""
AUDIT_S = 2.0
"""Between two looks at whether a watch tells of all, where each silence is looked into."""


def record(instance: str = "prefill-1", role: int = membership_pb2.ROLE_PREFILL, **fields: Any) -> Record:
    return Record(instance=instance, role=role, **fields)  # type: ignore[arg-type]


def etcdctl(server: Any, *arguments: str) -> str:
    argv = [str(Path(sysconfig.get_path("scripts")) / "etcdctl"), f"--endpoints=http://{server.address}", *arguments]
    return subprocess.run(
        argv, check=True, capture_output=True, text=True, env={**os.environ, "ETCDCTL_API": "3"}
    ).stdout


class Side:
    """A membership and a view of one process."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.membership = Membership(settings)
        self.view = InstanceView(settings)
        self.changes: list[tuple[Record | None, Record | None]] = []
        self.view.subscribe(lambda old, new: self.changes.append((old, new)))

    async def __aenter__(self) -> "Side":
        await self.view.start()
        await self.membership.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.membership.close()
        await self.view.close()


async def test_a_registered_record_is_seen_with_its_incarnation(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address)) as side:
        registration = await side.membership.register(record(endpoint="h:1", version="1.2.3"))
        await eventually(lambda: "prefill-1" in side.view.records)
        seen = side.view.records["prefill-1"]
        assert (seen.endpoint, seen.version, seen.incarnation) == ("h:1", "1.2.3", registration.incarnation)
        assert side.view.connected
        assert side.view.age_s < 60


async def test_updates_and_the_end_reach_observers_with_old_and_new(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address)) as side:
        registration = await side.membership.register(record())
        await registration.update(record(draining=True))
        await registration.deregister()
        await registration.deregister()
        await eventually(lambda: len(side.changes) == 3)
        assert [(bool(old), bool(new)) for old, new in side.changes] == [(False, True), (True, True), (True, False)]
        assert side.changes[1][1] is not None
        assert side.changes[1][1].draining
        assert side.view.records == {}


async def test_a_late_observer_first_hears_what_is_known_and_can_leave(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address)) as side:
        registration = await side.membership.register(record())
        await eventually(lambda: side.view.records)
        heard: list[Record | None] = []
        leave = side.view.subscribe(lambda _old, new: heard.append(new))
        assert [item.instance for item in heard if item] == ["prefill-1"]
        leave()
        leave()
        await registration.deregister()
        await eventually(lambda: not side.view.records)
        assert len(heard) == 1


async def test_an_observer_that_raises_blinds_nobody(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address)) as side:

        def broken(_old: Record | None, _new: Record | None) -> None:
            raise ValueError("broken observer")

        side.view.subscribe(broken)
        await side.membership.register(record())
        await eventually(lambda: side.changes)
        assert side.view.records


async def test_a_changed_role_moves_the_record_without_losing_sight_of_it(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address)) as side:
        registration = await side.membership.register(record())
        await registration.update(record(role=membership_pb2.ROLE_DECODE))
        await eventually(lambda: len(side.changes) == 2)
        assert all(new is not None for _old, new in side.changes)
        assert etcdctl(etcd, "get", "--prefix", "--keys-only", instances_prefix(side.settings.mesh)).split() == [
            f"{instances_prefix(side.settings.mesh)}decode/prefill-1"
        ]


async def test_meshes_do_not_see_each_other(etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually) -> None:
    ours, theirs = mesh_settings(etcd=etcd.address, mesh="m1"), mesh_settings(etcd=etcd.address, mesh="m10")
    async with Side(ours) as one, Side(theirs) as other:
        await other.membership.register(record("prefill-9"))
        await one.membership.register(record("prefill-1"))
        await eventually(lambda: one.view.records and other.view.records)
        assert set(one.view.records) == {"prefill-1"}


@pytest.mark.parametrize("instance", ["", "Prefill-1", "a/b", "a" * 64, "ä"])
async def test_an_instance_id_that_would_break_keys_or_subjects_is_refused(
    etcd: Any, mesh_settings: SettingsMaker, instance: str
) -> None:
    async with Side(mesh_settings(etcd=etcd.address)) as side:
        with pytest.raises(ValueError, match="instance id"):
            await side.membership.register(record(instance))


async def test_records_that_cannot_be_read_are_skipped_and_newer_fields_ignored(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address)) as side:
        prefix = instances_prefix(side.settings.mesh)
        etcdctl(etcd, "put", f"{prefix}decode/decode-1", "not json")
        etcdctl(etcd, "put", f"{prefix}decode/decode-2", '{"instance": "someone-else"}')
        etcdctl(etcd, "put", f"{prefix}decode/decode-3", '{"instance": "decode-3", "fieldFromTheFuture": 1}')
        await eventually(lambda: side.view.records)
        assert set(side.view.records) == {"decode-3"}


async def test_a_lost_lease_gives_a_new_incarnation_that_registers_by_itself(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address, liveness_s=RESTART_S)) as side:
        registration = await side.membership.register(record())
        first, told = registration.incarnation, []
        registration.on_new_incarnation.append(told.append)
        await eventually(lambda: side.view.records)
        client = LeaseClient(side.settings)
        await asyncio.to_thread(client.revoke, side.membership._keeper.lease, 5.0)
        client.close()
        # As it is told: between two looks it may be gone and back.
        await eventually(lambda: len(side.changes) == 3)
        assert [new is not None for _old, new in side.changes] == [True, False, True]
        assert registration.incarnation != first
        assert told == [registration.incarnation]
        assert side.view.records["prefill-1"].incarnation == registration.incarnation


async def test_a_record_that_somebody_deleted_comes_back(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=etcd.address, liveness_s=SHORT_S)) as side:
        registration = await side.membership.register(record())
        incarnation = registration.incarnation
        await eventually(lambda: side.view.records)
        etcdctl(etcd, "del", registration.key)
        # As it is told: between two looks it may be gone and back.
        await eventually(lambda: len(side.changes) == 3)
        assert [new is not None for _old, new in side.changes] == [True, False, True]
        assert side.view.records["prefill-1"].incarnation == incarnation


async def test_a_successor_of_the_same_id_is_not_taken_out_by_its_predecessors_end(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    settings = mesh_settings(etcd=etcd.address)
    async with Side(settings) as new:
        async with Side(settings) as old:
            await old.membership.register(record())
            successor = await new.membership.register(record())
        await eventually(lambda: new.view.records["prefill-1"].incarnation == successor.incarnation)
        assert successor.incarnation in etcdctl(etcd, "get", successor.key)


async def test_a_blocked_event_loop_keeps_its_membership(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    settings = mesh_settings(etcd=etcd.address, liveness_s=SHORT_S)
    async with Side(settings) as side:
        registration = await side.membership.register(record())
        await eventually(lambda: side.view.records)
        incarnation = registration.incarnation
        time.sleep(lease_ttl_s(settings.liveness_s) + 2)  # noqa: ASYNC251
        assert incarnation in etcdctl(etcd, "get", registration.key)
        await side.view._client.head(side.view._prefix)  # type: ignore[union-attr]
        assert registration.incarnation == incarnation
        assert [new is not None for _old, new in side.changes] == [True]


async def test_it_starts_before_etcd_and_registers_when_it_comes(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    own_etcd.stop()
    async with Side(mesh_settings(etcd=own_etcd.address, liveness_s=SHORT_S)) as side:
        registration = await side.membership.register(record())
        assert not side.view.connected
        await registration.update(record(draining=True))
        await asyncio.to_thread(own_etcd.start)
        await eventually(lambda: side.view.connected and side.view.records)
        assert side.view.records["prefill-1"].draining


async def test_a_killed_etcd_leaves_the_last_view_and_nothing_is_missed_or_repeated(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=own_etcd.address, liveness_s=RESTART_S)) as side:
        registration = await side.membership.register(record())
        await eventually(lambda: side.view.records)
        incarnation, threads = registration.incarnation, 0
        for life in range(2):
            own_etcd.send(signal.SIGKILL)
            await eventually(lambda: not side.view.connected)
            assert set(side.view.records) >= {"prefill-1"}
            await asyncio.to_thread(own_etcd.start)
            etcdctl(own_etcd, "put", f"{side.view._prefix}decode/d-{life}", f'{{"instance": "d-{life}"}}')
            await eventually(lambda life=life: side.view.connected and f"d-{life}" in side.view.records)
            threads = threads or threading.active_count()
            # A call in progress has one of its own.
            await eventually(lambda threads=threads: threading.active_count() <= threads)
        assert registration.incarnation == incarnation
        assert len(side.changes) == 3


async def test_a_frozen_etcd_is_noticed_and_the_view_goes_on_when_it_thaws(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=own_etcd.address, liveness_s=SHORT_S)) as side:
        await side.membership.register(record())
        await eventually(lambda: side.view.records)
        own_etcd.send(signal.SIGSTOP)
        await eventually(lambda: not side.view.connected)
        assert set(side.view.records) == {"prefill-1"}
        age = side.view.age_s
        await eventually(lambda: side.view.age_s > age)
        own_etcd.send(signal.SIGCONT)
        await eventually(lambda: side.view.connected)
        await side.membership.register(record("decode-1", membership_pb2.ROLE_DECODE))
        await eventually(lambda: "decode-1" in side.view.records)


async def test_a_view_behind_etcds_compacted_history_lists_again(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = mesh_settings(etcd=own_etcd.address, liveness_s=RESTART_S)
    async with Side(settings) as side:
        prefix = side.view._prefix
        for name in ("d-1", "d-2"):
            etcdctl(own_etcd, "put", f"{prefix}decode/{name}", f'{{"instance": "{name}"}}')
        await eventually(lambda: len(side.view.records) == 2)
        # The view's connection sleeps through the changes and the compaction.
        client = side.view._client
        assert client is not None
        hidden = client.head
        gate = asyncio.Event()

        async def held(prefix: str) -> Any:
            await gate.wait()
            return await hidden(prefix)

        client.head = held  # type: ignore[method-assign]
        own_etcd.send(signal.SIGKILL)
        await eventually(lambda: not side.view.connected)
        await asyncio.to_thread(own_etcd.start)
        etcdctl(own_etcd, "del", f"{prefix}decode/d-1")
        etcdctl(own_etcd, "put", f"{prefix}decode/d-3", '{"instance": "d-3"}')
        etcdctl(own_etcd, "put", f"{prefix}decode/d-4", '{"instance": "d-4"}')
        etcdctl(own_etcd, "compact", str(await revision_of(settings)))
        gate.set()
        await eventually(lambda: set(side.view.records) == {"d-2", "d-3", "d-4"})
        logged = capsys.readouterr()
        assert "listing again" in logged.out + logged.err


async def test_a_watch_that_goes_blind_is_found_out_and_begun_again(
    etcd: Any,
    mesh_settings: SettingsMaker,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch, calls = EtcdClient.watch, count(1)

    async def first_is_blind(client: EtcdClient, prefix: str, start_revision: int) -> AsyncGenerator[list[Any], None]:
        blind = next(calls) == 1
        async for changes in watch(client, prefix, start_revision):
            yield changes
            if blind:
                await asyncio.Event().wait()

    monkeypatch.setattr(EtcdClient, "watch", first_is_blind)
    monkeypatch.setattr(view_module, "AUDIT_LIVENESSES", 1)
    async with Side(mesh_settings(etcd=etcd.address, liveness_s=AUDIT_S)) as side:
        await side.membership.register(record())
        await eventually(lambda: "prefill-1" in side.view.records)
        assert next(calls) == 3
        etcdctl(etcd, "put", f"{side.view._prefix}decode/d-1", '{"instance": "d-1"}')
        await eventually(lambda: "d-1" in side.view.records)
        etcdctl(etcd, "del", f"{side.view._prefix}decode/d-1")
        await eventually(lambda: "d-1" not in side.view.records)
    logged = capsys.readouterr()
    assert "watch of the mesh is blind" in logged.out + logged.err


async def test_a_silent_mesh_is_no_blind_watch(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "AUDIT_LIVENESSES", 1)
    async with Side(mesh_settings(etcd=etcd.address, liveness_s=AUDIT_S)) as side:
        client = side.view._client
        assert client is not None
        await side.membership.register(record())
        etcdctl(etcd, "put", f"{side.view._prefix}decode/unreadable", "nonsense")
        await eventually(lambda: len(side.view._changed_at) == 2)
        listed, audits = client.list_keys, client.changed_at
        asked = list[str]()

        async def audited(prefix: str) -> dict[str, int]:
            asked.append("audit")
            return await audits(prefix)

        async def relisted(prefix: str) -> Any:
            asked.append("list")
            return await listed(prefix)

        client.changed_at, client.list_keys = audited, relisted  # type: ignore[method-assign]
        await eventually(lambda: len(asked) >= 3)
        assert set(asked) == {"audit"}


async def test_a_record_that_comes_right_when_the_time_is_over_is_written(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def over_first(event: asyncio.Event, timeout_s: float) -> bool:
        await wait_up_to(event, timeout_s)
        return False

    monkeypatch.setattr("tidemill_mesh.membership.registration.wait_up_to", over_first)
    async with Side(mesh_settings(etcd=etcd.address)) as side:
        await side.membership.register(record())
        await eventually(lambda: "prefill-1" in side.view.records)


async def test_a_failing_renewal_does_not_end_the_lease_thread(
    etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, failures = LeaseClient.keep_alive, list[int]()

    def failing(client: LeaseClient, lease: int, timeout_s: float) -> float:
        if not failures:
            failures.append(lease)
            raise StopIteration
        return renew(client, lease, timeout_s)

    monkeypatch.setattr(LeaseClient, "keep_alive", failing)
    async with Side(mesh_settings(etcd=etcd.address, liveness_s=SHORT_S)) as side:
        registration = await side.membership.register(record())
        incarnation = registration.incarnation
        side.membership._keeper.check_now()
        await eventually(lambda: failures)
        await asyncio.sleep(lease_ttl_s(side.settings.liveness_s) + 1)
        assert incarnation in etcdctl(etcd, "get", registration.key)


async def revision_of(settings: ServiceSettings) -> int:
    client = EtcdClient(settings)
    listing = await client.head("/")
    await client.close()
    return listing.revision


async def test_an_etcd_that_lost_its_data_is_listed_again_and_registered_in_again(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=own_etcd.address, liveness_s=RESTART_S)) as side:
        etcdctl(own_etcd, "put", f"{side.view._prefix}decode/gone", '{"instance": "gone"}')
        registration = await side.membership.register(record())
        first = registration.incarnation
        await eventually(lambda: len(side.view.records) == 2)
        own_etcd.send(signal.SIGKILL)
        own_etcd.forget_data()
        await asyncio.to_thread(own_etcd.start)
        await eventually(lambda: registration.incarnation != first)
        await eventually(lambda: set(side.view.records) == {"prefill-1"})
        await eventually(lambda: side.view.records["prefill-1"].incarnation == registration.incarnation)


async def test_etcd_away_at_the_end_does_not_hold_the_process(own_etcd: Any, mesh_settings: SettingsMaker) -> None:
    async with Side(mesh_settings(etcd=own_etcd.address, liveness_s=SHORT_S)) as side:
        await side.membership.register(record())
        own_etcd.send(signal.SIGSTOP)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_while_etcd_is_away_nothing_spins(dead_address: str, mesh_settings: SettingsMaker) -> None:
    async with Side(mesh_settings(etcd=dead_address, liveness_s=SHORT_S)):
        before = time.process_time()
        await asyncio.sleep(2.0)
        assert time.process_time() - before < 1.0


async def test_a_dead_endpoint_among_several_is_passed_over(
    etcd: Any, dead_address: str, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    async with Side(mesh_settings(etcd=f"{dead_address},{etcd.address}")) as side:
        await side.membership.register(record())
        await eventually(lambda: side.view.connected and side.view.records)


async def test_a_guarded_etcd_takes_the_login_and_outlives_its_token(
    own_etcd: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    etcdctl(own_etcd, "user", "add", "root:secret")
    etcdctl(own_etcd, "user", "grant-role", "root", "root")
    etcdctl(own_etcd, "auth", "enable")
    settings = mesh_settings(etcd=own_etcd.address, etcd_user="root", etcd_password="secret", liveness_s=RESTART_S)
    async with Side(settings) as side:
        registration = await side.membership.register(record())
        await eventually(lambda: side.view.connected and side.view.records)
        # A restart forgets every token that was given out.
        own_etcd.send(signal.SIGKILL)
        await asyncio.to_thread(own_etcd.start)
        await registration.update(record(draining=True))
        await eventually(lambda: side.view.records["prefill-1"].draining)


def test_the_lease_outlives_three_of_the_longest_stalls() -> None:
    assert lease_ttl_s(3.0) == 9.0
    assert lease_ttl_s(0.5) == 5.0


def test_the_end_of_a_prefix_is_the_next_text() -> None:
    assert prefix_end(b"/a/") == b"/a0"
