"""Interleaved timings: whatever slows the machine for a while slows every candidate alike."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: median and range over repetitions, or a remark where nothing was measured."""

    name: str
    unit: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    remark: str = ""

    def as_dict(self) -> dict[str, str | float | None]:
        """The row as JSON holds it."""
        return asdict(self)

    def __str__(self) -> str:
        if self.median is None:
            return f"{self.name:<64} {self.remark}"
        span = f"[{self.low:.4g} .. {self.high:.4g}]" if self.low != self.high else ""
        return f"{self.name:<64} {self.median:>9.4g} {self.unit:<12} {span:<22} {self.remark}".rstrip()


def interleaved(candidates: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, np.ndarray]:
    """Calls every candidate in turn, `repeats` times after a round that does not count.

    A candidate times itself and returns seconds per unit of work; set-up it does between is not counted.
    Returns: {name: [repeats]}.
    """
    rounds = [{name: candidate() for name, candidate in candidates.items()} for _ in range(repeats + 1)]
    return {name: np.array([times[name] for times in rounds[1:]]) for name in candidates}


def row(name: str, unit: str, values: np.ndarray, remark: str = "") -> Row:
    """Median and range of one value a repetition."""
    return Row(name, unit, float(np.median(values)), float(values.min()), float(values.max()), remark)
