"""The one exception of the client, and how a failed call becomes one.

TidemillError
    code            tidemill.v1.ErrorCode: what went wrong
    message         safe to show
    field, limit    what was wrong and the limit it broke, "" when neither applies
    retry_after_s   0: not stated
"""

import re
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from tidemill.v1 import errors_pb2
from tidemill.v1.errors_pb2 import ErrorCode

STATUS_DETAILS_KEY = "grpc-status-details-bin"

# What a call that failed without an ErrorDetail (refused by gRPC itself, or by something between) most likely means.
CODE_OF_STATUS: dict[grpc.StatusCode, "ErrorCode.ValueType"] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors_pb2.ERROR_CODE_INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: errors_pb2.ERROR_CODE_NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: errors_pb2.ERROR_CODE_UNSUPPORTED,
    grpc.StatusCode.UNAUTHENTICATED: errors_pb2.ERROR_CODE_UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: errors_pb2.ERROR_CODE_PERMISSION_DENIED,
    grpc.StatusCode.ALREADY_EXISTS: errors_pb2.ERROR_CODE_ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE: errors_pb2.ERROR_CODE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: errors_pb2.ERROR_CODE_CANCELLED,
    grpc.StatusCode.ABORTED: errors_pb2.ERROR_CODE_STALE,
}

# gRPC's own words, in every language that wraps its core, for a call that this side has cancelled.
LOCALLY_CANCELLED = "Locally cancelled by application!"

_TOO_LARGE = re.compile(r"message larger than max \(\d+ vs\. (\d+)\)")


class TidemillError(Exception):
    """A call that failed, with the code, field and limit the service gave."""

    def __init__(
        self, code: "ErrorCode.ValueType", message: str, field: str = "", limit: str = "", retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        name = errors_pb2.ErrorCode.Name(self.code).removeprefix("ERROR_CODE_")
        where = f" ({self.field})" if self.field else ""
        return f"{name}{where}: {self.message}"


def _status_class() -> type:
    # google.rpc.Status by its wire shape, in a pool of its own: it spares embedders one more dependency and cannot
    # clash with a googleapis package that is installed beside this one.
    file = descriptor_pb2.FileDescriptorProto(name="tidemill/rpc_status.proto", package="tidemill.rpc", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    detail = file.message_type.add(name="Detail")
    detail.field.add(name="type_url", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    detail.field.add(name="value", number=2, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL)
    status = file.message_type.add(name="Status")
    status.field.add(
        name="details",
        number=3,
        type=kinds.TYPE_MESSAGE,
        type_name=".tidemill.rpc.Detail",
        label=kinds.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tidemill.rpc.Status"))


_Status = _status_class()


def detail_of(error: Any) -> errors_pb2.ErrorDetail:
    """The ErrorDetail of a failed call (any grpc.RpcError that has ended); made from its status if it carries none."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and (detail := _parse(value)) is not None:
            return detail
    status, text = error.code(), error.details() or ""
    if match := _TOO_LARGE.search(text):
        limit = f"{match.group(1)} bytes"
        return errors_pb2.ErrorDetail(code=errors_pb2.ERROR_CODE_TOO_LARGE, message=text, limit=limit)
    if status is grpc.StatusCode.CANCELLED and text != LOCALLY_CANCELLED:
        # What gRPC makes of a call that meets a server in the moment at which it stops: nobody wanted its end.
        gone = f"the server stopped and dropped the call ({text or status.name})"
        return errors_pb2.ErrorDetail(code=errors_pb2.ERROR_CODE_UNAVAILABLE, message=gone)
    code = CODE_OF_STATUS.get(status, errors_pb2.ERROR_CODE_INTERNAL)
    return errors_pb2.ErrorDetail(code=code, message=text or status.name)


def _parse(value: bytes) -> errors_pb2.ErrorDetail | None:
    type_name = errors_pb2.ErrorDetail.DESCRIPTOR.full_name
    try:
        for item in _Status.FromString(value).details:  # type: ignore[attr-defined]
            if item.type_url.rpartition("/")[2] == type_name:
                return errors_pb2.ErrorDetail.FromString(item.value)
    except DecodeError:
        # A proxy mangled it: the plain status still says what can be said.
        return None
    return None


def from_rpc_error(error: grpc.RpcError) -> TidemillError:
    """The failed call as a TidemillError."""
    detail = detail_of(error)
    return TidemillError(detail.code, detail.message, detail.field, detail.limit, detail.retry_after_s)
