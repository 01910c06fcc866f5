"""In which order prompts are computed. The chunk is the unit: the order is made anew for each step, and a prompt that
steps back keeps what it has computed.

    policy    order
    fcfs      arrival, the whole of a prompt before the next one
    shortest  least work left first; long prompts may wait for ever
    quota     what ends within one chunk first; a long prompt runs until its quota is spent, then steps back for those
              that wait, and comes back with a quota that doubles each time
    fair      arrival + stretch x predicted seconds of the work left (at most `most_slack_s`): a short prompt passes a
              long one, but only if it arrived within that time of it

Under "fair" a prompt of w seconds of work that arrives at t is passed by nobody who arrives after t' = t + min(stretch
x w, most_slack_s), so its first token comes by t' + whatever work there is at t', which is what first come, first
served would have left as well.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from tidemill_engine.request import Request
from tidemill_engine.settings import EngineSettings

_QUOTA_GROWTH = 2
_MOST_YIELDS = 16
"""After which a quota grows no more; it is longer than any prompt by then."""

WorkSeconds = Callable[[Request], float]
"""Predicted seconds to compute what is left of a request's prompt."""


class PrefillOrder(Protocol):
    """Decides who is computed first; told what was."""

    def arrange(self, requests: Iterable[Request], now_s: float) -> list[Request]:
        """The requests in the order in which they get tokens of the step."""

    def computed(self, request: Request, num_tokens: int, now_s: float) -> None:
        """A chunk of the request was computed."""


class _Untaught:
    def computed(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Needs to know nothing."""


class FirstCome(_Untaught):
    """By arrival and priority."""

    def arrange(self, requests: Iterable[Request], now_s: float) -> list[Request]:
        """See `PrefillOrder`."""
        return sorted(requests, key=lambda request: request.queue_rank)


class ShortestFirst(_Untaught):
    """By work left."""

    def __init__(self, work_s: WorkSeconds) -> None:
        self._work_s = work_s

    def arrange(self, requests: Iterable[Request], now_s: float) -> list[Request]:
        """See `PrefillOrder`."""
        return sorted(requests, key=lambda request: (self._work_s(request), request.queue_rank))


class Quota:
    """Long prompts take turns under quotas of tokens."""

    def __init__(self, chunk_tokens: int, quota_chunks: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._first_quota = quota_chunks * chunk_tokens

    def arrange(self, requests: Iterable[Request], now_s: float) -> list[Request]:
        """See `PrefillOrder`."""
        waiting = list(requests)
        oldest_short_s = min((r.arrival_s for r in waiting if self._is_short(r)), default=float("inf"))
        return sorted(waiting, key=lambda request: self._rank(request, oldest_short_s))

    def computed(self, request: Request, num_tokens: int, now_s: float) -> None:
        """See `PrefillOrder`."""
        if self._is_short(request):
            return
        if request.quota_tokens <= 0:
            request.quota_tokens = self._first_quota * _QUOTA_GROWTH ** min(request.num_yields, _MOST_YIELDS)
        request.quota_tokens -= num_tokens
        if request.quota_tokens <= 0:
            request.num_yields += 1
            request.yielded_s = now_s

    def _rank(self, request: Request, oldest_short_s: float) -> tuple[int, float]:
        if request.quota_tokens > 0:
            return 0, request.yielded_s
        if self._is_short(request):
            return 2, request.queue_rank
        # It stepped back for those that waited then; later ones wait for it.
        if request.num_yields and oldest_short_s > request.yielded_s:
            return 1, request.yielded_s
        return 3, request.yielded_s if request.num_yields else request.queue_rank

    def _is_short(self, request: Request) -> bool:
        return request.quota_tokens <= 0 and request.num_uncached_tokens <= self._chunk_tokens


class Fair(_Untaught):
    """By due time; a target that can still be met moves a request forward."""

    def __init__(self, work_s: WorkSeconds, stretch: float, most_slack_s: float) -> None:
        self._work_s = work_s
        self._stretch = stretch
        self._most_slack_s = most_slack_s

    def arrange(self, requests: Iterable[Request], now_s: float) -> list[Request]:
        """See `PrefillOrder`."""
        return sorted(requests, key=lambda request: self.due_s(request, now_s))

    def due_s(self, request: Request, now_s: float) -> float:
        """When it should be computed at the latest, in the order's terms; never later than by stretch alone."""
        work_s = self._work_s(request)
        due_s = request.queue_rank + min(self._stretch * work_s, self._most_slack_s)
        latest_start_s = request.arrival_s + request.slo_ttft_s - work_s
        if now_s <= latest_start_s < due_s:
            return latest_start_s
        return due_s


def make_order(settings: EngineSettings, work_s: WorkSeconds) -> PrefillOrder:
    """The order that the settings ask for."""
    match settings.prefill_policy:
        case "fcfs":
            return FirstCome()
        case "shortest":
            return ShortestFirst(work_s)
        case "quota":
            return Quota(settings.max_num_batched_tokens, settings.quota_chunks)
        case "fair":
            return Fair(work_s, settings.fair_stretch, settings.fair_slack_s)
