"""The public gRPC API."""

import asyncio
from typing import Any

import grpc

from tidemill.v1 import inference_pb2 as pb
from tidemill.v1.inference_pb2_grpc import InferenceServiceServicer
from tidemill_gateway.auth import Keys
from tidemill_gateway.gateway import Gateway
from tidemill_gateway.grpc_requests import add_last_fields, to_messages, to_response, to_spec
from tidemill_gateway.validation import invalid

FULL_NAME = "tidemill.v1.InferenceService"
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(InferenceServiceServicer):
    """Translates; the gateway decides."""

    def __init__(self, gateway: Gateway, keys: Keys) -> None:
        self._gateway = gateway
        self._keys = keys

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Streams one generation; the last message carries usage."""
        metadata = _metadata(context)
        tenant = self._keys.tenant(metadata.get("authorization", ""))
        spec = to_spec(request, metadata.get("traceparent", ""))
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        async with self._gateway.run(spec, tenant, streaming=True, on_stalled_client=task.cancel) as live:
            async for batch in live.outputs():
                response = to_response(live, batch)
                if live.finished:
                    add_last_fields(response, live)
                await context.write(response)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # type: ignore[override]
        """One model by name or alias."""
        self._keys.tenant(_metadata(context).get("authorization", ""))
        catalog = self._gateway.catalog
        return pb.GetModelResponse(model=catalog.describe(catalog.resolve(request.model)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # type: ignore[override]
        """All models."""
        self._keys.tenant(_metadata(context).get("authorization", ""))
        return pb.ListModelsResponse(models=self._gateway.catalog.models())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # type: ignore[override]
        """Token ids of a text, or of messages under the model's template."""
        self._keys.tenant(_metadata(context).get("authorization", ""))
        model = self._gateway.catalog.resolve(request.model)
        if request.WhichOneof("input") == "chat":
            text = model.chat_prompt(to_messages(request.chat), ())
        elif request.text:
            text = request.text
        else:
            raise invalid("input", "must not be empty")
        ids = await model.encode(text, add_special_tokens=request.WhichOneof("input") == "text")
        return pb.TokenizeResponse(token_ids=ids, tokens=[model.token_bytes.display_bytes(i) for i in ids])


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}
