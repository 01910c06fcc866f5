"""The receiving process of the transfer benchmark: answers each message with a short one, over each transport.

Started as `python -m tidemill_bench.transfer_peer`; prints its addresses, then obeys one JSON line after the other.
"""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import uvloop

from tidemill_transfer.agent import TransferAgent, open_agent

ACK_BYTES = 64
DEADLINE_S = 60.0
SERVICE, METHOD = "tidemill.bench.Bytes", "Transfer"
MESSAGE_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def touched(size_bytes: int) -> np.ndarray:
    """A buffer whose pages are there already, as those of a KV pool are."""
    return np.full(size_bytes, 1, np.uint8)


def answer_socket(connection: socket.socket) -> None:
    """Receives messages over a plain socket until it ends: 8 bytes of size first, then any number of messages."""
    with connection:
        size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
        view, filled = touched(size).data, 0
        while received := connection.recv_into(view[filled:]):
            filled += received
            if filled == size:
                filled = 0
                connection.sendall(bytes(ACK_BYTES))


def accept_sockets(listener: socket.socket) -> None:
    """One thread for each connection, until the listener closes."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer_socket, args=(connection,), daemon=True).start()


async def answer_stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    """Receives messages in chunks into one buffer; the first chunk of the stream tells their size."""
    size = int.from_bytes(await anext(requests), "little")
    buffer, filled = touched(size), 0
    async for chunk in requests:
        buffer[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
        filled += len(chunk)
        if filled == size:
            filled = 0
            yield bytes(ACK_BYTES)


async def answer_agent(agent: TransferAgent, peer: str, size: int, count: int, tag: int) -> None:
    """Receives `count` messages one after the other, under tag, tag + 2, ..., and answers under the odd ones."""
    buffer, ack = touched(size), np.zeros(ACK_BYTES, np.uint8)
    for index in range(count):
        await agent.recv(peer, tag + 2 * index, buffer, DEADLINE_S)
        await agent.send(peer, tag + 2 * index + 1, ack, DEADLINE_S)


async def serve() -> None:
    """Runs until stdin ends."""
    handler: Any = grpc.stream_stream_rpc_method_handler(answer_stream)  # type: ignore[arg-type]
    server = grpc.aio.server(options=MESSAGE_LIMIT)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    agents = {"ucx": await open_agent("ucx", "127.0.0.1"), "tcp": await open_agent("tcp", "127.0.0.1")}
    addresses = {name: agent.address for name, agent in agents.items()}
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept_sockets, args=(listener,), daemon=True).start()
    addresses |= {"grpc": f"127.0.0.1:{port}", "socket": f"127.0.0.1:{listener.getsockname()[1]}"}
    print(json.dumps(addresses), flush=True)
    stdin = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    async with asyncio.TaskGroup() as group:
        while line := await stdin.readline():
            order = json.loads(line)
            agent = agents[order.pop("transport")]
            group.create_task(answer_agent(agent, **order))
    pipe.close()
    listener.close()
    await server.stop(0)
    for agent in agents.values():
        await agent.close()


if __name__ == "__main__":
    uvloop.run(serve())
