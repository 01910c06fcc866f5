"""Two real processes move bytes over each transport."""

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tidemill_transfer import matching
from tidemill_transfer.address import parse_address
from tidemill_transfer.agent import TransferError, TransportUnavailable, new_tag, new_tags, open_agent
from tidemill_transfer.checksum import checksum64

MIB = 1 << 20


async def until(condition: Callable[[], Any]) -> None:
    """Waits for a state that no event announces."""
    while not condition():
        await asyncio.sleep(0)


Receive = Callable[..., Awaitable[bool]]


@pytest.fixture
def receive(pattern: Any) -> Receive:
    """Receives a message and says whether it came whole."""

    async def run(agent: Any, peer: Any, size: int, tag: int) -> bool:
        out = np.zeros(size, np.uint8)
        await agent.recv(peer.address, tag, out, 120.0)
        return bool((out == pattern(tag, size)).all())

    return run


@pytest.mark.parametrize("size", [1, 7, 8191, 8192, 65_537, 5 * MIB + 3])
async def test_a_message_arrives_whole_in_each_direction(agent, peer, size, receive, pattern):
    tags = [new_tag(), new_tag()]
    sent = peer.ask("send", peer=agent.address, tag=tags[0], size=size)
    assert await receive(agent, peer, size, tags[0])
    received = peer.ask("recv", peer=agent.address, tag=tags[1], size=size)
    await agent.send(peer.address, tags[1], pattern(tags[1], size), 120.0)
    assert (await received)["checksum"] == checksum64(pattern(tags[1], size))
    assert "error" not in await sent


async def test_both_directions_flow_at_once(agent, peer, receive, pattern):
    tags = [new_tag() for _ in range(12)]
    answers = [
        peer.ask("send" if i % 2 else "recv", peer=agent.address, tag=t, size=3 * MIB) for i, t in enumerate(tags)
    ]
    async with asyncio.TaskGroup() as group:
        whole = []
        for i, tag in enumerate(tags):
            if i % 2:
                whole.append(group.create_task(receive(agent, peer, 3 * MIB, tag)))
            else:
                group.create_task(agent.send(peer.address, tag, pattern(tag, 3 * MIB), 120.0))
    assert all(task.result() for task in whole)
    for tag, answer in zip(tags, answers, strict=True):
        assert (await answer).get("checksum", checksum64(pattern(tag, 3 * MIB))) == checksum64(pattern(tag, 3 * MIB))
    assert all(agent.holds[kind] == 0 for kind in ("sends", "receives", "requests", "unclaimed_messages"))


@pytest.mark.parametrize("size", [64, 2 * MIB])
async def test_the_sender_may_be_first(agent, peer, size, receive):
    tag = new_tag()
    sent = peer.ask("send", peer=agent.address, tag=tag, size=size)
    await until(lambda: agent.holds["unclaimed_messages"])
    assert await receive(agent, peer, size, tag)
    assert "error" not in await sent
    assert agent.holds["unclaimed_messages"] == 0


@pytest.mark.parametrize("size", [64, 2 * MIB])
async def test_a_message_nobody_asks_for_is_dropped_in_time_though_nothing_else_comes(agent, peer, size, monkeypatch):
    monkeypatch.setattr(matching, "UNCLAIMED_AGE_S", 0.3)
    sent = peer.ask("send", peer=agent.address, tag=new_tag(), size=size)
    await until(lambda: agent.counters["evicted_messages"])
    await until(lambda: not any(agent.holds[kind] for kind in ("requests", "unclaimed_messages")))
    await sent


async def test_many_small_messages_share_a_link_in_any_order(agent, peer, receive):
    first = new_tags(600)
    order = np.random.default_rng(0).permutation(600)
    for i in range(600):
        peer.ask("send", peer=agent.address, tag=first + i, size=100 + i)
    whole = await asyncio.gather(*(receive(agent, peer, 100 + int(i), first + int(i)) for i in order))
    assert all(whole)


