"""Answers of /v1/completions."""

from typing import Any

import orjson

from tidemill_gateway.http.logprobs import CompletionLogprobs
from tidemill_gateway.http.reply import Reply
from tidemill_gateway.live_request import LiveRequest
from tidemill_gateway.output import ChoiceOutput


class CompletionReply(Reply):
    """Text completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, request: LiveRequest, model: str, created: int) -> None:
        super().__init__(request, model, created)
        self._logprobs = [CompletionLogprobs(request.model.token_bytes) for _ in request.pipes]

    def opening(self) -> bytes:
        """Completions begin with their first text."""
        return b""

    def chunk_choice(self, output: ChoiceOutput) -> bytes:
        """One choice's part of a chunk."""
        logprobs = orjson.dumps(self._logprobs[output.index].render(output)) if output.logprobs else b"null"
        finish = b"null" if output.finish is None else b'"%s"' % output.finish.encode()
        return b'{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s}' % (
            output.index,
            orjson.dumps(output.text),
            logprobs,
            finish,
        )

    def whole_choice(self, output: ChoiceOutput) -> dict[str, Any]:
        """One choice of the one answer."""
        logprobs = None
        if self.request.prepared.spec.sampling.logprobs:
            logprobs = self._logprobs[output.index].render(output)
        return {"index": output.index, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish}
