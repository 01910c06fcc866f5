"""KV bytes between two processes: our UCX agent beside plain gRPC streaming, our TCP agent and blocking sockets.

A transfer is one message and the 64-byte answer that tells of its arrival. The transports take turns in each round;
figures are medians over rounds. Blocking sockets, in threads that do nothing but copy, show what the loopback moves.
"""

import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import uvloop

from tidemill_bench.options import Options
from tidemill_bench.report import Row, machine
from tidemill_bench.transfer_peer import ACK_BYTES, DEADLINE_S, MESSAGE_LIMIT, METHOD, SERVICE
from tidemill_transfer.agent import TransferAgent, new_tags, open_agent

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB}
IN_FLIGHT = (1, 2, 4)
TRANSPORTS = ("ucx", "tcp", "grpc", "socket")
BYTES_PER_MEASUREMENT = 128 * MIB
MAX_TRANSFERS = 100
CHUNK_BYTES = MIB  # the size at which gRPC streams fastest
ROUNDS = 5

Transfers = Callable[[np.ndarray, int], Awaitable[list[float]]]
"""(message, count) -> seconds of each transfer, one after the other."""


@dataclass
class Samples:
    """What the rounds gave for one (transport, size, in flight)."""

    bytes_per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Peer:
    """The other process."""

    addresses: dict[str, str]
    order: Callable[[dict[str, Any]], None]


@asynccontextmanager
async def start_peer() -> AsyncIterator[Peer]:
    """Runs tidemill_bench.transfer_peer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tidemill_bench.transfer_peer",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None, "stdin is a pipe"
    assert stdout is not None, "stdout is a pipe"
    try:
        addresses = json.loads(await stdout.readline())
        yield Peer(addresses, lambda order: stdin.write(json.dumps(order).encode() + b"\n"))
    finally:
        stdin.close()
        await process.wait()


def agent_transfers(agent: TransferAgent, transport: str, peer: Peer) -> Transfers:
    """Transfers over one of our agents."""

    async def run(message: np.ndarray, count: int) -> list[float]:
        tag, address = new_tags(2 * count), peer.addresses[transport]
        order = {"transport": transport, "peer": agent.address, "size": message.nbytes, "count": count, "tag": tag}
        peer.order(order)
        ack, seconds = np.empty(ACK_BYTES, np.uint8), []
        for index in range(count):
            start = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.send(address, tag + 2 * index, message, DEADLINE_S))
                group.create_task(agent.recv(address, tag + 2 * index + 1, ack, DEADLINE_S))
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def grpc_transfers(channel: grpc.aio.Channel) -> Transfers:
    """Transfers over one open bidirectional stream, in chunks."""
    call_method: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")

    async def run(message: np.ndarray, count: int) -> list[float]:
        call, seconds = call_method(), []
        await call.write(message.nbytes.to_bytes(8, "little"))
        for _ in range(count):
            start = time.perf_counter()
            for begin in range(0, message.nbytes, CHUNK_BYTES):
                await call.write(message[begin : begin + CHUNK_BYTES].tobytes())
            await call.read()
            seconds.append(time.perf_counter() - start)
        await call.done_writing()
        return seconds

    return run


def socket_transfers(address: str) -> Transfers:
    """Transfers over a blocking socket in a thread."""
    host, port = address.rsplit(":", 1)

    def run_blocking(message: np.ndarray, count: int) -> list[float]:
        seconds = []
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(message.nbytes.to_bytes(8, "little"))
            for _ in range(count):
                start = time.perf_counter()
                connection.sendall(message.data)
                connection.recv(ACK_BYTES, socket.MSG_WAITALL)
                seconds.append(time.perf_counter() - start)
        return seconds

    async def run(message: np.ndarray, count: int) -> list[float]:
        return await asyncio.to_thread(run_blocking, message, count)

    return run


async def measure(transfers: Transfers, size: int, in_flight: int, samples: Samples) -> None:
    """One measurement: so many transfers in each of `in_flight` tasks."""
    count = max(2, min(MAX_TRANSFERS, BYTES_PER_MEASUREMENT // size // in_flight))
    messages = [np.full(size, index, np.uint8) for index in range(in_flight)]
    await transfers(messages[0], 1)
    start = time.perf_counter()
    seconds = await asyncio.gather(*(transfers(message, count) for message in messages))
    elapsed = time.perf_counter() - start
    samples.bytes_per_s.append(size * count * in_flight / elapsed)
    samples.seconds += [second for task in seconds for second in task]


async def collect(rounds: int) -> dict[tuple[str, str, int], Samples]:
    """All measurements, interleaved."""
    samples = {(t, size, n): Samples() for t in TRANSPORTS for size in SIZES for n in IN_FLIGHT}
    agents = {"ucx": await open_agent("ucx", "127.0.0.1"), "tcp": await open_agent("tcp", "127.0.0.1")}
    async with (
        start_peer() as peer,
        grpc.aio.insecure_channel(peer.addresses["grpc"], options=MESSAGE_LIMIT) as channel,
    ):
        ways: dict[str, Transfers] = {name: agent_transfers(agent, name, peer) for name, agent in agents.items()}
        ways["grpc"] = grpc_transfers(channel)
        ways["socket"] = socket_transfers(peer.addresses["socket"])
        for turn in range(rounds):
            for name, size in SIZES.items():
                for in_flight in IN_FLIGHT:
                    for index in range(len(TRANSPORTS)):
                        transport = TRANSPORTS[(turn + index) % len(TRANSPORTS)]
                        await measure(ways[transport], size, in_flight, samples[transport, name, in_flight])
        for agent in agents.values():
            await agent.close()
    return samples


def to_rows(samples: dict[tuple[str, str, int], Samples]) -> list[Row]:
    """Throughput for each number in flight, latency for one, both beside gRPC and TCP."""
    rows = []
    for baseline, label in (("grpc", "gRPC streaming"), ("tcp", "TCP agent"), ("socket", "blocking sockets")):
        for size, size_bytes in SIZES.items():
            for in_flight in IN_FLIGHT:
                ours, theirs = samples["ucx", size, in_flight], samples[baseline, size, in_flight]
                goal = ">= 0.8x blocking sockets" if baseline == "socket" and size_bytes >= 16 * MIB else None
                rows.append(
                    Row(
                        metric=f"UCX throughput, {size} x {in_flight}",
                        unit="GB/s",
                        value=statistics.median(ours.bytes_per_s) / 1e9,
                        higher_is_better=True,
                        baseline=label,
                        baseline_value=statistics.median(theirs.bytes_per_s) / 1e9,
                        goal=goal,
                        workload=f"{in_flight} in flight, two processes on loopback",
                        machine=machine(),
                    )
                )
            ours, theirs = samples["ucx", size, 1], samples[baseline, size, 1]
            rows.append(
                Row(
                    metric=f"UCX latency p50, {size}",
                    unit="ms",
                    value=statistics.median(ours.seconds) * 1e3,
                    higher_is_better=False,
                    baseline=label,
                    baseline_value=statistics.median(theirs.seconds) * 1e3,
                    goal="<= 0.5x gRPC streaming" if baseline == "grpc" else None,
                    workload="1 in flight, with its 64-byte answer, two processes on loopback",
                    machine=machine(),
                )
            )
    return rows


def run(options: Options) -> list[Row]:
    """Measures all transports."""
    return to_rows(uvloop.run(collect(1 if options.quick else ROUNDS)))
