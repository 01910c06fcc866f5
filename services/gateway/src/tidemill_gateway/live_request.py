"""A running request as both APIs see it."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from tidemill_gateway.flow.generation import Generation, PlacementRecord, Tokens
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
        self,
        request_id: str,
        prepared: Prepared,
        generation: Generation,
        arrived_at: float,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        """The caller's id, or the one made for it."""
        self.prepared = prepared
        self.generation = generation
        self.pipes = [ChoicePipe(choice.index, prepared) for choice in prepared.choices]
        self._unfinished = len(self.pipes)
        self._arrived_at = arrived_at
        self._clock = clock
        self._final: tuple[UsageCounts, Times] | None = None

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
            batch = self._outputs_of(await self.generation.take())
            if batch:
                yield batch

    def take_ready(self) -> list[ChoiceOutput]:
        """What is there now, possibly nothing; raises what ended the request once all before it is taken."""
        return self._outputs_of(self.generation.take_ready()) if self._unfinished else []

    @property
    def has_news(self) -> bool:
        """Whether `take_ready` would give or raise anything."""
        return self._unfinished > 0 and self.generation.has_news

    @property
    def on_ready(self) -> Callable[[], None] | None:
        """Called after each engine step that gave the request something, and when it has failed."""
        return self.generation.on_ready

    @on_ready.setter
    def on_ready(self, call: Callable[[], None] | None) -> None:
        self.generation.on_ready = call

    def _outputs_of(self, taken: Iterable[Tokens]) -> list[ChoiceOutput]:
        batch = []
        for tokens in taken:
            pipe = self.pipes[tokens.choice]
            if pipe.finished:
                continue
            output = pipe.push(tokens)
            if pipe.finished:
                self._unfinished -= 1
                if tokens.finish is None:
                    self.generation.stop_choice(pipe.index)
            if output.text or output.token_ids or output.call_parts or output.finish:
                batch.append(output)
        return batch

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
    def final(self) -> tuple[UsageCounts, Times]:
        """Both at the request's end, counted once for all who ask."""
        if self._final is None:
            self._final = self.usage(), self.times()
        return self._final

    @property
    def placement(self) -> PlacementRecord:
        """Where its first choice runs."""
        return self.generation.placement
