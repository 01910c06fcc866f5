"""What answers of both endpoints have in common: one id, one created, one model, usage last."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import orjson

from tidemill_gateway.live_request import LiveRequest
from tidemill_gateway.output import ChoiceOutput

DONE = b"data: [DONE]\n\n"


class Reply(ABC):
    """Renders one request's answer, whole or as events."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(self, request: LiveRequest, model: str, created: int) -> None:
        self.request = request
        self._head = {
            "id": f"{self.id_prefix}{request.request_id}",
            "object": self.object_name,
            "created": created,
            "model": model,
            "system_fingerprint": f"tm-{request.model.card.revision}",
        }
        chunk_head = orjson.dumps(self._head | {"object": self.chunk_object_name})
        self._event_head = b"data: " + chunk_head[:-1] + b',"choices":['

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first output."""

    @abstractmethod
    def chunk_choice(self, output: ChoiceOutput) -> bytes:
        """JSON of one choice in an event."""

    @abstractmethod
    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        """One choice of the whole answer."""

    def event(self, choice: bytes, more: bytes = b"") -> bytes:
        """One event; `more` is further fields of its object."""
        return b"%s%s]%s}\n\n" % (self._event_head, choice, more)

    def events(self, batch: Iterable[ChoiceOutput], *, last: bool) -> bytes:
        """An event for each output; the request's last one carries the placement if it was asked for."""
        events = [self.event(self.chunk_choice(output)) for output in batch]
        if last and self.request.prepared.spec.include_placement:
            more = b',"placement":' + orjson.dumps(placement_fields(self.request))
            events[-1] = events[-1].removesuffix(b"}\n\n") + more + b"}\n\n"
        return b"".join(events)

    def usage_event(self) -> bytes:
        """The one event with usage, after all others."""
        return self.event(b"", b',"usage":' + orjson.dumps(usage_fields(self.request)))

    def whole(self, outputs: Iterable[ChoiceOutput]) -> bytes:
        """The answer that is not streamed."""
        choices = [self.whole_choice(output) for output in outputs]
        return orjson.dumps(self._head | {"choices": choices, "usage": usage_fields(self.request)})


def usage_fields(request: LiveRequest) -> dict[str, Any]:
    """Usage as OpenAI spells it, with cached tokens by tier beside."""
    usage = request.usage()
    cached = usage.cached_l1 + usage.cached_l2 + usage.cached_l3
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cached_tokens_l1": usage.cached_l1,
            "cached_tokens_l2": usage.cached_l2,
            "cached_tokens_l3": usage.cached_l3,
        },
    }


def placement_fields(request: LiveRequest) -> dict[str, Any]:
    """Where the request runs, and why."""
    placement = request.placement
    return {
        "prefill_instance": placement.prefill_instance,
        "decode_instance": placement.decode_instance,
        "attempts": request.generation.attempts,
        "prefill_terms": placement.prefill_terms,
        "decode_terms": placement.decode_terms,
        "degraded": placement.degraded,
    }


def join_outputs(num_choices: int) -> list[ChoiceOutput]:
    """Empty outputs to collect a whole answer in."""
    return [ChoiceOutput(i, "", [], []) for i in range(num_choices)]


def collect(whole: list[ChoiceOutput], batch: Iterable[ChoiceOutput]) -> None:
    """Appends a batch to the collected outputs."""
    for output in batch:
        into = whole[output.index]
        into.text += output.text
        into.token_ids += output.token_ids
        into.logprobs += output.logprobs
        into.tool_calls += output.tool_calls
        into.finish = output.finish
        into.stop_string = output.stop_string
        into.ends_with_stop_token = output.ends_with_stop_token
