"""The same client for programs without asyncio."""

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tidemill.completion import Completion
from tidemill.connection import CHANNEL_OPTIONS, call_timeout, key_metadata
from tidemill.errors import from_rpc_error
from tidemill.requests import GenerateOptions, Message, generate_request, input_fields
from tidemill.v1 import inference_pb2, inference_pb2_grpc


class Client:
    """A connection to a gateway; use it as a context manager or call close()."""

    def __init__(
        self,
        endpoint: str = "127.0.0.1:50051",
        api_key: str | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(endpoint, credentials, options=CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._metadata = key_metadata(api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        self._channel.close()

    def generate(
        self,
        *,
        model: str,
        text: str | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[inference_pb2.GenerateResponse, None, None]:
        """Streams one generation; leaving the loop early cancels the request."""
        request = generate_request(model, text=text, messages=messages, token_ids=token_ids, **options)
        call: Any = self._stub.Generate(request, metadata=self._metadata, timeout=call_timeout(request.timeout_s))
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def complete(
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
        for response in self.generate(model=model, text=text, messages=messages, token_ids=token_ids, **options):
            completion.add(response)
        return completion

    def models(self) -> list[inference_pb2.Model]:
        """The served models."""
        return list(self._unary(self._stub.ListModels, inference_pb2.ListModelsRequest()).models)

    def model(self, name: str) -> inference_pb2.Model:
        """One model by name or alias."""
        answer: inference_pb2.GetModelResponse = self._unary(
            self._stub.GetModel, inference_pb2.GetModelRequest(model=name)
        )
        return answer.model

    def tokenize(
        self, *, model: str, text: str | None = None, messages: Sequence[Message] | None = None
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text, or of chat messages under the model's template."""
        request = inference_pb2.TokenizeRequest(model=model, **input_fields(text=text, messages=messages))
        answer: inference_pb2.TokenizeResponse = self._unary(self._stub.Tokenize, request)
        return answer

    def _unary(self, call: Any, request: Any) -> Any:
        try:
            return call(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
