"""The one error that crosses the wire: a code with its gRPC and HTTP status, a public message, field and limit."""

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tidemill import errors as client_errors
from tidemill.v1 import errors_pb2
from tidemill.v1.errors_pb2 import ErrorCode

STATUS_DETAILS_KEY = client_errors.STATUS_DETAILS_KEY
# Trailers larger than 8 KiB may be refused by the receiving side, and every byte of a message travels up to six times:
# percent-encoded in grpc-message and twice, in base64, in the details.
MAX_MESSAGE_BYTES = 640
MAX_FIELD_BYTES = 128

_STATUSES: tuple[tuple["ErrorCode.ValueType", grpc.StatusCode, int], ...] = (
    (errors_pb2.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (errors_pb2.ERROR_CODE_MODEL_NOT_FOUND, grpc.StatusCode.NOT_FOUND, 404),
    (errors_pb2.ERROR_CODE_UNSUPPORTED, grpc.StatusCode.UNIMPLEMENTED, 400),
    (errors_pb2.ERROR_CODE_UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED, 401),
    (errors_pb2.ERROR_CODE_PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED, 403),
    (errors_pb2.ERROR_CODE_ALREADY_EXISTS, grpc.StatusCode.ALREADY_EXISTS, 409),
    (errors_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (errors_pb2.ERROR_CODE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, 503),
    (errors_pb2.ERROR_CODE_DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    (errors_pb2.ERROR_CODE_CANCELLED, grpc.StatusCode.CANCELLED, 499),
    (errors_pb2.ERROR_CODE_TOO_LARGE, grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    (errors_pb2.ERROR_CODE_WORKER_LOST, grpc.StatusCode.UNAVAILABLE, 502),
    (errors_pb2.ERROR_CODE_STALE, grpc.StatusCode.ABORTED, 409),
    (errors_pb2.ERROR_CODE_NOT_FOUND, grpc.StatusCode.NOT_FOUND, 404),
    (errors_pb2.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL, 500),
)
GRPC_STATUS: dict["ErrorCode.ValueType", grpc.StatusCode] = {code: status for code, status, _ in _STATUSES}
HTTP_STATUS: dict["ErrorCode.ValueType", int] = {code: http for code, _, http in _STATUSES}


class MeshError(Exception):
    """A failure that the caller is told of: raised anywhere, translated at the border of the process."""

    def __init__(
        self, code: "ErrorCode.ValueType", message: str, *, field: str = "", limit: str = "", retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.code = code if code in GRPC_STATUS else errors_pb2.ERROR_CODE_INTERNAL
        self.message = message
        self.field = field
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{code_name(self.code)}: {self.message}"

    def to_detail(self) -> errors_pb2.ErrorDetail:
        """The form that travels."""
        return errors_pb2.ErrorDetail(
            code=self.code,
            message=_cut(self.message, MAX_MESSAGE_BYTES),
            field=_cut(self.field, MAX_FIELD_BYTES),
            limit=_cut(self.limit, MAX_FIELD_BYTES),
            retry_after_s=self.retry_after_s,
        )

    @classmethod
    def from_detail(cls, detail: errors_pb2.ErrorDetail) -> "MeshError":
        """The error of a detail that arrived."""
        return cls(
            detail.code, detail.message, field=detail.field, limit=detail.limit, retry_after_s=detail.retry_after_s
        )


class StartError(Exception):
    """A service cannot start as it is told to; the message says why, and is all that its operator needs."""


def _cut(text: str, max_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return text if len(encoded) <= max_bytes else encoded[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def code_name(code: "ErrorCode.ValueType") -> str:
    """ "DEADLINE_EXCEEDED" for ERROR_CODE_DEADLINE_EXCEEDED."""
    return errors_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_")


def code_from_name(name: str) -> "ErrorCode.ValueType":
    """ERROR_CODE_DEADLINE_EXCEEDED for "DEADLINE_EXCEEDED"; ValueError for a name that is none."""
    return errors_pb2.ErrorCode.Value(f"ERROR_CODE_{name}")


def from_rpc_error(error: grpc.aio.AioRpcError) -> MeshError:
    """The error that a failed call carries; one made from its status when it carries none."""
    return MeshError.from_detail(client_errors.detail_of(error))


def to_status(error: MeshError) -> status_pb2.Status:
    """google.rpc.Status with the ErrorDetail, and a RetryInfo where a retry makes sense."""
    detail = error.to_detail()
    status = status_pb2.Status(code=GRPC_STATUS[error.code].value[0], message=detail.message)
    status.details.append(_pack(detail))
    if error.retry_after_s > 0:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        status.details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def _pack(message: errors_pb2.ErrorDetail | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
