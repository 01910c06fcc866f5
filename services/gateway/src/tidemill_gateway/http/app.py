"""The endpoints: routes, request ids, keys, errors."""

import ipaddress
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog

from tidemill.v1 import errors_pb2
from tidemill.v1.inference_pb2 import Model
from tidemill_gateway.auth import Keys
from tidemill_gateway.gateway import Gateway, internal_error
from tidemill_gateway.http.chat_body import parse_chat
from tidemill_gateway.http.chat_reply import ChatReply
from tidemill_gateway.http.completion_body import parse_completion
from tidemill_gateway.http.completion_reply import CompletionReply
from tidemill_gateway.http.event_stream import send_events
from tidemill_gateway.http.exchange import Exchange
from tidemill_gateway.http.reply import Reply, collect, join_outputs, placement_fields
from tidemill_gateway.http.request_body import StreamOptions
from tidemill_gateway.live_request import LiveRequest
from tidemill_gateway.spec import GenerationSpec
from tidemill_gateway.validation import invalid
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import CONTENT_TYPE

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}\Z")
PLACEMENT_HEADER = b"x-tidemill-placement"

Handler = Callable[[Exchange], Awaitable[None]]
Parse = Callable[[dict[str, Any]], tuple[GenerationSpec, StreamOptions, list[str]]]

log = structlog.get_logger()


class ApiApp:
    """OpenAI's endpoints over the gateway."""

    def __init__(self, gateway: Gateway, keys: Keys, exposition: Callable[[], bytes]) -> None:
        self._gateway = gateway
        self._keys = keys
        self._exposition = exposition
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/debug/holds": ("GET", self._holds),
        }

    def body_limit(self, exchange: Exchange) -> int:
        """Nothing is kept of what a caller without a key, or for no endpoint, sends."""
        if exchange.method != "POST" or exchange.path not in self._routes:
            return 0
        try:
            self._keys.tenant(exchange.header(b"authorization"))
        except MeshError:
            return 0
        return self._gateway.settings.max_body_bytes

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request, whatever happens."""
        if self._gateway.admission.draining:
            exchange.keep_alive = False
        given = exchange.header(b"x-request-id")
        exchange.request_id = given if _REQUEST_ID.match(given) else f"req-{secrets.token_hex(12)}"
        try:
            await self._route(exchange)
        except MeshError as error:
            exchange.fail(error)
        except Exception:
            error_id = secrets.token_hex(4)
            log.exception("request failed unexpectedly", request_id=exchange.request_id, error_id=error_id)
            exchange.fail(internal_error(error_id))

    async def _route(self, exchange: Exchange) -> None:
        method, handler = self._routes.get(exchange.path, ("", self._not_found))
        if exchange.path.startswith("/v1/models/"):
            method, handler = "GET", self._model
        if method not in ("", exchange.method) and not (method == "GET" and exchange.method == "HEAD"):
            body = orjson.dumps({"error": {"message": f"use {method}", "type": "invalid_request_error", "param": None,
                                           "code": "method_not_allowed"}})  # fmt: skip
            exchange.reply(405, body, headers=[(b"allow", method.encode())])
            return
        await handler(exchange)

    # --- generation --------------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_chat, ChatReply)

    async def _completion(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_completion, CompletionReply)

    async def _generate(self, exchange: Exchange, parse: Parse, reply_type: type[Reply]) -> None:
        tenant = self._keys.tenant(exchange.header(b"authorization"))
        spec, options = self._parsed(exchange, parse)
        spec.request_id = exchange.request_id
        spec.traceparent = exchange.header(b"traceparent")
        spec.include_placement = exchange.header(PLACEMENT_HEADER) in ("1", "true")
        stalled = exchange.connection.cut
        async with self._gateway.run(spec, tenant, streaming=options.stream, on_stalled_client=stalled) as live:
            exchange.body.drop()
            reply = reply_type(live, spec.model, int(time.time()))
            if options.stream:
                await send_events(exchange, live, reply, _placement_headers, include_usage=options.include_usage)
            else:
                await _whole(exchange, live, reply)

    def _parsed(self, exchange: Exchange, parse: Parse) -> tuple[GenerationSpec, StreamOptions]:
        # Apart from what runs: the names of unknown fields may be as long as a body.
        spec, options, unknown = parse(_json_object(exchange.body.whole(self._gateway.settings.max_body_bytes)))
        if unknown:
            self._gateway.metrics.unknown_fields.inc(len(unknown))
            log.debug("unknown fields are ignored", request_id=exchange.request_id, fields=unknown[:16])
        return spec, options

    # --- the rest ----------------------------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        self._keys.tenant(exchange.header(b"authorization"))
        models = [_model_fields(model) for model in self._gateway.catalog.models()]
        exchange.reply(200, orjson.dumps({"object": "list", "data": models}))

    async def _model(self, exchange: Exchange) -> None:
        self._keys.tenant(exchange.header(b"authorization"))
        catalog = self._gateway.catalog
        model = catalog.describe(catalog.resolve(exchange.path.removeprefix("/v1/models/")))
        exchange.reply(200, orjson.dumps(_model_fields(model)))

    async def _health(self, exchange: Exchange) -> None:
        draining = self._gateway.admission.draining
        state = {"status": "draining" if draining else "ok", "ready": self._gateway.catalog.any_ready()}
        exchange.reply(503 if draining else 200, orjson.dumps(state))

    async def _ready(self, exchange: Exchange) -> None:
        ready = self._gateway.catalog.any_ready() and not self._gateway.admission.draining
        exchange.reply(200 if ready else 503, orjson.dumps({"ready": ready}))

    async def _metrics(self, exchange: Exchange) -> None:
        if self._keys.asked_for:
            # Tenants share this port; what others' prompts hit is not theirs to read. Operators use `http_port`.
            await self._not_found(exchange)
            return
        exchange.reply(200, self._exposition(), CONTENT_TYPE.encode())

    async def _holds(self, exchange: Exchange) -> None:
        if not _is_loopback(exchange.connection.client_host):
            await self._not_found(exchange)
            return
        exchange.reply(200, orjson.dumps(self._gateway.holds()))

    async def _not_found(self, exchange: Exchange) -> None:
        raise MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, f"there is nothing at {exchange.path[:256]}")


async def _whole(exchange: Exchange, live: LiveRequest, reply: Reply) -> None:
    whole = join_outputs(len(live.pipes))
    async for batch in live.outputs():
        collect(whole, batch)
    exchange.reply(200, reply.whole(whole), headers=_placement_headers(live))


def _placement_headers(live: LiveRequest) -> list[tuple[bytes, bytes]]:
    if not live.prepared.spec.include_placement:
        return []
    return [(PLACEMENT_HEADER, orjson.dumps(placement_fields(live)))]


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid("body", f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid("body", "must be a JSON object")
    return value


def _model_fields(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "tidemill",
        "root": model.name,
        "aliases": list(model.aliases),
        "revision": model.revision,
        "max_model_len": model.context_tokens,
        "ready": model.ready,
    }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