async def test_a_size_that_differs_is_an_error_for_that_message_alone(agent, peer, receive):
    tags = [new_tag() for _ in range(3)]
    for tag, size in zip(tags, (100, 2 * MIB, 2 * MIB), strict=True):
        peer.ask("send", peer=agent.address, tag=tag, size=size)
    for tag in tags[:2]:
        with pytest.raises(TransferError) as caught:
            await agent.recv(peer.address, tag, np.zeros(MIB, np.uint8), 120.0)
        assert caught.value.code == "truncated"
    assert await receive(agent, peer, 2 * MIB, tags[2])


async def test_a_message_nobody_receives_fails_alone_at_its_deadline(agent, peer, monkeypatch):
    # A peer that had no processor for so long would cost its link.
    monkeypatch.setattr(sys.modules[type(agent).__module__], "WITHDRAW_S", 60.0)
    with pytest.raises(TransferError) as caught:
        await agent.send(peer.address, new_tag(), np.ones(MIB, np.uint8), 0.5)
    assert caught.value.code == "deadline"
    assert agent.counters["aborted_links"] == 0
    while (await peer.ask("holds"))["holds"]["unclaimed_messages"]:
        await asyncio.sleep(0.01)


async def test_a_receive_without_a_message_ends_at_its_deadline(agent, peer):
    with pytest.raises(TransferError) as caught:
        await agent.recv(peer.address, new_tag(), np.zeros(MIB, np.uint8), 0.5)
    assert caught.value.code == "deadline"


@pytest.mark.parametrize("size", [100, 2 * MIB])
async def test_a_receive_given_up_leaves_no_ghost_that_takes_the_late_message(agent, peer, size, receive):
    tag, later = new_tag(), new_tag()
    out = np.zeros(size, np.uint8)
    receiving = asyncio.create_task(agent.recv(peer.address, tag, out, 120.0))
    await until(lambda: agent.holds["links"])
    await asyncio.sleep(0.1)
    receiving.cancel()
    await asyncio.wait([receiving])
    assert receiving.cancelled()
    assert "error" not in await peer.ask("send", peer=agent.address, tag=tag, size=size)
    peer.ask("send", peer=agent.address, tag=later, size=size)
    assert await receive(agent, peer, size, later)
    assert not out.any()
    assert agent.holds["unclaimed_messages"] == 0


async def test_a_send_given_up_is_taken_back(agent, peer):
    tag = new_tag()
    sending = asyncio.create_task(agent.send(peer.address, tag, np.ones(8 * MIB, np.uint8), 120.0))
    await until(lambda: agent.holds["links"])
    await asyncio.sleep(0.1)
    sending.cancel()
    await asyncio.wait([sending])
    assert sending.cancelled()
    answer = await peer.ask("recv", peer=agent.address, tag=tag, size=8 * MIB, deadline_s=0.5)
    assert answer["error"] in ("deadline", "peer_lost")
    assert agent.holds["requests"] == 0


async def test_receives_given_up_in_mid_message_let_go_of_their_buffers(agent, peer, receive):
    for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02):
        tag = new_tag()
        peer.ask("send", peer=agent.address, tag=tag, size=16 * MIB)
        out = np.zeros(16 * MIB, np.uint8)
        receiving = asyncio.create_task(agent.recv(peer.address, tag, out, 120.0))
        await asyncio.sleep(delay_s)
        receiving.cancel()
        await asyncio.wait([receiving])
        out[:] = 0
        await asyncio.sleep(0.02)
        assert not out.any()
    tag = new_tag()
    peer.ask("send", peer=agent.address, tag=tag, size=MIB)
    assert await receive(agent, peer, MIB, tag)


async def test_all_of_128_pairings_connect_at_once(transport, start_peer, pattern):
    ours = [await open_agent(transport, "127.0.0.1") for _ in range(8)]
    theirs = start_peer(16)
    tags = {(i, j): new_tag() for i in range(8) for j in range(16)}
    answers = [
        theirs.ask("recv", agent=j, peer=ours[i].address, tag=tag, size=1000, deadline_s=300.0)
        for (i, j), tag in tags.items()
    ]
    await asyncio.gather(
        *(ours[i].send(theirs.addresses[j], tag, pattern(tag, 1000), 300.0) for (i, j), tag in tags.items())
    )
    for answer, tag in zip(answers, tags.values(), strict=True):
        assert (await answer)["checksum"] == checksum64(pattern(tag, 1000))
    for agent in ours:
        await agent.close()


