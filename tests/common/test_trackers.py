import io
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from common import trackers
from common.config import ConfigError
from common.writer import Writer, read_events, read_metrics


def _writer(folder, **options):
    return Writer(folder, **({"attempt": 1, "total": 100, "stream": io.StringIO()} | options))


def _curve(folder, kind="train"):
    return [(row["step"], row["attempt"]) for row in read_metrics(folder, kind)]


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_missing_tracker_is_one_line_at_the_start(tmp_path, monkeypatch, name, package, enabled):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as error:
        _writer(tmp_path / "run", trackers=(name,), enabled=enabled)
    message = str(error.value)
    assert f"{package} is not installed" in message
    assert "pip install 'triptych[track]'" in message
    assert "\n" not in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with _writer(tmp_path / "run") as writer:  # training without it does not care
        writer.log(1, {"loss": 1.0})
    assert _curve(tmp_path / "run") == [(1, 1)]


def test_trackers_are_imported_only_when_asked_for(tmp_path):
    code = (
        "import sys; from common.writer import Writer; Writer(sys.argv[1]).close();"
        "sys.exit(any(m in sys.modules for m in ('wandb', 'trackio', 'tensorboardX')))"
    )
    root = pathlib.Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("names", "said"), [(("wandv",), "did you mean 'wandb'"), ("wandb", "must be a tuple")]
)
def test_unknown_trackers_are_named(tmp_path, names, said):
    with pytest.raises(ConfigError, match=said):
        _writer(tmp_path, trackers=names)


class _FakeRuns(types.ModuleType):
    """A module with the shape that W&B and trackio share."""

    def __init__(self, own_step, fails_at=None):
        super().__init__("fake")
        self.rows, self.inits, self.finished, self.fails_at = [], [], 0, fails_at
        self.metrics = []
        if own_step:
            self.define_metric = lambda *names, **options: self.metrics.append((names, options))

    def init(self, **options):
        self.inits.append(options)
        return self

    def log(self, row, step=None):
        if step == self.fails_at or row.get("global_step") == self.fails_at:
            raise ConnectionError("server gone")
        self.rows.append((step, row))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize(("name", "own_step"), [("wandb", True), ("trackio", False)])
def test_run_trackers_lose_no_row_of_a_resumed_run(tmp_path, monkeypatch, name, own_step):
    fake = _FakeRuns(own_step, fails_at=-1)
    monkeypatch.setitem(sys.modules, name, fake)
    for attempt, steps in ((1, (1, 2, 3)), (2, (2, 3))):
        with _writer(
            tmp_path / "run", attempt=attempt, trackers=(name,), config={"lr": np.float32(0.5)}
        ) as writer:
            for step in steps:
                writer.log(step, {"loss": float(step), "seeds": [1.0, 3.0], "hist": {"counts": [1]}})
    assert [init["name"] for init in fake.inits] == ["run-attempt1", "run-attempt2"]
    assert [(init["group"], init["config"]) for init in fake.inits] == [("run", {"lr": 0.5})] * 2
    scalars = [{"train/loss": float(step), "train/seeds": 2.0} for step in (1, 2, 3, 2, 3)]
    if own_step:
        assert fake.rows == [(None, {"global_step": int(row["train/loss"]), **row}) for row in scalars]
        assert fake.metrics == [(("*",), {"step_metric": "global_step"})] * 2
    else:
        assert fake.rows == [(int(row["train/loss"]), row) for row in scalars]
    assert [init.get("dir") for init in fake.inits] == [str(tmp_path / "run") if own_step else None] * 2
    assert fake.finished == 2


def test_a_tracker_that_fails_later_is_dropped_and_the_run_goes_on(tmp_path, monkeypatch):
    fake = _FakeRuns(own_step=False, fails_at=2)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with _writer(tmp_path, trackers=("trackio",)) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"loss": 1.0})
    assert [step for step, _ in fake.rows] == [1]
    assert _curve(tmp_path) == [(1, 1), (2, 1), (3, 1)]
    assert [(event["event"], event["step"]) for event in read_events(tmp_path)] == [("tracker_failed", 2)]


def test_a_tracker_that_will_not_start_is_one_line(tmp_path, monkeypatch):
    fake = _FakeRuns(own_step=False)
    fake.init = lambda **_: (_ for _ in ()).throw(RuntimeError("not\nlogged in"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ConfigError, match=r"trackers='wandb': could not be started \(not logged in\)"):
        _writer(tmp_path, trackers=("wandb",))


def test_tensorboard_purges_what_a_resumed_run_writes_again(tmp_path, monkeypatch):
    made = []

    class Summary:
        def __init__(self, logdir, filename_suffix, purge_step):
            self.logdir, self.suffix, self.rows, self.closed = logdir, filename_suffix, [], False
            self.purge_step = purge_step
            made.append(self)

        def add_scalar(self, name, value, step):
            self.rows.append((name, value, step))

        def close(self):
            self.closed = True

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Summary))
    for attempt, first in ((1, 1), (2, 5)):
        with _writer(tmp_path, attempt=attempt, trackers=("tensorboard",)) as writer:
            writer.log(first, {"loss": 0.5})
    assert [(summary.purge_step, summary.rows) for summary in made] == [
        (1, [("train/loss", 0.5, 1)]),
        (5, [("train/loss", 0.5, 5)]),
    ]
    assert [summary.suffix for summary in made] == [".1", ".2"]
    assert all(summary.closed and summary.logdir == str(tmp_path / "tensorboard") for summary in made)


def test_tracker_scalars():
    row = {"a": 1, "b": True, "c": [1.0, 3.0], "d": [1.0, math.nan], "e": {"counts": [1]}, "f": "x", "g": []}
    found = trackers.scalars_of(row | {"h": [[1.0]]})
    assert {key: value for key, value in found.items() if key != "d"} == {"a": 1.0, "c": 2.0}
    assert math.isnan(found["d"])
