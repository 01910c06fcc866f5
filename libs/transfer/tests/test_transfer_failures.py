"""Peers that die, freeze, restart or talk nonsense: every operation ends with an error, and the next one works."""

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tidemill_transfer.address import parse_address
from tidemill_transfer.agent import TransferError, new_tag, open_agent

MIB = 1 << 20


async def until(condition: Callable[[], Any]) -> None:
    """Waits for a state that no event announces."""
    while not condition():
        await asyncio.sleep(0)


async def error_of(operation) -> str:
    with pytest.raises(TransferError) as caught:
        await operation
    return caught.value.code


async def outcome_of(operation: "asyncio.Task[None]") -> str:
    """ "done", or the error's code: a transfer that is quick enough may be over before its peer fails."""
    await asyncio.wait([operation])
    error = operation.exception()
    assert error is None or isinstance(error, TransferError)
    return "done" if error is None else error.code


@pytest.fixture
def exchange(pattern):
    """Moves one message from the peer to the agent; fails as the side does that fails first."""

    async def run(agent, peer) -> None:
        tag = new_tag()
        sending = peer.ask("send", peer=agent.address, tag=tag, size=MIB)
        out = np.zeros(MIB, np.uint8)
        receiving = asyncio.create_task(agent.recv(peer.address, tag, out, 120.0))
        await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_COMPLETED)
        if sending.done() and "error" in sending.result():
            receiving.cancel()
            await asyncio.wait([receiving])
            raise TransferError(sending.result()["error"], "the peer could not send")
        await receiving
        assert (out == pattern(tag, MIB)).all()

    return run


async def test_a_killed_peer_fails_what_waits_for_it_long_before_the_deadline(agent, own_peer, exchange):
    await exchange(agent, own_peer)
    waiting = asyncio.create_task(agent.recv(own_peer.address, new_tag(), np.zeros(MIB, np.uint8), 300.0))
    sending = asyncio.create_task(agent.send(own_peer.address, new_tag(), np.ones(MIB, np.uint8), 300.0))
    await asyncio.sleep(0.1)
    own_peer.kill()
    assert await error_of(waiting) == "peer_lost"
    assert await error_of(sending) == "peer_lost"
    assert await error_of(agent.send(own_peer.address, new_tag(), np.ones(MIB, np.uint8), 300.0)) == "peer_lost"


async def test_a_peer_killed_in_mid_message_fails_both_directions(agent, own_peer, pattern):
    tags = [new_tag(), new_tag()]
    size = 64 * MIB
    own_peer.ask("send", peer=agent.address, tag=tags[0], size=size)
    own_peer.ask("recv", peer=agent.address, tag=tags[1], size=size)
    out = np.zeros(size, np.uint8)
    receiving = asyncio.create_task(agent.recv(own_peer.address, tags[0], out, 300.0))
    sending = asyncio.create_task(agent.send(own_peer.address, tags[1], np.ones(size, np.uint8), 300.0))
    await until(lambda: out[:MIB].any() or receiving.done())
    own_peer.kill()
    assert await outcome_of(receiving) == "peer_lost" or (out == pattern(tags[0], size)).all()
    assert await outcome_of(sending) in ("peer_lost", "done")


async def test_a_frozen_peer_fails_at_the_deadline_and_serves_again_when_it_thaws(agent, own_peer, exchange, pattern):
    await exchange(agent, own_peer)
    tags = [new_tag(), new_tag()]
    size = 64 * MIB
    own_peer.ask("send", peer=agent.address, tag=tags[0], size=size)
    out = np.zeros(size, np.uint8)
    receiving = asyncio.create_task(agent.recv(own_peer.address, tags[0], out, 8.0))
    sending = asyncio.create_task(agent.send(own_peer.address, tags[1], np.ones(size, np.uint8), 8.0))
    await until(lambda: out[:MIB].any() or receiving.done())
    own_peer.signal(signal.SIGSTOP)
    assert await outcome_of(receiving) in ("deadline", "peer_lost") or (out == pattern(tags[0], size)).all()
    assert await outcome_of(sending) in ("deadline", "peer_lost")
    out[:] = 0
    assert agent.holds["requests"] == 0
    own_peer.signal(signal.SIGCONT)
    async with asyncio.timeout(300.0):
        # The peer finds only by and by that what it had begun has ended.
        while (outcome := await outcome_of(asyncio.ensure_future(exchange(agent, own_peer)))) != "done":
            assert outcome == "peer_lost"
            await asyncio.sleep(0.1)
    assert not out.any()


async def test_a_peer_killed_before_it_accepts_costs_the_sender_that_message_only(start_peer, exchange, agent):
    sender, receiver = start_peer(), start_peer()
    receiver.ask("recv", peer=sender.address, tag=new_tag(), size=MIB)
    while not (await sender.ask("holds"))["holds"]["links"]:
        pass
    receiver.signal(signal.SIGSTOP)
    sending = sender.ask("send", peer=receiver.address, tag=new_tag(), size=MIB)
    await sender.ask("holds")  # the sender has worked on since, so it connects
    receiver.kill()
    assert (await sending)["error"] == "peer_lost"
    await exchange(agent, sender)


