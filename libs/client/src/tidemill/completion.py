"""A streamed generation joined into one value."""

from dataclasses import dataclass, field

from tidemill.v1 import inference_pb2


@dataclass
class CompletedChoice:
    """One choice, whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    tool_calls: list[inference_pb2.ToolCall] = field(default_factory=list)
    finish_reason: "inference_pb2.FinishReason.ValueType" = inference_pb2.FINISH_REASON_UNSPECIFIED
    stop_string: str = ""


@dataclass
class Completion:
    """A whole answer; `text` is that of the first choice."""

    request_id: str = ""
    model: str = ""
    choices: list[CompletedChoice] = field(default_factory=list)
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    placement: inference_pb2.Placement | None = None
    timing: inference_pb2.Timing = field(default_factory=inference_pb2.Timing)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Takes the next message of the stream."""
        self.request_id = response.request_id or self.request_id
        self.model = response.model or self.model
        for delta in response.choices:
            self._add_delta(delta)
        if response.HasField("usage"):
            self.usage = response.usage
        if response.HasField("placement"):
            self.placement = response.placement
        if response.HasField("timing"):
            self.timing = response.timing

    def _add_delta(self, delta: inference_pb2.ChoiceDelta) -> None:
        while len(self.choices) <= delta.index:
            self.choices.append(CompletedChoice())
        choice = self.choices[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.tool_calls += delta.tool_calls
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.stop_string = delta.stop_string or choice.stop_string