async def test_closing_leaves_no_task_and_no_descriptor(transport, start_peer, receive):
    peer = start_peer()
    await (await open_agent(transport, "127.0.0.1")).close()
    tasks, descriptors = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        agent = await open_agent(transport, "127.0.0.1")
        tag = new_tag()
        peer.ask("send", peer=agent.address, tag=tag, size=MIB)
        assert await receive(agent, peer, MIB, tag)
        peer.ask("send", peer=agent.address, tag=new_tag(), size=MIB)
        waiting = asyncio.create_task(agent.recv(peer.address, new_tag(), np.zeros(9, np.uint8), 120.0))
        await asyncio.sleep(0.05)
        await agent.close()
        with pytest.raises(TransferError):
            await waiting
    assert len(asyncio.all_tasks()) == tasks
    async with asyncio.timeout(300):
        await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert peer.end() == 0


async def test_an_address_of_another_transport_or_none_is_refused_by_name(agent, transport):
    other = "tcp" if transport == "ucx" else "ucx"
    for address in (f"{other}://127.0.0.1:1/abc", "nonsense", f"{transport}://127.0.0.1:99999/abc", ""):
        with pytest.raises(TransferError) as caught:
            await agent.send(address, new_tag(), np.ones(1, np.uint8), 60.0)
        assert caught.value.code == "unavailable"


async def test_a_tag_that_is_in_use_is_refused(agent, peer, transport):
    tag = new_tag()
    waiting = asyncio.create_task(agent.recv(peer.address, tag, np.zeros(9, np.uint8), 120.0))
    await asyncio.sleep(0.1)
    with pytest.raises(TransferError, match="another receive"):
        await agent.recv(peer.address, tag, np.zeros(9, np.uint8), 120.0)
    peer.ask("send", peer=agent.address, tag=tag, size=9)
    await waiting
    assert agent.holds["receives"] == 0


async def test_a_wildcard_bind_is_told_to_peers_by_name(transport, agent):
    wide = await open_agent(transport, "0.0.0.0")
    assert parse_address(wide.address).host == socket.gethostname().lower()
    await wide.close()
    named = await open_agent(transport, "0.0.0.0", advertise_host="localhost")
    out = np.zeros(MIB, np.uint8)
    async with asyncio.TaskGroup() as group:
        group.create_task(agent.send(named.address, 5, np.ones(MIB, np.uint8), 120.0))
        group.create_task(named.recv(agent.address, 5, out, 120.0))
    assert out.all()
    await named.close()


async def test_only_known_transports_open():
    with pytest.raises(TransportUnavailable, match="carrier-pigeon"):
        await open_agent("carrier-pigeon", "127.0.0.1")  # type: ignore[arg-type]


WITHOUT_UCX = """
import asyncio, sys
sys.modules["ucxx"] = None
from tidemill_transfer.agent import TransportUnavailable, open_agent

async def main():
    try:
        agent = await open_agent(sys.argv[1], "127.0.0.1")
        print(agent.address)
        await agent.close()
    except TransportUnavailable as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.parametrize(("name", "said"), [("ucx", r"ucx: .*transport=tcp"), ("tcp", r"tcp://127\.0\.0\.1:")])
def test_where_ucx_cannot_be_had_it_is_refused_and_tcp_opens_by_name_alone(name, said):
    argv = [sys.executable, "-c", WITHOUT_UCX, name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    assert re.search(said, done.stdout), done.stdout


def test_addresses_are_read_back_as_written():
    for text in ("ucx://127.0.0.1:5/ab", "tcp://[::1]:65535/0f", "ucx://node-7.cluster:1/x"):
        assert str(parse_address(text)) == text
