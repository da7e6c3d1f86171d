"""A run that is stopped and started again is the run that was not."""

import dataclasses
import itertools
import pathlib
import random
import signal
import time

import jax
import numpy as np
import pytest

from common.checkpoint import CheckpointConfig, Checkpoints
from common.sharding import state_shardings
from common.workdir import is_done
from common.writer import read_metrics
from tests.common import runs, toy


def run_in_parts(workdir, parts, log=None, **overrides):
    """Runs to each step of `parts` in turn."""
    log = [] if log is None else log
    for steps in parts:
        outcome = runs.run(workdir, lambda task: runs.hashed(task, log), run__steps=steps, **overrides)
    return outcome


# Behaviours rows 16, 17, 29, 31, 32, 71, 74: an epoch is 5 batches of 8 rows.
@pytest.mark.parametrize(
    ("parts", "save_every"),
    [
        ((3, 6), 3),  # at a multiple of the period
        ((3, 6), 2),  # off it
        ((5, 10), 5),  # at the end of an epoch
        ((1, 4, 7), 10),
    ],
)
def test_parts_equal_the_whole(tmp_path, parts, save_every):
    log, whole_log = [], []
    overrides = {"run__save_every": save_every, "run__log_every": 2}
    resumed = run_in_parts(tmp_path / "parts", parts, log, **overrides)
    whole = run_in_parts(tmp_path / "whole", parts[-1:], whole_log, **overrides)
    runs.assert_same(resumed.state, whole.state)
    assert [step for step, _ in log] == list(range(parts[-1]))
    assert log == whole_log
    assert runs.checkpoints(tmp_path / "parts")[-1] == runs.checkpoints(tmp_path / "whole")[-1] == parts[-1]
    # The last step of each part has rows of its own.
    extra = set(parts[:-1])
    kept = [row for row in runs.curve(tmp_path / "parts") if row["step"] not in extra]
    assert kept == [row for row in runs.curve(tmp_path / "whole") if row["step"] not in extra]


def test_every_row_is_seen_once_an_epoch(tmp_path):
    """Behaviours row 32: an interruption in the middle of an epoch of 40 rows."""
    seen = []

    def recorded(task):
        def batches(start):
            for batch in task.batches(start):
                seen.append(batch["id"])
                yield batch

        return dataclasses.replace(task, batches=batches)

    for steps in (2, 5):
        before = len(seen)
        runs.run(tmp_path, recorded, run__steps=steps)
        del seen[before]  # the peek for shapes
    assert sorted(np.concatenate(seen)) == list(range(toy.ROWS))


def test_a_finished_run_is_left_alone(tmp_path):
    """Behaviours rows 16, 38."""
    first = runs.run(tmp_path)
    rows = read_metrics(tmp_path)
    calls = []
    again = runs.run(tmp_path, lambda task: runs.hashed(task, calls))
    assert again.reason == "finished"
    assert calls == []
    runs.assert_same(first.state, again.state)
    assert read_metrics(tmp_path) == rows
    assert is_done(tmp_path)


def test_a_longer_run_goes_on(tmp_path):
    runs.run(tmp_path, run__steps=3)
    assert is_done(tmp_path)
    longer = runs.run(tmp_path, run__steps=6)
    assert (longer.reason, longer.step, is_done(tmp_path)) == ("finished", 6, True)
    runs.assert_same(longer.state, runs.run(tmp_path / "whole").state)


@pytest.mark.parametrize("save_every", [3, 5])
def test_data_that_ends_early(tmp_path, save_every):
    """Behaviours row 17: the last completed step is saved, and a second start makes no update."""

    def short(task):
        return dataclasses.replace(
            task, batches=lambda start: itertools.islice(task.batches(start), max(0, 3 - start))
        )

    outcome = runs.run(tmp_path, short, run__save_every=save_every)
    assert (outcome.reason, outcome.step) == ("data ended", 3)
    assert runs.checkpoints(tmp_path)[-1] == 3
    assert is_done(tmp_path)
    again = runs.run(tmp_path, short, run__save_every=save_every)
    assert (again.reason, again.step) == ("data ended", 3)
    runs.assert_same(outcome.state, again.state)


