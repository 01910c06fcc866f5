"""What commands and reports are both made of."""

from typing import Literal

import msgspec

Stage = Literal["prefill", "decode", "whole"]
FinishReason = Literal["stop", "length", "prefilled", "aborted", "error"]


class RequestKey(msgspec.Struct, frozen=True, array_like=True):
    """One choice of one attempt of one request."""

    request_id: str
    choice: int = 0
    attempt: int = 0


class EngineError(msgspec.Struct):
    """Why a request failed; `code` is the name of a tidemill.v1.ErrorCode without its prefix."""

    code: str
    message: str
    field: str = ""
    limit: str = ""
