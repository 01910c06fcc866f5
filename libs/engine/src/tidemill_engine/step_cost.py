"""What the steps of this engine cost: the fitted model, and the plain means that load reports carry."""

from dataclasses import dataclass

from tidemill_kvcache.step_cost import StepCost, StepCostLearner, StepShape

_WARM_UP_STEPS = 2
_WEIGHT = 0.1


@dataclass
class MovingMean:
    """Exponentially weighted mean that leaves out its first samples."""

    value: float = 0.0
    """0 until there is a sample."""
    num_samples: int = 0

    def add(self, sample: float) -> None:
        """Takes a sample in."""
        self.num_samples += 1
        if self.num_samples <= _WARM_UP_STEPS:
            return
        age = self.num_samples - _WARM_UP_STEPS
        self.value += (sample - self.value) * max(_WEIGHT, 1.0 / age)


class MeasuredCost:
    """Seconds of a decode step, tokens per second of prefill, and the model behind predictions."""

    def __init__(self) -> None:
        self._learner = StepCostLearner()
        self._decode_step_s = MovingMean()
        self._any_decode_step_s = MovingMean()
        # Two means and their ratio, so that a step counts by its tokens: the short end of a prompt is no slow rate.
        self._prefill_step_s = MovingMean()
        self._prefill_step_tokens = MovingMean()

    def observe(self, shape: StepShape, step_s: float) -> None:
        """A step took `step_s` seconds; what it carried beside prefill is taken off at the price of a decode step."""
        self._learner.observe(shape, step_s)
        if shape.decode_rows:
            self._any_decode_step_s.add(step_s)
        if shape.prefill_tokens == 0:
            self._decode_step_s.add(step_s)
            return
        decode_s = self._decode_step_s.value if shape.decode_rows else 0.0
        self._prefill_step_s.add(max(step_s - decode_s, 0.1 * step_s))
        self._prefill_step_tokens.add(shape.prefill_tokens)

    @property
    def model(self) -> StepCost:
        """The fitted model now."""
        return self._learner.cost

    @property
    def prefill_tokens_per_s(self) -> float:
        """0: not known yet."""
        step_s = self._prefill_step_s.value
        return self._prefill_step_tokens.value / step_s if step_s > 0 else 0.0

    @property
    def decode_step_s(self) -> float:
        """A step without prefill tokens; 0: not known yet."""
        return self._decode_step_s.value

    @property
    def step_with_decode_s(self) -> float:
        """A step with decode rows, whatever else it carries: what a decoding request waits for a token."""
        return self._any_decode_step_s.value

    def prefill_s(self, num_tokens: int) -> float:
        """Predicted seconds to compute so many prompt tokens at the mean rate; 0 while it is not known."""
        rate = self.prefill_tokens_per_s
        return num_tokens / rate if rate > 0 else 0.0
