"""The bus on a real NATS that starts late, dies, freezes and drowns a slow consumer."""

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tidemill_mesh import bus as bus_module
from tidemill_mesh.bus import Bus
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.metrics import Metrics

SettingsMaker = Callable[..., ServiceSettings]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]
ValueOf = Callable[[Metrics, str], float]


SHORT_S = 0.6
"""Seconds of silence that are noticed as a loss."""


def nats_url(server: Any) -> str:
    return f"nats://{server.address}"


async def test_what_is_published_reaches_every_subscriber_of_the_subject(
    nats_server: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually
) -> None:
    bus = await Bus.connect(mesh_settings(nats=nats_url(nats_server)), "test", metrics)
    await eventually(lambda: bus.connected)
    exact: list[tuple[str, bytes]] = []
    every: list[tuple[str, bytes]] = []
    await bus.subscribe("t1.load.a", lambda subject, payload: exact.append((subject, payload)))
    await bus.subscribe("t1.load.*", lambda subject, payload: every.append((subject, payload)))
    bus.publish("t1.load.a", b"1")
    bus.publish("t1.load.b", b"\x00\xff")
    await eventually(lambda: len(every) == 2)
    assert exact == [("t1.load.a", b"1")]
    assert every == [("t1.load.a", b"1"), ("t1.load.b", b"\x00\xff")]
    await bus.close()
    assert not bus.connected


async def test_messages_keep_their_order(
    nats_server: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually
) -> None:
    bus = await Bus.connect(mesh_settings(nats=nats_url(nats_server)), "test", metrics)
    got: list[int] = []
    await bus.subscribe("t2", lambda _subject, payload: got.append(int(payload)))
    for number in range(3000):
        bus.publish("t2", str(number).encode())
    await eventually(lambda: len(got) == 3000)
    assert got == list(range(3000))
    await bus.close()


async def test_it_starts_before_nats_and_sends_what_waited(
    own_nats: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually
) -> None:
    own_nats.stop()
    bus = await Bus.connect(mesh_settings(nats=nats_url(own_nats)), "test", metrics)
    assert not bus.connected
    got: list[bytes] = []
    await bus.subscribe("t3", lambda _subject, payload: got.append(payload))
    bus.publish("t3", b"early")
    await asyncio.to_thread(own_nats.start)
    await eventually(lambda: got == [b"early"])
    await bus.close()


async def test_a_killed_nats_costs_messages_but_never_the_subscription(
    own_nats: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually, value_of: ValueOf
) -> None:
    bus = await Bus.connect(mesh_settings(nats=nats_url(own_nats)), "test", metrics)
    got: list[bytes] = []
    await bus.subscribe("t4", lambda _subject, payload: got.append(payload))
    await eventually(lambda: bus.connected)
    for life in range(3):
        own_nats.send(signal.SIGKILL)
        await eventually(lambda: not bus.connected)
        bus.publish("t4", str(life).encode())
        await asyncio.to_thread(own_nats.start)
        await eventually(lambda life=life: str(life).encode() in got)
    assert value_of(metrics, "bus_connections_total") == 4
    assert value_of(metrics, "bus_connected") == 1
    await bus.close()


async def test_a_frozen_nats_is_noticed_and_left(
    own_nats: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually
) -> None:
    bus = await Bus.connect(mesh_settings(nats=nats_url(own_nats), liveness_s=SHORT_S), "test", metrics)
    got: list[bytes] = []
    await bus.subscribe("t5", lambda _subject, payload: got.append(payload))
    await eventually(lambda: bus.connected)
    own_nats.send(signal.SIGSTOP)
    await eventually(lambda: not bus.connected)
    own_nats.send(signal.SIGCONT)
    while b"thawed" not in got:
        # A connection that is thought lost once more takes what was sent with it.
        bus.publish("t5", b"thawed")
        await asyncio.sleep(0.05)
    await bus.close()


async def test_while_nats_is_away_the_oldest_messages_are_dropped_and_counted(
    dead_address: str, mesh_settings: SettingsMaker, metrics: Metrics, value_of: ValueOf
) -> None:
    bus = await Bus.connect(mesh_settings(nats=f"nats://{dead_address}"), "test", metrics)
    for _ in range(bus_module.MAX_BUFFERED_MESSAGES + 10):
        bus.publish("t6", b"x")
    assert value_of(metrics, "bus_dropped_total") == 10
    for _ in range(20):
        bus.publish("t6", b"x" * 1024 * 1024)
    assert value_of(metrics, "bus_dropped_total") > bus_module.MAX_BUFFERED_MESSAGES
    await bus.close()
    published = bus_module.MAX_BUFFERED_MESSAGES + 30
    assert value_of(metrics, "bus_dropped_total") == published
    bus.publish("t6", b"late")
    assert value_of(metrics, "bus_dropped_total") == published + 1


