import numpy as np

from experiments.benchmarks.timing import Row, interleaved, row


def test_candidates_take_turns_and_the_first_round_does_not_count():
    calls = []

    def candidate(name, times):
        return lambda: calls.append(name) or next(times)

    found = interleaved(
        {"a": candidate("a", iter([9.0, 1.0, 2.0])), "b": candidate("b", iter([9.0, 3.0, 4.0]))}, 2
    )
    assert calls == ["a", "b"] * 3
    np.testing.assert_array_equal(found["a"], [1, 2])
    np.testing.assert_array_equal(found["b"], [3, 4])


def test_row_has_median_and_range():
    line = row("step", "ms", np.array([3.0, 1.0, 8.0]), "remark")
    assert (line.median, line.low, line.high) == (3, 1, 8)
    assert "3 ms" in str(line)
    assert "[1 .. 8]" in str(line)
    assert line.as_dict()["remark"] == "remark"


def test_row_without_a_measurement_says_why():
    assert str(Row("peer", "", remark="not installed")).endswith("not installed")
