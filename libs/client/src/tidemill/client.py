"""The embedder's client on asyncio: generate, complete, models, tokenize. Failures are `TidemillError`."""

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from tidemill.completion import Completion
from tidemill.connection import CHANNEL_OPTIONS, call_timeout, key_metadata
from tidemill.errors import from_rpc_error
from tidemill.requests import GenerateOptions, Message, generate_request, input_fields
from tidemill.v1 import inference_pb2, inference_pb2_grpc


class Client:
    """A connection to a gateway; use it as an async context manager or call close()."""

    def __init__(
        self,
        endpoint: str = "127.0.0.1:50051",
        api_key: str | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(endpoint, credentials, options=CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._metadata = key_metadata(api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        *,
        model: str,
        text: str | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams one generation; leaving the loop early (and closing the generator) cancels the request."""
        request = generate_request(model, text=text, messages=messages, token_ids=token_ids, **options)
        call = self._stub.Generate(request, metadata=self._metadata, timeout=call_timeout(request.timeout_s))
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def complete(
        self,
        *,
        model: str,
        text: str | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """One generation, joined."""
        completion = Completion()
        async for response in self.generate(model=model, text=text, messages=messages, token_ids=token_ids, **options):
            completion.add(response)
        return completion

    async def models(self) -> list[inference_pb2.Model]:
        """The served models."""
        try:
            answer = await self._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return list(answer.models)

    async def model(self, name: str) -> inference_pb2.Model:
        """One model by name or alias."""
        try:
            answer = await self._stub.GetModel(inference_pb2.GetModelRequest(model=name), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return answer.model

    async def tokenize(
        self, *, model: str, text: str | None = None, messages: Sequence[Message] | None = None
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text, or of chat messages under the model's template."""
        request = inference_pb2.TokenizeRequest(model=model, **input_fields(text=text, messages=messages))
        try:
            return await self._stub.Tokenize(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
