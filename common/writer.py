"""The local record of a run, the source of truth: `metrics.jsonl` and `events.jsonl`, one JSON object a line.

Every line reaches the operating system before `log` returns, so a killed run keeps all of it. A resumed run
appends under the next attempt number; `read_metrics` gives the one clean curve.
"""

import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TextIO

import numpy as np

from common.config import ConfigError
from common.console import Display
from common.trackers import import_packages, scalars_of, start

_RESERVED = ("step", "attempt", "kind", "time")
_EVENT_RESERVED = ("time", "step", "attempt", "event", "message")
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Writer:
    """Appends rows and events to the files of `workdir`, shows progress, and feeds the trackers.

    Args:
      attempt: 1 for a fresh run, one more after each restart; a rollback within a run raises it by one too.
      total: the last step, for the progress display.
      trackers: names among "tensorboard", "wandb", "trackio"; missing packages are a ConfigError.
      project, config: what W&B and trackio show.
      enabled: False on every process but the lead; nothing is then written or shown.
      stream: of the progress display; stderr by default.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        attempt: int = 1,
        total: int = 0,
        trackers: Sequence[str] = (),
        project: str = "triptych",
        config: Mapping[str, Any] | None = None,
        enabled: bool = True,
        stream: TextIO | None = None,
    ):
        import_packages(trackers)  # on every process, so that all fail alike
        self.workdir, self.attempt, self.enabled = pathlib.Path(workdir), attempt, enabled
        self._closed, self._step = not enabled, 0
        if not enabled:
            return
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._trackers = start(trackers, self.workdir, attempt, project, encode(config or {}))
        self._metrics = _open_log(self.workdir / "metrics.jsonl")
        self._events = _open_log(self.workdir / "events.jsonl")
        self._display = Display(total, self.workdir.name or "run", stream)

    def log(self, step: int, values: Mapping[str, Any], kind: str = "train") -> None:
        """Writes one row. `values`: floats, or lists with one value a seed (`metrics.to_host`).

        Raises: ValueError for a name a row needs itself; TypeError for a value JSON cannot hold.
        """
        if self._closed:
            return
        _check_names(values, _RESERVED)
        self._step = int(step)
        row = {"step": self._step, "attempt": self.attempt, "kind": kind, "time": time.time(), **values}
        self._metrics.write(to_line(row))
        scalars = scalars_of(values)
        self._display.update(self._step, scalars)
        self._track(self._step, {f"{kind}/{name}": value for name, value in scalars.items()})

    def _track(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, scalars)
            except Exception as error:  # a server may go away; the run must not stop for it
                del self._trackers[name]
                self.event(step, "tracker_failed", f"{name} is off from here on: {error}")

    def event(self, step: int, event: str, message: str, **fields: Any) -> None:
        """Writes one event and shows its message."""
        if self._closed:
            return
        _check_names(fields, _EVENT_RESERVED)
        head = {
            "time": time.time(),
            "step": int(step),
            "attempt": self.attempt,
            "event": event,
            "message": message,
        }
        self._events.write(to_line({**head, **fields}))
        self._display.message(f"[step {step}] {event}: {message}")

    def progress(self, step: int) -> None:
        """Moves the display to `step` without a row."""
        if not self._closed:
            self._display.update(int(step))

    @property
    def steps_per_second(self) -> float:
        """Over the last half minute; NaN while unknown and where disabled."""
        return self._display.rate.per_second if self.enabled else math.nan

    def flush(self) -> None:
        """Forces both files to the disk."""
        if not self._closed:
            for file in (self._metrics, self._events):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """Ends the display and closes everything; a second call does nothing."""
        if self._closed:
            return
        self._display.close()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self.event(self._step, "tracker_failed", f"{name} did not close: {error}")
        self._closed = True
        self._metrics.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_names(values: Mapping[str, Any], reserved: Sequence[str]) -> None:
    taken = sorted(set(values) & set(reserved))
    if taken:
        raise ValueError(f"{', '.join(taken)}: the row's own field, not a metric's name")


def _open_log(path: pathlib.Path) -> TextIO:
    """Opens for appending; what a killed process left of its last line is finished or cut off."""
    if path.exists():
        with open(path, "r+b") as file:
            content = file.read()
            tail = content[content.rfind(b"\n") + 1 :]
            if tail and _parse(tail) is None:
                file.truncate(len(content) - len(tail))
            elif tail:
                file.write(b"\n")
    return open(path, "a", buffering=1, encoding="utf-8")


def to_line(row: Mapping[str, Any]) -> str:
    """One line of strict JSON."""
    return json.dumps(encode(row), allow_nan=False, ensure_ascii=False) + "\n"


def encode(value: Any) -> Any:
    """`value` as strict JSON has it: arrays as lists, non-finite floats as "nan", "inf" and "-inf"."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if hasattr(value, "dtype"):
        array = np.asarray(value)
        wide = array if array.dtype.kind in "biuU" else array.astype(np.float64)
        return encode(wide.tolist())
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be written as JSON")


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # also a character cut in two
        return None
    return row if isinstance(row, dict) else None


def _rows(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Rows of a file that may not exist; a torn last line is left out, any other broken line is an error."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        row = _parse(line) if line.strip() else None
        if row is not None and {"step", "attempt"} <= row.keys():
            yield row
        elif line.strip() and number < len(lines):
            raise ConfigError(f"{path}:{number}: not a row of a run: {line[:60]!r}")


def read_metrics(path: str | os.PathLike[str], kind: str | None = None) -> list[dict[str, Any]]:
    """Rows of `path` (the file, or its workdir) by step: one clean curve through all crashes and rollbacks.

    What an attempt wrote at steps a later one did again is left out. `kind`: "train" or "eval" rows only.
    """
    attempts: dict[int, list[dict[str, Any]]] = {}
    for row in _rows(_log_file(path, "metrics.jsonl")):
        attempts.setdefault(row["attempt"], []).append({key: _decode(value) for key, value in row.items()})
    kept: list[dict[str, Any]] = []
    redone_from: float = math.inf
    redone_kinds: set[str] = set()
    for attempt in sorted(attempts, reverse=True):
        rows = attempts[attempt]
        for row in rows:
            # A run restored at step s may evaluate at s anew without repeating the update that led to s.
            if row["step"] < redone_from or (row["step"] == redone_from and row["kind"] not in redone_kinds):
                kept.append(row)
        first = min(row["step"] for row in rows)
        if first < redone_from:
            redone_from, redone_kinds = first, set()
        redone_kinds |= {row["kind"] for row in rows if row["step"] == redone_from}
    order = {
        id(row): i for i, row in enumerate(row for attempt in sorted(attempts) for row in attempts[attempt])
    }
    kept.sort(key=lambda row: (row["step"], order[id(row)]))
    return [row for row in kept if kind is None or row["kind"] == kind]


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Events of `path` (the file, or its workdir), of all attempts, as they were written."""
    keep = ("event", "message")
    rows = _rows(_log_file(path, "events.jsonl"))
    return [{key: value if key in keep else _decode(value) for key, value in row.items()} for row in rows]


def _log_file(path: str | os.PathLike[str], name: str) -> pathlib.Path:
    given = pathlib.Path(path)
    return given / name if given.is_dir() or given.suffix != ".jsonl" else given
