"""How long an engine's steps take: the polynomials of Dynamo's mocker, so that times can be compared with its replay.

They describe one GPU with a model of about 8 B parameters; a step that carries prompt tokens and decoding rows takes
the sum of both.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Seconds of a step."""

    prefill_s_fixed: float = 1.650142e-2
    prefill_s_per_token: float = 1.518344e-5
    prefill_s_per_token_squared: float = 4.209989e-10
    decode_s_fixed: float = 5.74e-3
    decode_s_per_use: float = 54.01e-3
    decode_s_per_use_squared: float = -25.74e-3

    def prefill_s(self, tokens: int) -> float:
        """Of the prompt tokens of one step."""
        if tokens == 0:
            return 0.0
        return self.prefill_s_fixed + tokens * (self.prefill_s_per_token + tokens * self.prefill_s_per_token_squared)

    def decode_s(self, use: float) -> float:
        """Of the decoding rows of one step; `use` is the share of the KV blocks that requests hold."""
        return self.decode_s_fixed + use * (self.decode_s_per_use + use * self.decode_s_per_use_squared)
