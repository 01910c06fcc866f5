"""Degraded step "small_chunks": while tokens come much slower than targets allow, prompts get a part of each step.

A step takes as long as its tokens; what decodes waits for it. Smaller chunks make first tokens later and all others
sooner. Decode rows always have room.
"""

from tidemill_engine.scheduler.chunks import min_chunk
from tidemill_engine.scheduler.state import SchedulerState, log
from tidemill_kvcache.degraded import DegradedStep, Marks

NAME = "small_chunks"
_DIVISOR = 4
_OFF_SHARE = 0.6
_LOOK_S = 0.25


class SmallChunks:
    """Looks at the time per output token against the tightest target, a few times a second."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._looked_s = float("-inf")
        limit = state.settings.small_chunk_load
        self._step = DegradedStep(NAME, Marks(limit, limit * _OFF_SHARE), state.clock, _changed) if limit > 0 else None

    def degraded(self, now_s: float) -> list[str]:
        """The step's name while it is on; asked for each load report, so that it goes off in an idle engine too."""
        return [NAME] if self._is_on(now_s) else []

    def budget(self, now_s: float) -> int:
        """Tokens of the next step."""
        state, full = self._state, self._state.settings.max_num_batched_tokens
        if not self._is_on(now_s):
            return full
        rows = sum(request.is_decoding for request in state.running)
        return min(full, rows + max(min_chunk(state.settings), full // _DIVISOR)) if rows else full

    def _is_on(self, now_s: float) -> bool:
        if self._step is None:
            return False
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._step.observe(self._load(now_s))
        return self._step.is_on

    def _load(self, now_s: float) -> float:
        targets = [r.slo_tpot_s for r in self._state.running if r.is_decoding and r.slo_tpot_s > 0]
        return self._state.load.tpot_s.value(now_s) / min(targets) if targets else 0.0


def _changed(is_on: bool, load: float) -> None:
    log.warning("degraded", step=NAME, on=is_on, load=round(load, 2))
