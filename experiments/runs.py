"""Finished or unfinished runs as a figure reads them: curves over steps, one row a seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from common.config import ConfigError, require
from common.workdir import is_done, saved_config
from common.writer import read_events, read_metrics


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
      name: its variant's name in the sweep.
      rows: the clean rows of `metrics.jsonl`.
      done: whether it reached its end.
    """

    name: str
    path: epath.Path
    config: ConfigDict
    rows: Sequence[Mapping[str, Any]]
    done: bool

    @property
    def num_seeds(self) -> int:
        """Seeds trained side by side."""
        return self.config.run.num_seeds

    @property
    def seconds(self) -> float:
        """From the start of each attempt to its last row, summed over attempts."""
        times: dict[int, list[float]] = {}
        for line in [*self.rows, *read_events(self.path)]:
            times.setdefault(line["attempt"], []).append(line["time"])
        return sum(max(attempt) - min(attempt) for attempt in times.values())

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [T], values [seeds, T]) of a metric; empty where it was never written."""
        found = [(row["step"], np.atleast_1d(row[metric])) for row in self.rows if metric in row]
        if not found:
            return np.zeros(0), np.zeros((self.num_seeds, 0))
        return np.array([step for step, _ in found], float), np.stack([value for _, value in found], axis=1)

    def artifact(self, evaluation: str, step: int) -> Mapping[str, np.ndarray]:
        """The arrays an eval kept at a step, with a leading axis of seeds. ConfigError if there are none."""
        file = self.path / "artifacts" / f"{evaluation}_{step}.npz"
        if not file.exists():
            raise ConfigError(f"{file}: no such artifact")
        with file.open("rb") as handle:
            arrays = dict(np.load(handle, allow_pickle=False))
        return arrays if self.num_seeds > 1 else {key: value[None] for key, value in arrays.items()}


def load_run(path: epath.PathLike, name: str) -> Run:
    """Reads a run folder. Raises ConfigError when it holds no run."""
    folder = epath.Path(path)
    rows = read_metrics(folder)
    done = is_done(folder)
    require(bool(rows) or not done, "run", str(folder), "is DONE, but has no rows in metrics.jsonl")
    return Run(name, folder, saved_config(folder), rows, done)
