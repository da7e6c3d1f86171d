"""Progress on stderr: a live bar on a terminal, otherwise a plain line now and then."""

import collections
import math
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

_SHOWN = 4  # latest metrics on the line
_REDRAW = 0.1  # seconds
_BAR_WIDTH = 20


class Rate:
    """Steps per second over the last `window` seconds, so that compilation and evaluations fade out."""

    def __init__(self, window: float = 30.0):
        self._window = window
        self._marks: collections.deque[tuple[float, int]] = collections.deque()

    def update(self, step: int) -> None:
        """Marks that `step` was reached now; a step below the last one (a rollback) starts afresh."""
        now = time.monotonic()
        if self._marks and step < self._marks[-1][1]:
            self._marks.clear()
        if len(self._marks) > 1 and now - self._marks[-2][0] < self._window / 100:
            self._marks.pop()  # quick steps share a mark: memory stays bounded
        self._marks.append((now, step))
        while len(self._marks) > 2 and now - self._marks[0][0] > self._window:
            self._marks.popleft()

    @property
    def per_second(self) -> float:
        """NaN until two moments that differ are known."""
        if len(self._marks) < 2:
            return math.nan
        elapsed = self._marks[-1][0] - self._marks[0][0]
        return (self._marks[-1][1] - self._marks[0][1]) / elapsed if elapsed > 0 else math.nan


class Display:
    """Shows step, rate, time left and the latest metrics.

    Args:
      total: the last step.
      stream: where to write; a live bar where it is a terminal, else one line every `quiet_every` seconds.
    """

    def __init__(self, total: int, description: str, stream: TextIO | None = None, quiet_every: float = 30.0):
        self.rate = Rate()
        self._total, self._description, self._quiet_every = total, description, quiet_every
        self._latest = ""
        self._last_shown = -math.inf
        self._stream = sys.stderr if stream is None else stream
        self._bar: Progress | None = None
        if self._stream.isatty():
            columns = [
                TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[line]")
            ]
            # What is printed goes above the bar, unless stdout is a file or a pipe of its own.
            self._bar = Progress(
                columns[0],
                BarColumn(_BAR_WIDTH),
                columns[1],
                console=Console(file=self._stream),
                redirect_stdout=sys.stdout.isatty(),
            )
            self._task = self._bar.add_task(description, total=total, line="")
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Moves to `step`; `metrics` replace the latest ones shown."""
        self.rate.update(step)
        if metrics:
            self._latest = "  ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:_SHOWN])
        elapsed = time.monotonic() - self._last_shown
        if self._bar is not None:
            if not metrics and elapsed < _REDRAW and step != self._total:
                return  # formatting at every one of many quick steps would cost more than they do
            self._last_shown = time.monotonic()
            room = self._bar.console.width - len(self._description) - _BAR_WIDTH - 3
            self._bar.update(self._task, completed=step, line=_cropped(self._line(step), room))
        elif elapsed >= self._quiet_every or (step == self._total and metrics):
            self._last_shown = time.monotonic()
            print(f"{self._description}: {self._line(step)}", file=self._stream, flush=True)

    def message(self, text: str) -> None:
        """One line above the bar."""
        if self._bar is not None:
            self._bar.console.print(Text(text))
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _line(self, step: int) -> str:
        rate = self.rate.per_second
        speed = "" if math.isnan(rate) else f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s"
        left = f"{_duration((self._total - step) / rate)} left" if rate > 0 else ""
        return "  ".join(filter(None, [f"step {step}/{self._total}", speed, left, self._latest]))


def _cropped(line: str, room: int) -> str:
    return line if len(line) <= room else f"{line[: max(room - 1, 0)]}…"


def _duration(seconds: float) -> str:
    minutes, whole = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"
