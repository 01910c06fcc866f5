"""The public gRPC API."""

import asyncio
from typing import Any

import grpc

from tidemill.v1 import inference_pb2 as pb
from tidemill.v1.inference_pb2_grpc import InferenceServiceServicer
from tidemill_gateway.bounded_reads import accepted, caller, metadata_of
from tidemill_gateway.gateway import Gateway
from tidemill_gateway.grpc_requests import add_last_fields, to_messages, to_placement, to_response, to_spec
from tidemill_gateway.validation import invalid, too_long

TOKENIZED_CONTEXTS = 4
"""Tokenize counts texts that do not fit, up to so many times the context."""
FULL_NAME = "tidemill.v1.InferenceService"
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(InferenceServiceServicer):
    """Translates; the gateway decides. Who calls, BoundedReads has asked before it read the message."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Streams one generation; the last message carries usage."""
        spec = to_spec(request, metadata_of(context).get("traceparent", ""))
        # Its memory counts no more once it is accepted, and may be large: fields that nobody knows are kept too.
        del request
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        async with self._gateway.run(spec, caller(), streaming=True, on_stalled_client=task.cancel) as live:
            accepted()
            first = True
            async for batch in live.outputs():
                response = to_response(live, batch)
                if first and spec.include_placement:
                    response.placement.CopyFrom(to_placement(live))
                first = False
                if live.finished:
                    add_last_fields(response, live)
                await context.write(response)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # type: ignore[override]
        """One model by name or alias."""
        catalog = self._gateway.catalog
        return pb.GetModelResponse(model=catalog.describe(catalog.resolve(request.model)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # type: ignore[override]
        """All models."""
        return pb.ListModelsResponse(models=self._gateway.catalog.models())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # type: ignore[override]
        """Token ids of a text, or of messages under the model's template."""
        model = self._gateway.catalog.resolve(request.model)
        if request.WhichOneof("input") == "chat":
            text = model.chat_prompt(to_messages(request.chat), ())
        elif request.text:
            text = request.text
        else:
            raise invalid("input", "must not be empty")
        most = TOKENIZED_CONTEXTS * model.card.context_tokens
        ids = await model.encode_within(text, most, add_special_tokens=request.WhichOneof("input") == "text")
        if ids is None:
            field = request.WhichOneof("input") or ""
            message = f"this has more tokens than {TOKENIZED_CONTEXTS} times the context of {model.card.name}"
            raise too_long(field, message, most)
        return pb.TokenizeResponse(token_ids=ids, tokens=[model.token_bytes.display_bytes(i) for i in ids])