@pytest.mark.full
async def test_receivers_that_close_at_any_moment_cost_a_sender_nothing_but_errors(transport, own_peer):
    for round_ in range(60):
        agent = await open_agent(transport, "127.0.0.1")
        waiting = asyncio.create_task(agent.recv(own_peer.address, new_tag(), np.zeros(9, np.uint8), 120.0))
        answers = [own_peer.ask("send", peer=agent.address, tag=new_tag(), size=size) for size in (9, MIB, MIB)]
        await asyncio.sleep(round_ % 20 / 1000)
        await agent.close()
        assert await error_of(waiting) == "peer_lost"
        assert agent.holds["unclaimed_messages"] == 0
        for answer in answers:
            assert (await answer).get("error") in (None, "peer_lost")
    assert own_peer.end() == 0


async def test_a_peer_frozen_before_the_handshake_fails_in_time(agent, own_peer, exchange):
    own_peer.signal(signal.SIGSTOP)
    assert await error_of(agent.send(own_peer.address, new_tag(), np.ones(MIB, np.uint8), 1.0)) == "deadline"
    own_peer.signal(signal.SIGCONT)
    await exchange(agent, own_peer)


async def test_a_peer_that_accepts_and_never_answers_fails_at_the_deadline(agent, transport):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{transport}://127.0.0.1:{silent.getsockname()[1]}/abc"
        assert await error_of(agent.recv(address, new_tag(), np.zeros(9, np.uint8), 0.5)) == "deadline"


async def test_nobody_listening_is_a_lost_peer(agent, transport):
    with socket.socket() as closed:  # bound and not listening, so that nobody else takes the port
        closed.bind(("127.0.0.1", 0))
        address = f"{transport}://127.0.0.1:{closed.getsockname()[1]}/abc"
        assert await error_of(agent.send(address, 1, np.ones(1, np.uint8), 60.0)) == "peer_lost"


async def test_another_run_at_the_same_port_is_refused(agent, peer, exchange):
    where = parse_address(peer.address)
    older = f"{where.transport}://{where.host}:{where.port}/0000000000000000"
    assert await error_of(agent.send(older, new_tag(), np.ones(MIB, np.uint8), 60.0)) == "peer_lost"
    await exchange(agent, peer)


async def test_a_restarted_peer_is_reached_by_its_new_address(agent, start_peer, exchange):
    first = start_peer()
    await exchange(agent, first)
    first.kill()
    second = start_peer()
    await exchange(agent, second)
    assert await error_of(agent.send(first.address, new_tag(), np.ones(9, np.uint8), 60.0)) == "peer_lost"


async def test_an_agent_without_descriptors_takes_connections_again_when_it_has_some(agent, peer, pattern, caplog):
    tag = new_tag()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        answer = peer.ask("send", peer=agent.address, tag=tag, size=MIB)
        await until(lambda: "cannot take transfer connections" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await until(lambda: agent.holds["links"])
    out = np.zeros(MIB, np.uint8)
    await agent.recv(peer.address, tag, out, 120.0)
    assert (out == pattern(tag, MIB)).all()
    assert "error" not in await answer


async def test_strangers_do_not_disturb_an_agent(agent, peer, exchange):
    where = parse_address(agent.address)
    for junk in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x01" + b"\xff" * 40, b"\x01" + bytes(8) + b"\x02\0\0\0[]", b""):
        _, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(junk)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    await exchange(agent, peer)


async def test_a_message_for_another_link_is_dropped_and_counted():
    sender, receiver = [await open_agent("ucx", "127.0.0.1") for _ in range(2)]
    await asyncio.gather(
        sender.send(receiver.address, 1, np.ones(9, np.uint8), 60.0),
        receiver.recv(sender.address, 1, np.zeros(9, np.uint8), 60.0),
    )
    link = await sender._links.get(receiver.address, 1.0)  # type: ignore[attr-defined]
    link.remote["slot"] ^= 1
    await sender.send(receiver.address, 2, np.ones(MIB, np.uint8), 60.0)
    assert receiver.counters["unknown_messages"] == 1  # type: ignore[attr-defined]
    assert receiver.holds["unclaimed_messages"] == 0
    await sender.close()
    await receiver.close()


@pytest.mark.parametrize("size", [9, MIB])
async def test_an_endpoint_that_fails_before_its_link_costs_no_message(size):
    sender, receiver = [await open_agent("ucx", "127.0.0.1") for _ in range(2)]

    async def move(tag: int) -> None:
        out = np.zeros(size, np.uint8)
        await asyncio.gather(
            sender.send(receiver.address, tag, np.ones(size, np.uint8), 300.0),
            receiver.recv(sender.address, tag, out, 300.0),
        )
        assert out.all()

    await move(1)
    (endpoint,) = sender._endpoints.values()  # type: ignore[attr-defined]
    endpoint.close_blocking(period=10**9, max_attempts=1)
    await move(2)
    await move(3)
    assert sender.holds["links"] == 1
    await sender.close()
    await receiver.close()


async def test_an_endpoint_that_fails_where_a_message_arrives_costs_that_message_only():
    sender, receiver = [await open_agent("ucx", "127.0.0.1") for _ in range(2)]

    async def move(tag: int) -> str:
        sending = asyncio.ensure_future(sender.send(receiver.address, tag, np.ones(MIB, np.uint8), 300.0))
        outcome = await outcome_of(
            asyncio.ensure_future(receiver.recv(sender.address, tag, np.zeros(MIB, np.uint8), 300.0))
        )
        if outcome != "done":
            sending.cancel()  # it may have begun anew, on another link
        await asyncio.wait([sending])
        return outcome

    assert await move(1) == "done"
    (endpoint,) = receiver._endpoints.values()  # type: ignore[attr-defined]
    endpoint.close_blocking(period=10**9, max_attempts=1)
    assert await move(2) == "peer_lost"
    assert await move(3) == "done"
    await sender.close()
    await receiver.close()
