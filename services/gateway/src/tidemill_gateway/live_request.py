"""A running request as both APIs see it."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from tidemill_gateway.flow.generation import Generation, PlacementRecord
from tidemill_gateway.intake import Prepared
from tidemill_gateway.models.served_model import ServedModel
from tidemill_gateway.output import ChoiceOutput, ChoicePipe


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Tokens of a request; cached ones by tier."""

    prompt_tokens: int
    completion_tokens: int
    cached_l1: int
    cached_l2: int
    cached_l3: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from arrival."""

    queue_s: float
    ttft_s: float
    total_s: float


class LiveRequest:
    """A running request as the APIs see it."""

    def __init__(
        self, prepared: Prepared, generation: Generation, arrived_at: float, clock: Callable[[], float]
    ) -> None:
        self.prepared = prepared
        self.generation = generation
        self.pipes = [ChoicePipe(choice.index, prepared) for choice in prepared.choices]
        self._unfinished = len(self.pipes)
        self._arrived_at = arrived_at
        self._clock = clock

    @property
    def request_id(self) -> str:
        """The caller's id, or the one made for it."""
        return self.generation.plan.request_id

    @property
    def model(self) -> ServedModel:
        """The revision that serves it."""
        return self.prepared.model

    @property
    def finished(self) -> bool:
        """Whether every choice has had its last output."""
        return self._unfinished == 0

    async def outputs(self) -> AsyncIterator[list[ChoiceOutput]]:
        """All that came since the last time, until every choice has finished; raises what ended the request."""
        while self._unfinished:
            batch = []
            for tokens in await self.generation.take():
                pipe = self.pipes[tokens.choice]
                if pipe.finished:
                    continue
                output = pipe.push(tokens)
                if pipe.finished:
                    self._unfinished -= 1
                    if tokens.finish is None:
                        self.generation.stop_choice(pipe.index)
                if output.text or output.token_ids or output.tool_calls or output.finish:
                    batch.append(output)
            if batch:
                yield batch

    def usage(self) -> UsageCounts:
        """Tokens so far."""
        runs = self.generation.runs
        n = self.prepared.spec.sampling.n or 1
        firsts = [run.cached for run in runs[::n]]
        return UsageCounts(
            self.prepared.prompt_tokens,
            sum(pipe.text.num_tokens for pipe in self.pipes),
            sum(max(0, cached.l1) for cached in firsts),
            sum(max(0, cached.l2) for cached in firsts),
            sum(max(0, cached.l3) for cached in firsts),
        )

    def times(self) -> Times:
        """Measured so far."""
        runs = self.generation.runs
        first = min((run.first_token_at for run in runs if run.first_token_at), default=0.0)
        ttft_s = first - self._arrived_at if first else 0.0
        return Times(max(run.queue_s for run in runs), ttft_s, self._clock() - self._arrived_at)

    @property
    def placement(self) -> PlacementRecord:
        """Where its first choice runs."""
        return self.generation.placement
