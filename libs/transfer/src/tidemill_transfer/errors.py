"""What a transfer can end with."""

from typing import Literal

TransferErrorCode = Literal["peer_lost", "deadline", "checksum", "truncated", "unavailable"]


class TransferError(Exception):
    """A transfer ended without its bytes.

    TransferError
    └── TransportUnavailable      the transport cannot be opened in this process
    """

    def __init__(self, code: TransferErrorCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: TransferErrorCode = code
        self.message = message


class TransportUnavailable(TransferError):
    """The named transport is missing something here; the message names it. Nothing falls back by itself."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)
