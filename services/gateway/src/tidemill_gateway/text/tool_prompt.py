"""Tells a model of its tools: by its template where that takes tools, else by an addition to the system message."""

import json
from collections.abc import Sequence
from typing import Any

from tidemill_gateway.spec import ChatMessage, Tool

_INSTRUCTIONS = """# Tools

You may call one or more of these functions; each line is one function's signature in JSON:
<tools>
{signatures}
</tools>

For each call, answer with a JSON object of the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments object>}}
</tool_call>"""


def signature(tool: Tool) -> dict[str, Any]:
    """The tool as templates expect it: OpenAI's form."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def with_tool_instructions(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """The messages with the tools described in the system message, for a template that does not know tools."""
    signatures = "\n".join(json.dumps(signature(tool), ensure_ascii=False) for tool in tools)
    addition = _INSTRUCTIONS.format(signatures=signatures)
    if messages and messages[0].role == "system":
        head = ChatMessage(role="system", content=f"{messages[0].content}\n\n{addition}")
        return [head, *messages[1:]]
    return [ChatMessage(role="system", content=addition), *messages]


def as_plain_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Calls and their results as text, for a template that does not know them."""
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        return ChatMessage(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_json or "{}"}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    if not calls:
        return message
    return ChatMessage(role=message.role, content="\n".join([message.content, *calls]).strip())
