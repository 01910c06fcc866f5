"""One call on a connection: whole messages out and in, a status at its end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import structlog
from grpc.aio import AioRpcError

from tidemill_mesh.streams import frames
from tidemill_mesh.streams.message_reader import MessageReader, prefix
from tidemill_mesh.streams.status import Header, call_error

log = structlog.get_logger()


class Carrier(Protocol):
    """What a stream needs of its connection."""

    writable: bool

    def send_data(self, stream: "Stream", data: bytes) -> bool:
        """Sends all of `data` if the other side takes it now."""

    def send_unsent(self, stream: "Stream") -> None:
        """Sends of `stream.unsent` what the other side takes now."""

    def send_headers(self, stream_id: int, headers: Sequence[Header], *, last: bool) -> None:
        """Sends headers; the last ones end this side."""

    def write(self, data: bytes) -> None:
        """Hands frames to the transport."""

    def forget(self, stream: "Stream") -> None:
        """Nothing more is sent or taken for it."""


class Stream(ABC):
    """Callbacks come in the order of what arrives and return at once; `on_end` is the last, and comes once."""

    def __init__(self, carrier: Carrier, stream_id: int, send_window: int, max_message_bytes: int) -> None:
        self.id = stream_id
        self.on_message: Callable[[bytes], object] = lambda message: None
        self.on_writable: Callable[[], object] = lambda: None
        self.on_end: Callable[[AioRpcError | None], object] = lambda error: None
        self.ended = False
        self.send_window = send_window
        self.unsent = bytearray()
        """Messages, or the rest of one, that wait for the other side's window."""
        self.received = 0
        """Bytes since the other side was last allowed more."""
        self._carrier = carrier
        self._reader = MessageReader(max_message_bytes)

    @property
    def writable(self) -> bool:
        """Whether the other side takes what is sent now; False: better wait for `on_writable`."""
        return self._carrier.writable and not self.unsent and not self.ended

    def send(self, message: bytes) -> None:
        """Sends a message; nothing happens once the call has ended."""
        if self.ended:
            return
        data = prefix(len(message)) + message
        if self.unsent or not self._carrier.send_data(self, data):
            self.unsent += data
            self._carrier.send_unsent(self)

    def cancel(self) -> None:
        """Ends the call at once, from this side."""
        self.reset(frames.CANCEL, call_error(grpc.StatusCode.CANCELLED, "cancelled on this side"))

    def reset(self, code: int, error: AioRpcError) -> None:
        """Ends the call at once, and says so to both sides."""
        if not self.ended:
            self._carrier.write(frames.reset(self.id, code))
            self.end(error)

    def end(self, error: AioRpcError | None) -> None:
        """The call is over; only the first end counts."""
        if not self.ended:
            self.ended = True
            self.unsent.clear()
            self._carrier.forget(self)
            try:
                self.on_end(error)
            except Exception:
                log.exception("the end of a stream could not be handled", stream=self.id)

    # --- for the connection ------------------------------------------------------------------------------------------

    def take_data(self, data: bytes) -> None:
        """Bytes of messages have come."""
        try:
            messages = self._reader.feed(data)
        except AioRpcError as error:
            self.fail(error)
            return
        for message in messages:
            if self.ended:
                return
            try:
                self.on_message(message)
            except Exception:
                log.exception("a message of a stream could not be handled", stream=self.id)
                self.fail(call_error(grpc.StatusCode.INTERNAL, "this side failed on a message"))

    @abstractmethod
    def take_headers(self, headers: Sequence[Header], *, last: bool) -> None:
        """Headers after those that opened the stream; the last ones are trailers."""

    @abstractmethod
    def take_end(self) -> None:
        """The other side sends nothing more."""

    @abstractmethod
    def fail(self, error: AioRpcError) -> None:
        """This side cannot go on."""

    def take_reset(self, code: int) -> None:
        """The other side has ended the call at once."""
        status = grpc.StatusCode.CANCELLED if code == frames.CANCEL else grpc.StatusCode.UNAVAILABLE
        self.end(call_error(status, f"the other side has reset the stream (code {code})"))

    def all_sent(self) -> None:
        """Nothing waits any more for the other side's window."""
        self.on_writable()
