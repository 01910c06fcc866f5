"""Tokens of a live request as the pieces of text, tool calls and log-probabilities that both APIs send."""

from dataclasses import dataclass, field
from typing import Literal

from tidemill.mesh.v1 import worker_pb2
from tidemill.mesh.v1.worker_pb2 import Logprobs
from tidemill_gateway.flow.generation import Tokens
from tidemill_gateway.intake import Prepared
from tidemill_gateway.text.choice_text import ChoiceText, TextDelta
from tidemill_gateway.text.tool_calls import (
    CallPart,
    HermesParser,
    NamedCallParser,
    RequiredCallsParser,
    ToolCall,
)

FinishName = Literal["stop", "length", "tool_calls"]
CallParser = HermesParser | NamedCallParser | RequiredCallsParser


@dataclass(slots=True)
class ChoiceOutput:
    """What one choice got; `finish` is set in its last."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish: FinishName | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls that became complete."""
    call_parts: list[CallPart] = field(default_factory=list)
    """The same calls, and such as are not complete yet, in pieces."""
    stop_string: str = ""
    ends_with_stop_token: bool = False
    """The last of token_ids is a stop token: it has no text."""


class ChoicePipe:
    """Text, stop strings and tool calls of one choice."""

    def __init__(self, index: int, prepared: Prepared) -> None:
        spec = prepared.spec
        self.index = index
        self.finished = False
        self.text = ChoiceText(prepared.model.token_bytes, spec.sampling.stop, prepared.stop_token_ids)
        self._stop_token_ids = prepared.stop_token_ids
        self._parser = _parser(prepared)
        self._one_call = not spec.parallel_tool_calls
        self._called = False

    def push(self, tokens: Tokens) -> ChoiceOutput:
        """Runs new tokens through; `finish` is set when the choice is complete, with or without the worker's word."""
        delta = self.text.push(tokens.token_ids, tokens.logprobs)
        finish: FinishName | None = "stop" if delta.stop_string else None
        ends_with_stop_token = False
        if finish is None and tokens.finish is not None:
            _append(delta, self.text.finish())
            finish = "length" if tokens.finish == worker_pb2.FINISH_LENGTH and not delta.stop_string else "stop"
            last = tokens.token_ids[-1] if tokens.token_ids else -1
            ends_with_stop_token = finish == "stop" and last in self._stop_token_ids
        output = ChoiceOutput(
            self.index,
            delta.text,
            delta.token_ids,
            delta.logprobs,
            finish,
            stop_string=delta.stop_string,
            ends_with_stop_token=ends_with_stop_token,
        )
        if self._parser is not None:
            self._parse(output, self._parser)
        self.finished = output.finish is not None
        return output

    def _parse(self, output: ChoiceOutput, parser: CallParser) -> None:
        parsed = parser.push(output.text)
        if output.finish is not None:
            parsed.append(parser.finish())
        if self._one_call:
            parsed.parts = [part for part in parsed.parts if part.index == 0]
            if parsed.calls:
                parsed.calls = parsed.calls[:1]
                output.finish = "tool_calls"
        output.text, output.tool_calls, output.call_parts = parsed.text, parsed.calls, parsed.parts
        self._called = self._called or bool(parsed.calls)
        if output.finish == "stop" and self._called:
            output.finish = "tool_calls"


def _append(delta: TextDelta, tail: TextDelta) -> None:
    delta.text += tail.text
    delta.token_ids += tail.token_ids
    delta.logprobs += tail.logprobs
    delta.stop_string = tail.stop_string


def _parser(prepared: Prepared) -> CallParser | None:
    spec = prepared.spec
    if not spec.tools or spec.tool_mode == "none":
        return None
    names = {tool.name for tool in spec.tools}
    if spec.tool_mode == "auto":
        return HermesParser(names)
    return NamedCallParser(spec.tool_name) if spec.tool_mode == "named" else RequiredCallsParser(names)
