"""A canned OpenAI server, run as a script: what HTTP routers are measured in front of."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

STEP_S = 0.01
Message = MutableMapping[str, Any]


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Streams as many tokens as asked for, one each step; answers any other path with an empty object."""
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    streams = scope["path"] == "/v1/completions"
    kind = b"text/event-stream" if streams else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if not streams:
        answer = {"object": "list", "data": [{"id": "peer", "object": "model"}], "model_path": "peer"}
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
        return
    count = json.loads(body)["max_tokens"]
    for position in range(count):
        if position:
            await asyncio.sleep(STEP_S)
        await send({"type": "http.response.body", "body": _chunk("A", None), "more_body": True})
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    await send({"type": "http.response.body", "body": _chunk(None, usage) + b"data: [DONE]\n\n"})


def _chunk(text: str | None, usage: dict[str, int] | None) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"id": "c", "model": "peer", "choices": choices, "usage": usage}).encode() + b"\n\n"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
