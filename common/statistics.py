"""Numbers a reproduction reports: bootstrap intervals, log-log slopes, crossing times. numpy only, seeded."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK_ELEMENTS = 1 << 22  # resampled values held at a time


def bootstrap_interval(
    values: ArrayLike,
    statistic: Callable[..., NDArray] = np.mean,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> tuple[NDArray, NDArray]:
    """Percentile bootstrap interval (low, high) of a statistic of the rows of `values`.

    Args:
      values: [n, ...]; rows (seeds, samples) are drawn with replacement, each as a whole.
      statistic: called as `statistic(resamples, axis=1)` on [r, n, ...], to give [r, ...].
      level: coverage, between 0 and 1.
    Returns: two float64 arrays [...] (numpy scalars for [n]): of one row its statistic; NaN for no row and
      where a NaN reaches the statistic. The same input gives the same interval whatever the memory block.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}: must be between 0 and 1")
    values = np.asarray(values, np.float64)
    n = len(values)
    if n == 0:
        empty = np.full(values.shape[1:], np.nan)[()]
        return empty, empty
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK_ELEMENTS // max(1, values.size))
    drawn = [
        statistic(values[generator.integers(n, size=(min(rows, num_resamples - start), n))], axis=1)
        for start in range(0, num_resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(drawn), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


@dataclass(frozen=True)
class Slope:
    """Exponent of a power law. `low`, `high` are NaN where no x has two seeds; `censored` points had no y."""

    value: float
    low: float
    high: float
    used: int
    censored: int


def loglog_slope(
    x: ArrayLike, y: ArrayLike, level: float = 0.95, num_resamples: int = 1000, seed: int = 0
) -> Slope:
    """Least-squares slope of log y against log x, with a percentile bootstrap interval.

    Args:
      x, y: [m], one entry for each run; runs that share an x are its seeds, resampled within that x.
        A non-finite y (never reached within the run) is censored: dropped and counted. What is finite must be
        positive, else ValueError. Dropping the slow runs lowers a slope, so say how many there were.
    Returns: a NaN slope where fewer than two distinct x are left.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x {x.shape} and y {y.shape} must be vectors of one length")
    kept = np.isfinite(y)
    censored = int(np.sum(~kept))
    x, y = x[kept], y[kept]
    if np.any(x <= 0) or np.any(y <= 0):
        raise ValueError("a log-log slope needs positive x and y")
    levels, group = np.unique(x, return_inverse=True)
    if len(levels) < 2:
        return Slope(np.nan, np.nan, np.nan, len(x), censored)
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    weights = centred / np.sum(
        centred**2
    )  # the slope is Σ weights · log y, and x stays fixed when seeds are drawn
    value = float(weights @ log_y)
    if np.all(np.bincount(group) < 2):
        return Slope(value, np.nan, np.nan, len(x), censored)
    generator = np.random.default_rng(seed)
    slopes = np.zeros(num_resamples)
    for index in range(len(levels)):
        members = np.flatnonzero(group == index)
        drawn = members[generator.integers(len(members), size=(num_resamples, len(members)))]
        slopes += weights[members[0]] * log_y[drawn].sum(axis=1)
    low, high = np.quantile(slopes, [(1 - level) / 2, (1 + level) / 2])
    return Slope(value, float(low), float(high), len(x), censored)


def crossing(steps: ArrayLike, values: ArrayLike, level: float, log_x: bool = True) -> float:
    """The step at which a curve first reaches `level` from below; NaN if it never does.

    Args:
      steps, values: [m], steps increasing; NaN values are left out.
      log_x: interpolate between two measurements in log(step) rather than step (from step 0 always in step).
    Returns: the interpolated step; the first step where the curve starts at or above `level`.
    """
    steps, values = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    if steps.shape != values.shape or steps.ndim != 1:
        raise ValueError(f"steps {steps.shape} and values {values.shape} must be vectors of one length")
    if np.any(np.diff(steps) <= 0):
        raise ValueError("steps must increase")
    steps, values = steps[~np.isnan(values)], values[~np.isnan(values)]
    reached = np.flatnonzero(values >= level)
    if len(reached) == 0:
        return float("nan")
    i = reached[0]
    if i == 0:
        return float(steps[0])
    share = (
        (level - values[i - 1]) / (values[i] - values[i - 1])
        if np.isfinite(values[i - 1 : i + 1]).all()
        else 1.0
    )
    if log_x and steps[i - 1] > 0:
        return float(steps[i - 1] * (steps[i] / steps[i - 1]) ** share)
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def first_below(steps: ArrayLike, values: ArrayLike, level: float, log_x: bool = True) -> float:
    """The step at which a curve first falls to `level`, as `crossing` does; marks where a plateau begins."""
    return crossing(steps, -np.asarray(values, np.float64), -level, log_x)
