"""What one step is going to compute, while it is being decided."""

from dataclasses import dataclass, field

from tidemill_engine.request import Request
from tidemill_kvcache.step_cost import StepShape


@dataclass
class StepPlan:
    """Tokens of each request in this step, under one token budget."""

    budget: int
    decodes: dict[Request, list[int]] = field(default_factory=dict)
    """Request -> blocks it grew by."""
    chunks: dict[Request, int] = field(default_factory=dict)
    """Request -> prompt tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens planned so far."""
        return len(self.decodes) + sum(self.chunks.values())

    @property
    def tokens_left(self) -> int:
        """Budget not used yet."""
        return self.budget - self.num_tokens

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return not self.decodes and not self.chunks

    def shape(self) -> StepShape:
        """What the step costs by; to be asked before its tokens are committed."""
        return StepShape(
            prefill_tokens=sum(self.chunks.values()),
            prefill_context=sum(n * (request.num_computed_tokens + n / 2) for request, n in self.chunks.items()),
            decode_rows=len(self.decodes),
            decode_context=sum(len(request.tokens) for request in self.decodes),
        )

    def drop(self, request: Request) -> None:
        """Takes out a request that lost its blocks."""
        self.decodes.pop(request, None)
        self.chunks.pop(request, None)
