import math

import numpy as np
import pytest

from common import statistics
from common.statistics import bootstrap_interval, crossing, first_below, loglog_slope


def test_interval_of_a_mean_has_the_width_of_its_standard_error():
    values = np.random.default_rng(1).normal(5, 2, 2000)
    low, high = bootstrap_interval(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(2000), rel=0.1)


def test_interval_covers_the_truth_as_often_as_it_says():
    samples = np.random.default_rng(2).binomial(1, 0.3, (200, 200)).astype(float)
    covered = 0
    for i, sample in enumerate(samples):
        low, high = bootstrap_interval(sample, level=0.9, num_resamples=300, seed=i)
        covered += low <= 0.3 <= high
    assert 0.83 < covered / 200 < 0.96


def test_interval_is_deterministic_and_does_not_depend_on_the_memory_block(monkeypatch):
    values = np.random.default_rng(3).normal(size=(50, 4))
    whole = bootstrap_interval(values)
    monkeypatch.setattr(statistics, "_BLOCK_ELEMENTS", 50 * 4 * 7)
    assert np.array_equal(whole, bootstrap_interval(values))
    assert not np.array_equal(whole, bootstrap_interval(values, seed=1))


def test_memory_is_bounded_by_blocks(monkeypatch):
    sizes = []
    monkeypatch.setattr(statistics, "_BLOCK_ELEMENTS", 1000)

    def mean(resamples, axis):
        sizes.append(resamples.size)
        return resamples.mean(axis)

    bootstrap_interval(np.arange(100.0), mean)
    assert max(sizes) <= 1000
    assert sum(sizes) == 100 * 1000


def test_rows_are_drawn_whole():
    """The two columns are equal, so their intervals are; another statistic is taken along the same axis."""
    values = np.repeat(np.random.default_rng(4).normal(size=(20, 1)), 2, axis=1)
    low, high = bootstrap_interval(values, np.median)
    assert low[0] == low[1] < high[0] == high[1]


def test_interval_of_one_of_none_and_of_nan():
    assert bootstrap_interval([2.5]) == (2.5, 2.5)
    assert np.isnan(bootstrap_interval([])).all()
    assert np.isnan(bootstrap_interval([1.0, np.nan])).all()
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval([1.0], level=95)


def test_slope_of_a_power_law_is_its_exponent():
    x = np.repeat([32, 64, 128, 256], 5)
    noise = np.exp(np.random.default_rng(5).normal(0, 0.05, 20))
    slope = loglog_slope(x, 40 * x**1.3 * noise)
    assert slope.value == pytest.approx(np.polyfit(np.log(x), np.log(40 * x**1.3 * noise), 1)[0], rel=1e-9)
    assert slope.low < 1.3 < slope.high
    assert slope.high - slope.low < 0.2
    assert (slope.used, slope.censored) == (20, 0)
    assert slope == loglog_slope(x, 40 * x**1.3 * noise)


def test_slope_bootstrap_agrees_with_refitting_every_resample():
    rng = np.random.default_rng(6)
    x, y = np.repeat([1.0, 2.0, 7.0], [3, 2, 4]), rng.lognormal(size=9)
    generator = np.random.default_rng(0)
    draws = {level: np.flatnonzero(x == level) for level in (1.0, 2.0, 7.0)}
    picks = [rows[generator.integers(len(rows), size=(1000, len(rows)))] for rows in draws.values()]
    fits = [np.polyfit(np.log(x[list(i)]), np.log(y[list(i)]), 1)[0] for i in np.concatenate(picks, axis=1)]
    slope = loglog_slope(x, y)
    assert (slope.low, slope.high) == pytest.approx(np.quantile(fits, [0.025, 0.975]), rel=1e-9)


def test_censored_points_are_dropped_and_counted():
    x = [1, 1, 2, 2, 4, 4]
    slope = loglog_slope(x, [1, 1, 2, 2, np.nan, np.inf])
    assert (slope.value, slope.used, slope.censored) == (pytest.approx(1.0), 4, 2)


def test_one_seed_has_a_slope_without_an_interval():
    slope = loglog_slope([1, 2, 4], [3, 6, 12])
    assert slope.value == pytest.approx(1.0)
    assert np.isnan([slope.low, slope.high]).all()


def test_slope_of_too_little_is_nan():
    for x, y in (([], []), ([2, 2], [1, 3]), ([1, 2], [np.nan, np.nan])):
        assert np.isnan(loglog_slope(x, y).value)
    with pytest.raises(ValueError, match="positive"):
        loglog_slope([1, 2], [0, 1])
    with pytest.raises(ValueError, match="one length"):
        loglog_slope([1, 2], [1])


def test_crossing_interpolates_in_value_and_log_step():
    assert crossing([10, 1000], [0.0, 1.0], 0.5) == pytest.approx(100)
    assert crossing([10, 1000], [0.0, 1.0], 0.5, log_x=False) == pytest.approx(505)
    assert crossing([0, 10], [0.0, 1.0], 0.5) == pytest.approx(5)  # log of step 0


def test_crossing_takes_the_first_upward_one():
    assert crossing([1, 2, 3, 4], [0.0, 1.0, 0.0, 1.0], 1.0) == 2
    assert crossing([1, 2, 3], [0.9, 0.1, 0.9], 0.5) == 1


def test_crossing_never_or_through_gaps():
    assert np.isnan(crossing([1, 2], [0.0, 0.4], 0.5))
    assert np.isnan(crossing([], [], 0.5))
    assert np.isnan(crossing([1, 2], [np.nan, np.nan], 0.5))
    assert crossing([10, 100, 1000], [0.0, np.nan, 1.0], 0.5) == pytest.approx(100)
    assert crossing([1, 2, 3], [0.0, np.inf, 1.0], 0.5) == 2


def test_crossing_refuses_unordered_steps():
    with pytest.raises(ValueError, match="increase"):
        crossing([2, 1], [0.0, 1.0], 0.5)
    with pytest.raises(ValueError, match="one length"):
        crossing([1, 2], [[0.0, 1.0]], 0.5)


def test_first_below_mirrors_crossing():
    steps, falling = [1, 10, 100], [4.0, 2.0, 1.0]
    assert first_below(steps, falling, 3.0) == pytest.approx(math.sqrt(10))
    assert np.isnan(first_below(steps, falling, 0.5))
