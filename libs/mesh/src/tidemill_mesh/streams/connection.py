"""One HTTP/2 connection, of either side: frames to streams and back, flow control, pings, its end."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import grpc
import hpack
from grpc.aio import AioRpcError

from tidemill_mesh.streams import frames
from tidemill_mesh.streams.frames import ProtocolError
from tidemill_mesh.streams.quiet import Quiet
from tidemill_mesh.streams.status import Header, call_error
from tidemill_mesh.streams.stream import Stream

RECEIVE_WINDOW = 16 << 20
"""Bytes that the other side may send ahead; given back when half of them have come, for all that comes is taken."""
MAX_HEADER_BYTES = 64 << 10
CLOSE_S = 1.0


class Connection(asyncio.Protocol, ABC):
    """What client and server share; each says what a new stream is."""

    def __init__(self, silence_s: float) -> None:
        self.streams: dict[int, Stream] = {}
        self.writable = True
        self.send_window = frames.FIRST_WINDOW
        self.first_stream_window = frames.FIRST_WINDOW
        self._max_frame = frames.FRAME_BYTES
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._received = 0
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._open_block: tuple[int, int, bytearray] | None = None
        """Stream, flags and first part of headers that a CONTINUATION goes on with."""
        self._quiet = Quiet(silence_s, self._ping, self._silent)
        self._take: dict[int, Callable[[int, int, bytes], None]] = {
            frames.DATA: self._take_data,
            frames.HEADERS: self._take_headers,
            frames.CONTINUATION: self._take_continuation,
            frames.RST_STREAM: self._take_reset,
            frames.SETTINGS: self._take_settings,
            frames.PING: self._take_ping,
            frames.GOAWAY: self._take_goaway,
            frames.WINDOW_UPDATE: self._take_window_update,
            frames.PUSH_PROMISE: self._take_push,
        }

    # --- what the sides differ in ------------------------------------------------------------------------------------

    def preface(self) -> bytes:
        """What this side says first, before its settings."""
        return b""

    def take_preface(self, data: bytes) -> bytes | None:
        """What follows the other side's first words; None while they are not complete."""
        return data

    @abstractmethod
    def take_stream(self, stream_id: int, headers: Sequence[Header], *, last: bool) -> None:
        """Headers of a stream that is not known."""

    # --- for the streams ---------------------------------------------------------------------------------------------

    def send_data(self, stream: Stream, data: bytes) -> bool:
        """See Carrier."""
        length = len(data)
        if length > self.send_window or length > stream.send_window or length > self._max_frame:
            return False
        self.send_window -= length
        stream.send_window -= length
        self.write(frames.head(frames.DATA, 0, stream.id, length) + data)
        return True

    def send_unsent(self, stream: Stream) -> None:
        """See Carrier."""
        unsent = stream.unsent
        while (size := min(len(unsent), self.send_window, stream.send_window, self._max_frame)) > 0:
            if not self.send_data(stream, bytes(unsent[:size])):
                raise AssertionError("what the windows allow can be sent")
            del unsent[:size]
        if not unsent:
            stream.all_sent()

    def send_headers(self, stream_id: int, headers: Sequence[Header], *, last: bool) -> None:
        """See Carrier."""
        block = self._encoder.encode(headers)
        kind, flags, sent = frames.HEADERS, frames.END_STREAM if last else 0, 0
        while True:
            part = block[sent : sent + self._max_frame]
            sent += len(part)
            whole = frames.END_HEADERS if sent == len(block) else 0
            self.write(frames.frame(kind, flags | whole, stream_id, part))
            if whole:
                return
            kind, flags = frames.CONTINUATION, 0

    def write(self, data: bytes) -> None:
        """See Carrier."""
        if self._transport is not None:
            self._transport.write(data)

    def forget(self, stream: Stream) -> None:
        """See Carrier."""
        self.streams.pop(stream.id, None)

    def close(self, error: AioRpcError, code: int = frames.NO_ERROR) -> None:
        """Ends the connection; its streams end with the error."""
        if self._transport is not None:
            self.write(frames.goaway(max(self.streams, default=0), code, error.details() or ""))
            self.hang_up()
        self._end(error)

    def hang_up(self) -> None:
        """Closes when what was written is sent; a peer that does not read keeps no connection open."""
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other side is there."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the transport is gone; a closed connection may still have to send its last words."""
        values = {frames.ENABLE_PUSH: 0, frames.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW}
        more = frames.window_update(0, RECEIVE_WINDOW - frames.FIRST_WINDOW)
        self.write(self.preface() + frames.settings(values) + more)
        self._quiet.start()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        self.lost.set_result(None)
        self._end(call_error(grpc.StatusCode.UNAVAILABLE, f"the connection was lost: {error or 'closed'}"))

    def pause_writing(self) -> None:
        """The other side does not read."""
        self.writable = False

    def resume_writing(self) -> None:
        """It reads again."""
        self.writable = True
        for stream in list(self.streams.values()):
            if stream.writable:
                stream.on_writable()

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        self._quiet.heard()
        if self._rest:
            data = self._rest + data
        try:
            after = self.take_preface(data)
            self._rest = data if after is None else self._take_frames(after)
        except ProtocolError as error:
            self.close(call_error(grpc.StatusCode.INTERNAL, f"HTTP/2: {error}"), error.code)

    # --- frames ------------------------------------------------------------------------------------------------------

    def _take_frames(self, data: bytes) -> bytes:
        """Takes all that are complete; the rest."""
        at, end = 0, len(data)
        while end - at >= frames.HEAD_BYTES and self._transport is not None:
            length, kind, flags, stream_id = frames.parse_head(data, at)
            if length > frames.FRAME_BYTES:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            start = at + frames.HEAD_BYTES
            if start + length > end:
                break
            if self._open_block is not None and kind != frames.CONTINUATION:
                raise ProtocolError(frames.PROTOCOL_ERROR, "a frame between the parts of headers")
            at = start + length
            take = self._take.get(kind)
            if take is not None:
                take(stream_id, flags, data[start:at])
        return data[at:]

    def _take_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._received += length
        if self._received >= RECEIVE_WINDOW // 2:
            self.write(frames.window_update(0, self._received))
            self._received = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        stream.received += length
        if stream.received >= RECEIVE_WINDOW // 2:
            self.write(frames.window_update(stream_id, stream.received))
            stream.received = 0
        stream.take_data(frames.content(flags, payload) if flags & frames.PADDED else payload)
        if flags & frames.END_STREAM:
            stream.take_end()

    def _take_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        block = frames.content(flags, payload)
        if flags & frames.END_HEADERS:
            self._take_block(stream_id, flags, block)
        else:
            self._open_block = stream_id, flags, bytearray(block)

    def _take_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._open_block is None or self._open_block[0] != stream_id:
            raise ProtocolError(frames.PROTOCOL_ERROR, "a CONTINUATION of nothing")
        _, first_flags, block = self._open_block
        block += payload
        if len(block) > MAX_HEADER_BYTES:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADER_BYTES} bytes")
        if flags & frames.END_HEADERS:
            self._open_block = None
            self._take_block(stream_id, first_flags, bytes(block))

    def _take_block(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            headers = [(str(name), str(value)) for name, value in self._decoder.decode(block)]
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise ProtocolError(frames.COMPRESSION_ERROR, f"headers cannot be read: {error}") from error
        last = bool(flags & frames.END_STREAM)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.take_stream(stream_id, headers, last=last)
        else:
            stream.take_headers(headers, last=last)

    def _take_reset(self, stream_id: int, flags: int, payload: bytes) -> None:
        code = frames.parse_number(payload)
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.take_reset(code)

    def _take_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        given = frames.parse_settings(payload)
        if (table_bytes := given.get(frames.HEADER_TABLE_SIZE)) is not None:
            self._encoder.header_table_size = min(table_bytes, 4096)
        max_frame = given.get(frames.MAX_FRAME_SIZE, self._max_frame)
        if not frames.MIN_MAX_FRAME <= max_frame <= frames.MAX_MAX_FRAME:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"frames of {max_frame} bytes")
        self._max_frame = max_frame
        self.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if (window := given.get(frames.INITIAL_WINDOW_SIZE)) is not None:
            if window > frames.MAX_WINDOW:
                raise ProtocolError(frames.FLOW_CONTROL_ERROR, f"a window of {window} bytes")
            more, self.first_stream_window = window - self.first_stream_window, window
            for stream in list(self.streams.values()):
                stream.send_window += more
            self._send_all_unsent()

    def _take_window_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        more = frames.parse_number(payload)
        if stream_id == 0:
            self.send_window += more
            if self.send_window > frames.MAX_WINDOW:
                raise ProtocolError(frames.FLOW_CONTROL_ERROR, "a window that is too large")
            self._send_all_unsent()
            return
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.send_window += more
            if stream.unsent:
                self.send_unsent(stream)

    def _send_all_unsent(self) -> None:
        for stream in list(self.streams.values()):
            if stream.unsent:
                self.send_unsent(stream)

    def _take_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "a PING of the wrong size")
        if not flags & frames.ACK:
            self.write(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _take_goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        last_id, code, reason = frames.parse_goaway(payload)
        text = f"the other side takes no more (code {code}): {reason}"
        for stream in list(self.streams.values()):
            if stream.id > last_id or code != frames.NO_ERROR:
                stream.end(call_error(grpc.StatusCode.UNAVAILABLE, text))

    def _take_push(self, stream_id: int, flags: int, payload: bytes) -> None:
        raise ProtocolError(frames.PROTOCOL_ERROR, "a push that nobody wants")

    # --- ends --------------------------------------------------------------------------------------------------------

    def _ping(self) -> None:
        self.write(frames.frame(frames.PING, 0, 0, b"tidemill"))

    def _silent(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(call_error(grpc.StatusCode.UNAVAILABLE, "ping timeout"))

    def _end(self, error: AioRpcError) -> None:
        self._quiet.stop()
        self._transport = None
        for stream in list(self.streams.values()):
            stream.end(error)