async def test_a_message_over_natss_limit_is_dropped_alone(
    nats_server: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually, value_of: ValueOf
) -> None:
    bus = await Bus.connect(mesh_settings(nats=nats_url(nats_server)), "test", metrics)
    got: list[bytes] = []
    await bus.subscribe("t7", lambda _subject, payload: got.append(payload))
    bus.publish("t7", b"x" * (1024 * 1024 + 1))
    bus.publish("t7", b"next")
    await eventually(lambda: got == [b"next"])
    assert value_of(metrics, "bus_dropped_total") == 1
    await bus.close()


async def test_a_slow_consumer_is_counted_message_by_message_and_logged_once(
    nats_server: Any,
    mesh_settings: SettingsMaker,
    metrics: Metrics,
    eventually: Eventually,
    value_of: ValueOf,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = mesh_settings(nats=nats_url(nats_server))
    slow, fast = (
        await Bus.connect(settings, "slow", metrics),
        await Bus.connect(settings, "fast", Metrics("router", "")),
    )
    await eventually(lambda: slow.connected and fast.connected)
    got: list[bytes] = []
    await slow.subscribe("t8", lambda _subject, payload: got.append(payload), max_pending_messages=5)
    await slow.subscribe("t8-last", lambda _subject, payload: got.append(payload))
    for _ in range(2000):
        fast.publish("t8", b"x")
    fast.publish("t8-last", b"last")
    await eventually(lambda: b"last" in got)
    await eventually(lambda: value_of(metrics, "bus_slow_consumer_total") + len(got) == 2001)
    assert value_of(metrics, "bus_slow_consumer_total") > 0
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count("slow consumer") == 1
    await slow.close()
    await fast.close()


async def test_a_callback_that_raises_stops_nobody(
    nats_server: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually, value_of: ValueOf
) -> None:
    bus = await Bus.connect(mesh_settings(nats=nats_url(nats_server)), "test", metrics)
    got: list[bytes] = []

    def callback(_subject: str, payload: bytes) -> None:
        got.append(payload)
        raise ValueError("broken callback")

    await bus.subscribe("t9", callback)
    bus.publish("t9", b"1")
    bus.publish("t9", b"2")
    await eventually(lambda: got == [b"1", b"2"])
    assert value_of(metrics, "bus_callback_errors_total") == 2
    await bus.close()


async def test_an_ended_subscription_gets_nothing_more_and_leaves_nothing_behind(
    nats_server: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually
) -> None:
    bus = await Bus.connect(mesh_settings(nats=nats_url(nats_server)), "test", metrics)
    got: list[bytes] = []
    await eventually(lambda: bus.connected)
    tasks = len(asyncio.all_tasks())
    for _ in range(50):
        ended = await bus.subscribe("t10", lambda _subject, _payload: got.append(b"ended"))
        await ended.unsubscribe()
        await ended.unsubscribe()
    await bus.subscribe("t10", lambda _subject, payload: got.append(payload))
    bus.publish("t10", b"live")
    await eventually(lambda: got)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 1)
    assert got == [b"live"]
    await bus.close()


async def test_a_refused_login_is_tried_again_until_it_is_accepted(
    tmp_path: Any, own_nats: Any, mesh_settings: SettingsMaker, metrics: Metrics, eventually: Eventually
) -> None:
    own_nats.stop()
    plain = type(own_nats).argv
    guarded = type("Guarded", (type(own_nats),), {"argv": lambda self: [*plain(self), "--user", "a", "--pass", "b"]})
    own_nats.__class__ = guarded
    await asyncio.to_thread(own_nats.start)
    settings = mesh_settings(nats=nats_url(own_nats), nats_user="a", nats_password="wrong")
    refused = await Bus.connect(settings, "test", metrics)
    assert not refused.connected
    accepted = await Bus.connect(
        mesh_settings(nats=nats_url(own_nats), nats_user="a", nats_password="b"), "test", Metrics("router", "")
    )
    await eventually(lambda: accepted.connected)
    own_nats.send(signal.SIGKILL)
    own_nats.__class__ = guarded.__bases__[0]
    await asyncio.to_thread(own_nats.start)
    await eventually(lambda: refused.connected and accepted.connected)
    await refused.close()
    await accepted.close()


async def test_closing_leaves_no_task_and_no_warning(
    nats_server: Any, dead_address: str, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    for url in (nats_url(nats_server), f"nats://{dead_address}"):
        bus = await Bus.connect(mesh_settings(nats=url), "test", Metrics("gateway", ""))
        await bus.subscribe("t11", lambda _subject, _payload: None)
        bus.publish("t11", b"x")
        await bus.close()
        await bus.close()
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    gc.collect()


def sockets() -> set[str]:
    """This process's own, each by its inode."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {target for target in found if target.startswith("socket:")}


async def test_closing_beside_a_nats_that_reads_nothing_leaves_no_connection(
    own_nats: Any, mesh_settings: SettingsMaker, eventually: Eventually
) -> None:
    before = sockets()
    bus = await Bus.connect(mesh_settings(nats=nats_url(own_nats)), "test", Metrics("gateway", ""))
    await eventually(lambda: bus.connected)
    assert sockets() - before
    own_nats.send(signal.SIGSTOP)
    for _ in range(64):
        bus.publish("t12", b"x" * (256 << 10))
    await bus.close()
    await eventually(lambda: not sockets() - before)
