"""The one place where what a handler raises becomes a status: the caller always gets one, and the log knows why."""

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError

from tidemill.v1 import errors_pb2
from tidemill_mesh import request_ids
from tidemill_mesh.errors import GRPC_STATUS, STATUS_DETAILS_KEY, MeshError, from_rpc_error, to_status
from tidemill_mesh.wire_text import bad_text_field

Context = grpc.aio.ServicerContext[Any, Any]
# What a caller does wrong is no news for the operator of the service.
QUIET_CODES = frozenset(
    {
        errors_pb2.ERROR_CODE_INVALID_ARGUMENT,
        errors_pb2.ERROR_CODE_CONTEXT_TOO_LONG,
        errors_pb2.ERROR_CODE_MODEL_NOT_FOUND,
        errors_pb2.ERROR_CODE_UNSUPPORTED,
        errors_pb2.ERROR_CODE_ALREADY_EXISTS,
        errors_pb2.ERROR_CODE_CANCELLED,
        errors_pb2.ERROR_CODE_TOO_LARGE,
        errors_pb2.ERROR_CODE_NOT_FOUND,
        errors_pb2.ERROR_CODE_STALE,
    }
)

log = structlog.get_logger()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler so that its errors reach the caller as google.rpc.Status with an ErrorDetail."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of the called method, wrapped."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        name = f"{'stream' if handler.request_streaming else 'unary'}_"
        name += "stream" if handler.response_streaming else "unary"
        make = getattr(grpc, f"{name}_rpc_method_handler")
        wrapped = _wrap(method, getattr(handler, name))
        deserializer = handler.request_deserializer
        if deserializer is not None and not handler.request_streaming:
            deserializer = _lenient(deserializer)
        return make(  # type: ignore[no-any-return]
            wrapped,
            request_deserializer=deserializer,
            response_serializer=handler.response_serializer,
        )


class _Unreadable:
    """Stands for a request that cannot be parsed, so that its caller is told why."""

    def __init__(self, error: MeshError) -> None:
        self.error = error


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What gRPC would answer with INTERNAL and no word of the field becomes an error of the request."""

    def parse(data: bytes) -> Any:
        try:
            return parse_request(deserialize, data)
        except MeshError as error:
            return _Unreadable(error)

    return parse


def parse_request(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    """The message; INVALID_ARGUMENT naming the field for bytes that are none."""
    try:
        return deserialize(data)
    except DecodeError as error:
        message_type = getattr(deserialize, "__self__", None)
        field = bad_text_field(data, message_type.DESCRIPTOR) if message_type is not None else ""
        text = f"{field}: is not UTF-8 text" if field else "the request is no message of its type"
        raise MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, text, field=field) from error


def _check_readable(request: Any) -> None:
    if isinstance(request, _Unreadable):
        raise request.error


def _wrap(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.isasyncgenfunction(behaviour):

        async def call(request: Any, context: Context) -> Any:
            request_ids.take(context.invocation_metadata() or ())
            try:
                _check_readable(request)
                return await behaviour(request, context)
            except (Exception, asyncio.CancelledError) as error:
                await _abort(method, context, error)

        return call

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        responses = None
        request_ids.take(context.invocation_metadata() or ())
        try:
            _check_readable(request)
            responses = behaviour(request, context)
            async for response in responses:
                yield response
        except (Exception, asyncio.CancelledError) as error:
            await _abort(method, context, error)
        finally:
            if responses is not None:
                await responses.aclose()

    return stream


async def _abort(method: str, context: Context, error: BaseException) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        # The call itself was cancelled: there is nobody left to answer.
        raise error
    failure = mesh_error_of(method, error)
    status = to_status(failure)
    trailers = (*(context.trailing_metadata() or ()), (STATUS_DETAILS_KEY, status.SerializeToString()))
    await context.abort(GRPC_STATUS[failure.code], status.message, trailing_metadata=trailers)


def mesh_error_of(method: str, error: BaseException) -> MeshError:
    """What a caller is told of a fault in a handler; the log gets what is news for the operator."""
    if isinstance(error, MeshError):
        if error.code not in QUIET_CODES:
            log.warning("call failed", method=method, error=str(error), field=error.field)
        return error
    if isinstance(error, asyncio.CancelledError):
        log.warning("a task inside the call was cancelled", method=method)
        return MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "the service dropped the work of this call")
    if isinstance(error, grpc.aio.AioRpcError):
        failure = from_rpc_error(error)
        log.warning("a call to another service failed", method=method, error=str(failure))
        return failure
    error_id = secrets.token_hex(4)
    log.error("call failed unexpectedly", method=method, error_id=error_id, exc_info=error)
    return MeshError(errors_pb2.ERROR_CODE_INTERNAL, f"internal error; the service's log names it {error_id}")
