"""Calls that a gateway sends over one stream, several in a message; every one is answered."""

import secrets
from typing import Protocol

import structlog

from tidemill.mesh.v1.router_pb2 import (
    PlaceDecodeRequest,
    PlaceDecodeResponse,
    PlacePrefillRequest,
    PlacePrefillResponse,
    ReportRequest,
    ReportResponse,
    RouterAnswer,
    RouterCall,
    RouterServiceConnectRequest,
    RouterServiceConnectResponse,
)
from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import MeshError
from tidemill_mesh.streams.server import ServerStream

log = structlog.get_logger()


class Decisions(Protocol):
    """What the calls ask for; MeshError for what cannot be had."""

    def place_prefill(self, request: PlacePrefillRequest) -> PlacePrefillResponse:
        """Where a request starts."""

    def place_decode(self, request: PlaceDecodeRequest) -> PlaceDecodeResponse:
        """Where it goes on."""

    def report(self, request: ReportRequest) -> ReportResponse:
        """Progress and outcomes."""


def serve_calls(stream: ServerStream, decisions: Decisions) -> None:
    """Answers a gateway's messages where they are read, each with one message, until either side ends."""

    def answer(data: bytes) -> None:
        request = RouterServiceConnectRequest.FromString(data)
        stream.send(answer_all(request, decisions).SerializeToString())

    stream.on_message = answer


def answer_all(request: RouterServiceConnectRequest, decisions: Decisions) -> RouterServiceConnectResponse:
    """The answers of one message's calls, in their order."""
    return RouterServiceConnectResponse(answers=[_answer(call, decisions) for call in request.calls])


def _answer(call: RouterCall, decisions: Decisions) -> RouterAnswer:
    try:
        match call.WhichOneof("call"):
            case "place_prefill":
                return RouterAnswer(id=call.id, place_prefill=decisions.place_prefill(call.place_prefill))
            case "place_decode":
                return RouterAnswer(id=call.id, place_decode=decisions.place_decode(call.place_decode))
            case "report":
                return RouterAnswer(id=call.id, report=decisions.report(call.report))
            case _:
                error = MeshError(errors_pb2.ERROR_CODE_UNSUPPORTED, "this router does not know the call", field="call")
    except MeshError as refusal:
        error = refusal
    except Exception:
        error_id = secrets.token_hex(4)
        log.exception("a call on a gateway's stream failed unexpectedly", error_id=error_id)
        message = f"internal error; the router's log names it {error_id}"
        error = MeshError(errors_pb2.ERROR_CODE_INTERNAL, message)
    return RouterAnswer(id=call.id, error=error.to_detail())
