"""The first two frames of a link: each side names itself, the caller names the run that it means to reach."""

import asyncio
import json
import socket
from typing import Any

from tidemill_transfer.address import AgentAddress, parse_address
from tidemill_transfer.errors import TransferError
from tidemill_transfer.frames import FrameReader, FrameType, encode_frame

PROTOCOL_VERSION = 1

Fields = dict[str, Any]
"""The transport's own fields of a hello."""


async def greet(sock: socket.socket, own: AgentAddress, peer: AgentAddress, fields: Fields) -> Fields:
    """Caller's side; returns the peer's fields. TransferError "peer_lost" when another run answers."""
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (peer.host, peer.port))
    hello = {"version": PROTOCOL_VERSION, "address": str(own), "expected": peer.incarnation, "fields": fields}
    await loop.sock_sendall(sock, encode_frame(FrameType.HELLO, 0, json.dumps(hello).encode()))
    kind, answer = await _read(sock)
    if kind == FrameType.REFUSED:
        raise TransferError("peer_lost", f"{peer} refused: {answer.get('reason')}")
    if kind != FrameType.WELCOME or answer.get("incarnation") != peer.incarnation:
        raise TransferError("peer_lost", f"{peer} answered as another run")
    return _fields(answer)


async def answer(sock: socket.socket, own: AgentAddress, fields: Fields) -> tuple[AgentAddress, Fields]:
    """Listener's side; returns who called and its fields. TransferError when the call is refused."""
    loop = asyncio.get_running_loop()
    kind, hello = await _read(sock)
    refusal = _refusal(kind, hello, own)
    if refusal:
        await loop.sock_sendall(sock, encode_frame(FrameType.REFUSED, 0, json.dumps({"reason": refusal}).encode()))
        raise TransferError("unavailable", f"refused {hello.get('address')!r}: {refusal}")
    peer = parse_address(str(hello.get("address")))
    welcome = {"incarnation": own.incarnation, "fields": fields}
    await loop.sock_sendall(sock, encode_frame(FrameType.WELCOME, 0, json.dumps(welcome).encode()))
    return peer, _fields(hello)


def _refusal(kind: FrameType, hello: dict[str, Any], own: AgentAddress) -> str:
    if kind != FrameType.HELLO or hello.get("version") != PROTOCOL_VERSION:
        return f"protocol version {PROTOCOL_VERSION} is spoken here"
    if hello.get("expected") != own.incarnation:
        return "this is another run than the one that was called"
    if not str(hello.get("address")).startswith(f"{own.transport}://"):
        return f"only {own.transport} is spoken here"
    return ""


async def _read(sock: socket.socket) -> tuple[FrameType, dict[str, Any]]:
    reader = FrameReader(sock)
    kind, _, length = await reader.read_header()
    try:
        content = json.loads(await reader.read_bytes(length))
    except ValueError as error:
        raise TransferError("unavailable", "the peer's handshake is not readable") from error
    if not isinstance(content, dict):
        raise TransferError("unavailable", "the peer's handshake is not readable")
    return kind, content


def _fields(content: dict[str, Any]) -> Fields:
    fields = content.get("fields")
    if not isinstance(fields, dict):
        raise TransferError("unavailable", "the peer's handshake lacks its fields")
    return fields
