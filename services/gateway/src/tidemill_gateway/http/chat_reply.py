"""Answers of /v1/chat/completions: one JSON object, or chunks of server-sent events."""

from typing import Any

import orjson

from tidemill_gateway.http.logprobs import chat_logprobs
from tidemill_gateway.http.reply import Reply
from tidemill_gateway.output import ChoiceOutput
from tidemill_gateway.text.tool_calls import CallPart, ToolCall


class ChatReply(Reply):
    """Chat completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self) -> bytes:
        """The role of each choice, once and in order of index."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self.event(b'{"index":%d,' % i + delta) for i in range(len(self.request.pipes)))

    def chunk_choice(self, output: ChoiceOutput) -> bytes:
        """One choice's part of a chunk."""
        delta: dict[str, Any] = {}
        if output.text:
            delta["content"] = output.text
        if output.call_parts:
            delta["tool_calls"] = [_call_delta(part) for part in output.call_parts]
        logprobs = b"null"
        if output.logprobs:
            logprobs = orjson.dumps(chat_logprobs(output, self.request.model.token_bytes))
        finish = b"null" if output.finish is None else b'"%s"' % output.finish.encode()
        return b'{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s}' % (
            output.index,
            orjson.dumps(delta),
            logprobs,
            finish,
        )

    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        """One choice of the one answer."""
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if output.tool_calls:
            message["content"] = output.text or None
            message["tool_calls"] = [_call(call) for call in output.tool_calls]
        logprobs = None
        if self.request.prepared.spec.sampling.logprobs:
            logprobs = chat_logprobs(output, self.request.model.token_bytes)
        return {"index": output.index, "message": message, "logprobs": logprobs, "finish_reason": output.finish}


def _call_delta(part: CallPart) -> dict[str, Any]:
    """The first piece names the call; clients join what follows by the index."""
    if not part.id:
        return {"index": part.index, "function": {"arguments": part.arguments_json}}
    function = {"name": part.name, "arguments": part.arguments_json}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