def test_what_a_crash_leaves_is_enough(tmp_path):
    """An exception between saves: the save in progress is completed, the rest is made again."""

    def broken(task):
        def batches(start):
            for i, batch in enumerate(task.batches(start), start=start):
                if i == 5:
                    raise RuntimeError("broken")
                yield batch

        return dataclasses.replace(task, batches=batches)

    with pytest.raises(RuntimeError, match="broken"):
        runs.run(tmp_path / "crashed", broken)
    assert runs.checkpoints(tmp_path / "crashed")[-1] == 4
    resumed = runs.run(tmp_path / "crashed")
    runs.assert_same(resumed.state, runs.run(tmp_path / "whole").state)
    assert runs.curve(tmp_path / "crashed") == runs.curve(tmp_path / "whole")


def test_resume_from_and_init_from(tmp_path):
    source = runs.run(tmp_path / "source", run__steps=3)
    resumed = runs.run(tmp_path / "resumed", run__resume_from=str(tmp_path / "source"))
    runs.assert_same(resumed.state, runs.run(tmp_path / "whole").state)
    started = runs.run(tmp_path / "started", run__steps=0, run__init_from=str(tmp_path / "source"))
    runs.assert_same(started.state.params, source.state.params)
    assert int(started.state.step) == 0


def test_a_runs_own_checkpoint_comes_before_the_one_it_began_with(tmp_path):
    source = {"run__resume_from": str(tmp_path / "source")}
    runs.run(tmp_path / "source", run__steps=3)
    runs.run(tmp_path / "run", run__steps=5, **source)
    runs.run(tmp_path / "run", **source)
    starts = [(event["step"], event["message"]) for event in runs.events(tmp_path / "run", "start")]
    assert starts == [(3, "new run"), (5, "resumed")]


def test_a_damaged_newest_of_the_source_is_passed_over_and_named(tmp_path):
    runs.run(tmp_path / "source", run__steps=4)
    next((tmp_path / "source/checkpoints/4").rglob("manifest.ocdbt")).unlink()
    runs.run(tmp_path / "run", run__resume_from=str(tmp_path / "source"))
    (note,) = runs.events(tmp_path / "run", "checkpoint_skipped")
    assert "checkpoint 4 cannot be used" in note["message"]
    assert runs.events(tmp_path / "run", "start")[0]["step"] == 2


def test_relative_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.run(pathlib.Path("source"), run__steps=3)
    assert runs.checkpoints(tmp_path / "source")[-1] == 3
    resumed = runs.run(pathlib.Path("source"))
    started = runs.run(pathlib.Path("started"), run__steps=0, run__init_from="source")
    again = runs.run(pathlib.Path("again"), run__resume_from="source")
    assert (resumed.step, started.step, again.step) == (6, 0, 6)
    newest = runs.run(pathlib.Path("newest"), run__steps=0, run__init_from="source/checkpoints/6")
    runs.assert_same(newest.state.params, resumed.state.params)


def final_state(workdir, **overrides):
    task, config, mesh = runs.prepare(**overrides)
    shapes = jax.eval_shape(task.init, jax.random.key(config.run.seed))
    kept = Checkpoints(workdir / "checkpoints", CheckpointConfig())
    return kept.restore_newest(shapes, state_shardings(shapes, mesh, task.rules))[1]


def kill_until_done(workdir, kills, seed, slow_step, steps):
    """Starts the run again and again, killing each process after a random time, then lets it end."""
    chance = random.Random(seed)
    arguments = [f"--config.run.steps={steps}", f"--fault=slow_step:{slow_step}"]
    for _ in range(kills):
        with runs.process(workdir, *arguments) as started:
            if chance.random() < 0.8:
                started.wait_for("compiled")
            time.sleep(chance.random() * slow_step * steps / 2)
            started.send(signal.SIGKILL)
            started.wait()
    with runs.process(workdir, *arguments) as started:
        assert started.wait() == 0, started.output
        assert f"outcome finished {steps}" in started.output


def check_kills(tmp_path, kills, seed, slow_step, steps):
    kill_until_done(tmp_path / "killed", kills, seed, slow_step, steps)
    whole = runs.run(tmp_path / "whole", run__steps=steps)
    runs.assert_same(final_state(tmp_path / "killed", run__steps=steps), whole.state)
    assert runs.curve(tmp_path / "killed") == runs.curve(tmp_path / "whole")


def test_killed_three_times(tmp_path):
    check_kills(tmp_path, kills=3, seed=0, slow_step=0.02, steps=40)


@pytest.mark.slow
def test_killed_twenty_four_times(tmp_path):
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        check_kills(tmp_path / str(seed), kills=8, seed=seed, slow_step=0.02, steps=60)
