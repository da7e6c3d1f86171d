import itertools
import math

import pytest

from common import schedule
from common.config import ConfigError


def _fired(when, total, start=0):
    return [step for step in range(start, total + 1) if when(step, total)]


def test_every_counts_global_steps_and_closes_the_run():
    assert _fired(schedule.every(10), 35) == [0, 10, 20, 30, 35]
    assert _fired(schedule.every(10, first=False, last=False), 35) == [10, 20, 30]
    assert _fired(schedule.every(100), 35) == [0, 35]


def test_a_run_of_no_steps_still_has_its_last_one():
    assert _fired(schedule.every(10, first=False), 0) == [0]
    assert _fired(schedule.every(10, first=False, last=False), 0) == []


@pytest.mark.parametrize("resume", [1, 13, 20, 57])
@pytest.mark.parametrize(
    "when",
    [schedule.every(10), schedule.at([3, 57]), schedule.log_spaced(9, 2, 60)],
    ids=["every", "at", "log"],
)
def test_a_resumed_run_fires_at_the_steps_of_an_uninterrupted_one(when, resume):
    assert _fired(when, 60)[-len(_fired(when, 60, resume)) :] == _fired(when, 60, resume)
    assert set(_fired(when, 60, resume)) == {step for step in _fired(when, 60) if step >= resume}


@pytest.mark.parametrize(
    ("count", "first", "total"), [(2, 1, 2), (9, 1, 9), (30, 1, 50), (20, 100, 10**6), (1, 5, 8)]
)
def test_log_spaced_has_exactly_count_steps_and_both_ends(count, first, total):
    steps = sorted(schedule.log_spaced(count, first, total).steps)
    assert len(steps) == count
    assert steps[-1] == total
    assert steps[0] == (first if count > 1 else total)
    assert all(isinstance(step, int) for step in steps)


def test_log_spaced_ratios_are_equal_where_integers_allow():
    steps = sorted(schedule.log_spaced(21, 100, 10_000).steps)
    ratios = [math.log(b / a) for a, b in itertools.pairwise(steps)]
    assert ratios == pytest.approx([math.log(100) / 20] * 20, rel=0.03)


def test_any_of_and_never():
    both = schedule.any_of(schedule.at([3]), schedule.every(5, first=False, last=False))
    assert _fired(both, 12) == [3, 5, 10]
    assert _fired(schedule.never(), 12) == []
    assert _fired(schedule.any_of(), 12) == []


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: schedule.every(0), r"every\(n\)=0"),
        (lambda: schedule.every(-3), r"every\(n\)=-3"),
        (lambda: schedule.every(2.5), r"every\(n\)=2.5"),
        (lambda: schedule.every(True), r"every\(n\)=True"),
        (lambda: schedule.at([1, -1]), r"at\(steps\)=-1"),
        (lambda: schedule.log_spaced(3, 0, 10), r"log_spaced\(first\)=0"),
        (lambda: schedule.log_spaced(3, 20, 10), r"log_spaced\(total\)=10"),
        (lambda: schedule.log_spaced(0, 1, 10), r"log_spaced\(count\)=0"),
        (lambda: schedule.log_spaced(11, 1, 10), r"only 10 steps"),
    ],
)
def test_impossible_schedules_are_named(make, named):
    with pytest.raises(ConfigError, match=named):
        make()


def test_schedules_compare_by_value():
    assert schedule.every(5) == schedule.every(5)
    assert schedule.at([1, 2]) == schedule.at((2, 1))
