import io
import math
import time

import pytest

from common.console import Rate
from common.writer import Writer, read_metrics


def _writer(folder, **options):
    return Writer(folder, **({"attempt": 1, "total": 100, "stream": io.StringIO()} | options))


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_clock_that_stands_still_divides_nothing_by_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    for stream in (io.StringIO(), _Terminal()):
        with _writer(tmp_path / str(stream.isatty()), stream=stream) as writer:
            for step in range(1, 5):
                writer.log(step, {"loss": 1.0})
            assert math.isnan(writer.steps_per_second)
        assert len(read_metrics(tmp_path / str(stream.isatty()))) == 4


def test_rate_counts_the_last_window_and_forgets_a_rollback(monkeypatch):
    clock = iter([0.0, 60.0, 61.0, 62.0, 70.0, 71.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    rate = Rate(window=5.0)
    assert math.isnan(rate.per_second)
    for step in (0, 1, 3, 5):  # a minute of compilation before step 1
        rate.update(step)
    assert rate.per_second == pytest.approx(2.0)
    rate.update(2)
    assert math.isnan(rate.per_second)
    rate.update(6)
    assert rate.per_second == pytest.approx(4.0)


def test_rate_memory_is_bounded(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rate = Rate(window=1.0)
    for step in range(5000):
        now[0] += 0.001
        rate.update(step)
    assert rate.per_second == pytest.approx(1000, rel=0.05)
    assert len(rate._marks) < 250


def test_quiet_output_is_a_line_now_and_then(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with _writer(tmp_path / "fit", total=100, stream=stream) as writer:
        for step in range(1, 101):
            now[0] += 1.0
            writer.log(step, {"loss": 0.25, "per_seed": [1.0, 3.0]})
        writer.event(100, "alert", "look")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 6  # steps 1, 31, 61, 91, the last one, and the event
    assert lines[1] == "fit: step 31/100  1 steps/s  1:09 left  loss 0.25  per_seed 2"
    assert lines[-1] == "[step 100] alert: look"
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar_with_rate_and_time_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = _Terminal()
    with _writer(tmp_path / "fit", total=100, stream=stream) as writer:
        for step in (10, 20, 30):
            now[0] += 5.0
            writer.log(step, {"loss [bold]": 0.25})
        writer.event(30, "alert", "[red]look[/red]")
    shown = stream.getvalue()
    assert "30/100" in shown
    assert "2 steps/s" in shown
    assert "0:35 left" in shown
    assert "loss [bold] 0.25" in shown
    assert "[red]look[/red]" in shown
