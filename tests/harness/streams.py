"""One greedy stream as its caller sees it, and what must be true of it afterwards."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.client import Client
from tidemill.errors import TidemillError
from tidemill.v1.errors_pb2 import ErrorCode
from tidemill.v1.inference_pb2 import FINISH_REASON_LENGTH


@dataclass
class Stream:
    """A request with its right answer."""

    gateway: str
    prompt: Sequence[int]
    expected: Sequence[int]
    timeout_s: float
    tokens: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    attempts: int = 0
    charged: int = 0
    error: TidemillError | None = None
    took_s: float = 0.0
    ended: bool = False

    async def run(self, client: Client, model: str) -> None:
        """Reads it to its end, of whatever kind."""
        began_at = time.monotonic()
        try:
            async for response in client.generate(
                model=model,
                token_ids=self.prompt,
                max_tokens=len(self.expected),
                temperature=0.0,
                ignore_eos=True,
                timeout_s=self.timeout_s,
                include_placement=True,
            ):
                for delta in response.choices:
                    self.tokens += delta.token_ids
                    if delta.finish_reason:
                        self.finishes.append(delta.finish_reason)
                if response.HasField("usage"):
                    self.attempts = response.placement.attempts
                    self.charged = response.usage.completion_tokens
        except TidemillError as error:
            self.error = error
        finally:
            self.took_s = time.monotonic() - began_at
            self.ended = True

    def check_whole(self) -> None:
        """It ended once, with exactly the tokens of an undisturbed run, charged once."""
        assert self.error is None, f"after {len(self.tokens)} tokens and {self.took_s:.1f} s: {self.error}"
        assert self.tokens == list(self.expected)
        assert self.finishes == [FINISH_REASON_LENGTH]
        assert self.charged == len(self.expected)

    def check_cut(self, *codes: "ErrorCode.ValueType") -> None:
        """It ended with one of these errors, and what came before it was right."""
        assert self.error is not None
        assert self.error.code in codes, self.error
        assert self.tokens == list(self.expected[: len(self.tokens)])
        assert self.finishes == []
