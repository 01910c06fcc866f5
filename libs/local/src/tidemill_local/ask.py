"""One question to a running cluster, by gRPC and by OpenAI HTTP, with what a newcomer wants to see of the answers."""

import http.client
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tidemill.client import Client
from tidemill.v1 import inference_pb2

TIMEOUT_S = 300.0


class AskFailed(Exception):
    """The HTTP answer was an error; the message is its body."""


@dataclass
class Answer:
    """A streamed answer and its times."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefill_instance: str = ""
    decode_instance: str = ""
    started_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, text: str) -> None:
        """Takes new text as it arrives."""
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.text += text

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text."""
        return max(0.0, self.first_s - self.started_s)

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.last_s - self.first_s) / max(1, self.completion_tokens - 1)

    def summary(self) -> str:
        """One line of figures."""
        workers = f"prefill {self.prefill_instance or '-'}, decode {self.decode_instance or '-'}"
        tokens = f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.completion_tokens} output"
        return f"TTFT {self.ttft_s * 1000:.0f} ms, TPOT {self.tpot_s * 1000:.1f} ms, {tokens}; {workers}"


def show(text: str) -> None:
    """Prints a piece of an answer as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


async def ask_grpc(endpoint: str, model: str, question: str, max_tokens: int, *, api_key: str | None = None) -> Answer:
    """Asks through the embedder's client; prints the text as it streams."""
    answer = Answer()
    messages = [{"role": "user", "content": question}]
    async with Client(endpoint, api_key) as client:
        stream = client.generate(
            model=model, messages=messages, max_tokens=max_tokens, temperature=0.0, include_placement=True
        )
        async for response in stream:
            take_grpc(answer, response)
    return answer


def take_grpc(answer: Answer, response: inference_pb2.GenerateResponse) -> None:
    """Adds one streamed response to the answer."""
    text = "".join(choice.text for choice in response.choices)
    if text:
        answer.add(text)
        show(text)
    if response.HasField("usage"):
        usage = response.usage
        answer.prompt_tokens, answer.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        answer.cached_tokens = usage.cached_tokens_l1 + usage.cached_tokens_l2 + usage.cached_tokens_l3
    if response.HasField("placement"):
        answer.prefill_instance = response.placement.prefill_instance or answer.prefill_instance
        answer.decode_instance = response.placement.decode_instance or answer.decode_instance


def ask_http(endpoint: str, model: str, question: str, max_tokens: int, *, api_key: str | None = None) -> Answer:
    """Asks /v1/chat/completions as a stream with nothing but the standard library; prints the text as it comes."""
    answer = Answer()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(endpoint, timeout=TIMEOUT_S)
    try:
        headers = {"content-type": "application/json", "x-tidemill-placement": "1"}
        headers |= {"authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise AskFailed(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
        for event in server_sent_events(response):
            take_http(answer, event)
    finally:
        connection.close()
    return answer


def server_sent_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON values of a stream of `data:` lines, up to [DONE]."""
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if data.startswith("{"):
            yield json.loads(data)


def take_http(answer: Answer, event: dict[str, Any]) -> None:
    """Adds one chunk to the answer."""
    if "error" in event:
        raise AskFailed(str(event["error"]))
    for choice in event.get("choices", []):
        text = choice.get("delta", {}).get("content") or ""
        if text:
            answer.add(text)
            show(text)
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    placement = event.get("placement")
    if placement:
        answer.prefill_instance = placement.get("prefill_instance", "")
        answer.decode_instance = placement.get("decode_instance", "")
