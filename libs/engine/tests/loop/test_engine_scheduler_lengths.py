"""Which length is unusual: the 99th percentile of a class, from few outputs and from many."""

from math import comb
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_engine.scheduler import output_lengths
from tidemill_engine.scheduler.output_lengths import OutputLengths, upper_bound

few = st.lists(st.integers(1, 5000), min_size=20, max_size=35)


def upper(lengths: list[int]) -> float:
    known = OutputLengths()
    for length in lengths:
        known.add("a", length)
    found = known.upper("a", 0.99)
    assert found is not None
    return found


def test_one_outlier_neither_decides_nor_counts_for_nothing():
    found = upper([4] * 19 + [400])
    assert 16 < found < 100, "four times as much is where runaways begin"
    assert upper([4] * 20) == 4
    assert upper([4] * 18 + [400] * 2) == 400, "two of twenty are the class"


@given(few)
def test_of_few_it_lies_between_the_two_longest_and_their_order_does_not_matter(lengths):
    ordered = sorted(lengths)
    assert ordered[-2] <= upper(lengths) <= ordered[-1]
    assert upper(lengths) == upper(ordered)


@given(few, st.integers(1, 10_000))
def test_a_longer_longest_output_never_lowers_it(lengths, more):
    ordered = sorted(lengths)
    assert upper([*ordered[:-1], ordered[-1] + more]) >= upper(ordered) * (1 - 1e-9)


@given(few, st.integers(2, 50))
def test_it_has_the_unit_of_the_lengths(lengths, factor):
    assert upper([factor * length for length in lengths]) == pytest.approx(factor * upper(lengths))


@pytest.mark.parametrize("count", [2, 20, 35, 36, 100, 298, 299, 512])
@pytest.mark.parametrize("quantile", [0.5, 0.99])
def test_its_bounds_hold_for_any_distribution_with_their_confidence(count, quantile):
    """How many of a sample lie beyond a quantile is binomial, whatever the distribution."""
    low, high = output_lengths._ranks(count, quantile)

    def at_least(beyond: int) -> float:
        return sum(comb(count, k) * (1 - quantile) ** k * quantile ** (count - k) for k in range(beyond, count + 1))

    assert 0 <= low <= high < count
    assert at_least(count - low) <= 0.05 or low == 0
    assert at_least(count - high) >= 0.95 or high == count - 1
    if high < count - 1:
        assert at_least(count - high + 1) < 0.95, "a tighter bound is confident too"


@pytest.mark.parametrize("spread", [0.2, 1.0, 1.8])
@pytest.mark.parametrize("count", [20, 100, 512])
def test_few_usual_outputs_are_four_times_as_long(spread, count):
    """Over many classes: the share of usual outputs that would be taken for runaways."""
    rng, usual = np.random.default_rng(1), NormalDist(5.0, spread)
    wrong = []
    for _ in range(300):
        sample = np.sort(np.exp(rng.normal(5.0, spread, count)).astype(np.int64))
        wrong.append(1.0 - usual.cdf(float(np.log(4.0 * upper_bound(sample, 0.99)))))
    assert np.mean(wrong) <= 0.01
