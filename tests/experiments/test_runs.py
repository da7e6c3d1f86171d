import json

import numpy as np
import pytest

from common.config import ConfigError, to_json
from common.defaults import base_config
from common.writer import to_line
from experiments.runs import load_run


@pytest.fixture
def folder(tmp_path):
    def write(num_seeds, rows, arrays=None):
        config = base_config("diffusion_mem")
        config.run.num_seeds = num_seeds
        content = {"config": json.loads(to_json(config)), "environment": {}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        rows = [{"attempt": 1, "time": 0.0, "kind": "eval", **row} for row in rows]
        (tmp_path / "metrics.jsonl").write_text("".join(map(to_line, rows)))
        if arrays:
            (tmp_path / "artifacts").mkdir()
            np.savez(tmp_path / "artifacts" / "sample_10.npz", **arrays)
        return tmp_path

    return write


def test_series_has_one_row_a_seed(folder):
    rows = [
        {"step": 10, "fit/error": [1.0, 2.0]},
        {"step": 10, "kind": "train", "loss": [5.0, 6.0]},
        {"step": 20, "fit/error": [0.5, float("nan")]},
    ]
    run = load_run(folder(2, rows), "two")
    steps, values = run.series("fit/error")
    np.testing.assert_array_equal(steps, [10, 20])
    np.testing.assert_array_equal(values, [[1.0, 0.5], [2.0, np.nan]])
    assert run.series("loss")[1].shape == (2, 1)
    assert (run.name, run.num_seeds, run.done) == ("two", 2, False)


def test_series_of_one_seed_and_of_a_metric_that_was_never_written(folder):
    run = load_run(folder(1, [{"step": 3, "fit/error": float("inf")}]), "one")
    np.testing.assert_array_equal(run.series("fit/error")[1], [[np.inf]])
    steps, values = run.series("fit/accuracy")
    assert (steps.shape, values.shape) == ((0,), (1, 0))


def test_series_of_a_run_that_was_restarted_is_one_curve(folder):
    rows = [{"step": step, "attempt": 1, "fit/error": 1.0} for step in (1, 2, 3)]
    rows += [{"step": step, "attempt": 2, "fit/error": 2.0} for step in (3, 4)]
    steps, values = load_run(folder(1, rows), "one").series("fit/error")
    np.testing.assert_array_equal(steps, [1, 2, 3, 4])
    np.testing.assert_array_equal(values, [[1, 1, 2, 2]])


@pytest.mark.parametrize(("num_seeds", "stored"), [(1, (8, 2, 2)), (3, (3, 8, 2, 2))])
def test_artifacts_have_a_leading_axis_of_seeds(folder, num_seeds, stored):
    run = load_run(folder(num_seeds, [], {"samples": np.zeros(stored)}), "run")
    assert run.artifact("sample", 10)["samples"].shape == (num_seeds, 8, 2, 2)
    with pytest.raises(ConfigError, match=r"sample_11\.npz: no such artifact"):
        run.artifact("sample", 11)


def test_done_is_read_from_the_folder(folder):
    path = folder(1, [{"step": 3, "fit/error": 1.0}])
    (path / "DONE").write_text('{"step": 3}')
    assert load_run(path, "run").done
    (path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="DONE, but has no rows"):
        load_run(path, "run")


def test_seconds_are_those_of_the_attempts_not_of_the_pause_between(folder):
    rows = [{"step": i, "attempt": 1 + i // 2, "time": at} for i, at in enumerate((2.0, 5.0, 100.0, 101.0))]
    path = folder(1, rows)
    event = {"step": 0, "attempt": 1, "time": 1.0, "event": "start", "message": ""}
    (path / "events.jsonl").write_text(to_line(event))
    assert load_run(path, "run").seconds == 5


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run's config"):
        load_run(tmp_path, "none")
