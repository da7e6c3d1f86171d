"""The loop: its order, how a run ends, and what the guard does to it."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import guard, loop, profile, schedule, start
from common.config import ConfigError, view
from common.loop import GuardStop
from common.seeds import take_seed, vmap_seeds
from common.task import Eval
from common.workdir import is_done
from common.writer import read_metrics
from tests.common import runs, toy


def poisoned(steps, where=0, value=math.nan):
    """Batches that hold `value` in row `where` at these steps: a fault of the data, not of the program."""

    def change(task):
        def batches(first):
            for step, batch in enumerate(task.batches(first), start=first):
                if step in steps:
                    batch = {**batch, "y": batch["y"].copy()}
                    batch["y"][where] = value
                yield batch

        return dataclasses.replace(task, batches=batches)

    return change


def test_order_of_an_iteration(tmp_path, monkeypatch):
    """Evaluate → save → step → log the step before; the eval and the checkpoint of a step see one state."""
    calls = []

    def watched(task):
        def batches(first):
            for step, batch in enumerate(task.batches(first), start=first):
                calls.append(f"batch {step}")
                yield batch

        return dataclasses.replace(task, batches=batches)

    def evaluated(state):
        calls.append(f"eval {int(state.step)}")
        return {"step": state.step}

    save, log = loop.Checkpoints.save, loop.Writer.log
    monkeypatch.setattr(
        loop.Checkpoints,
        "save",
        lambda self, step, state, *a: (
            calls.append(f"save {step} {int(state.step)}"),
            save(self, step, state, *a),
        ),
    )
    monkeypatch.setattr(
        loop.Writer,
        "log",
        lambda self, step, values, kind="train": (
            calls.append(f"{kind} row {step}"),
            log(self, step, values, kind),
        ),
    )
    evals = {"fit": Eval(evaluated, schedule.at([0, 2, 4]))}
    runs.run(tmp_path, watched, evals=evals, run__steps=4, run__save_every=2)
    assert calls == [
        "batch 0",  # for its shape
        *("eval 0", "eval row 0", "batch 0", "batch 1", "train row 1", "train row 2"),
        *("eval 2", "eval row 2", "save 2 2", "batch 2", "batch 3", "train row 3", "train row 4"),
        *("eval 4", "eval row 4", "save 4 4"),
    ]


@pytest.mark.parametrize("steps", [0, 1])
def test_shortest_runs(tmp_path, steps):
    outcome = runs.run(tmp_path, run__steps=steps)
    assert (outcome.reason, outcome.step) == ("finished", steps)
    assert runs.checkpoints(tmp_path) == [steps]
    assert [row["kind"] for row in read_metrics(tmp_path)] == ["eval", "train", "eval"][: 1 + 2 * steps]


def test_rows_of_a_run(tmp_path):
    """Behaviours row 52: the examples of a step are those of the configured batch; arrays go to artifacts."""
    images = np.arange(8.0).reshape(2, 4)
    evals = {
        "sample": Eval(
            lambda state: {"images": images, "score": jnp.ones(()), "each": np.ones(3)}, schedule.at([4])
        )
    }
    runs.run(tmp_path, evals=evals, run__steps=5, run__log_every=2, batch_size=16)
    rows = read_metrics(tmp_path, kind="train")
    assert [row["step"] for row in rows] == [2, 4, 5]
    for row in rows:
        expected = pytest.approx(16 * row["steps_per_second"], nan_ok=True)
        assert row["examples_per_second"] == expected
    (row,) = read_metrics(tmp_path, kind="eval")
    assert (row["sample/score"], row["sample/each"]) == (1.0, [1.0, 1.0, 1.0])
    with np.load(tmp_path / "artifacts/sample_4.npz", allow_pickle=False) as saved:
        np.testing.assert_array_equal(saved["images"], images)
    (compiled,) = runs.events(tmp_path, "compiled")
    assert compiled["flops"] > 0


def test_same_seed_same_run(tmp_path):
    """Behaviours row 64: all rows equal except for times, another seed differs."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        runs.run(tmp_path / name, run__seed=seed)
    assert runs.curve(tmp_path / "a") == runs.curve(tmp_path / "b")
    losses = [[row["loss"] for row in read_metrics(tmp_path / name, kind="train")] for name in "ac"]
    assert set(losses[0]).isdisjoint(losses[1])


# Behaviours row 161: what is saved, evaluated and logged how often does not change what is trained.
@pytest.mark.parametrize(("save_every", "log_every"), [(1, 6), (100, 1)])
def test_cadence_does_not_matter(tmp_path, save_every, log_every):
    usual = runs.run(tmp_path / "usual")
    other = runs.run(tmp_path / "other", run__save_every=save_every, run__log_every=log_every, evals={})
    runs.assert_same(usual.state, other.state)


def test_a_nan_batch_is_skipped(tmp_path):
    """Behaviours rows 26, 46: an event names the batch, parameters stay finite, also when resumed."""
    bad = poisoned({5, 7})
    outcome = runs.run(tmp_path / "run", bad, run__steps=7)
    assert outcome.reason == "finished"
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome.state.params))
    (event,) = runs.events(tmp_path / "run", "bad_update")
    assert (event["step"], event["batch"]) == (5, 5)
    assert math.isnan(read_metrics(tmp_path / "run", kind="train")[5]["loss"])
    longer = runs.run(tmp_path / "run", bad, run__steps=9)
    assert longer.reason == "finished"
    assert [event["batch"] for event in runs.events(tmp_path / "run", "bad_update")] == [5, 7]
    runs.assert_same(longer.state, runs.run(tmp_path / "whole", bad, run__steps=9).state)


def test_a_bad_update_is_reported_before_it_is_saved(tmp_path):
    """A run that dies between a save and the next row has said what its saved state holds."""

    def dying(task):
        def batches(first):
            for step, batch in enumerate(poisoned({1})(task).batches(first), start=first):
                if step == 3:
                    raise RuntimeError("the disk of the data is gone")
                yield batch

        return dataclasses.replace(task, batches=batches)

    with pytest.raises(RuntimeError, match="gone"):
        runs.run(tmp_path, dying, run__steps=9, run__save_every=2, run__log_every=100)
    assert runs.checkpoints(tmp_path)[-1] == 2
    assert [event["batch"] for event in runs.events(tmp_path, "bad_update")] == [1]


def test_a_nan_batch_stops_the_run_once(tmp_path):
    """Behaviours row 46: saved without the update, not DONE; the next attempt goes on behind the batch."""
    stop = {"guard__nonfinite": "stop", "run__steps": 9, "run__log_every": 100}
    with pytest.raises(GuardStop, match="bad update at step 5; the state is saved"):
        runs.run(tmp_path / "run", poisoned({5}), **stop)
    assert not is_done(tmp_path / "run")
    assert runs.checkpoints(tmp_path / "run")[-1] in (6, 7)
    assert len(runs.events(tmp_path / "run", "guard_stop")) == 1
    assert [event["batch"] for event in runs.events(tmp_path / "run", "bad_update")] == [5]
    resumed = runs.run(tmp_path / "run", poisoned({5}), **stop)
    assert (resumed.reason, resumed.step) == ("finished", 9)
    skipping = runs.run(tmp_path / "skipping", poisoned({5}), run__steps=9)
    runs.assert_same(resumed.state.params, skipping.state.params)
    assert int(resumed.state.guard.bad) == 1


def test_too_many_bad_updates_stop_the_run(tmp_path):
    """Behaviours row 47: no endless loop, whatever the action."""
    for action in ("alert", "skip"):
        with pytest.raises(GuardStop, match=r"[34] bad updates in a row \(guard.max_consecutive=3\)"):
            runs.run(
                tmp_path / action,
                poisoned(range(2, 100)),
                run__steps=100,
                guard__max_consecutive=3,
                guard__nonfinite=action,
            )
        assert max(runs.checkpoints(tmp_path / action)) <= 6


def test_a_spike_at_every_step_ends_the_run(tmp_path):
    """Behaviours row 47: dropped updates do not make spikes the new normal."""
    with pytest.raises(GuardStop, match=r"[34] bad updates in a row"):
        runs.run(
            tmp_path,
            poisoned(range(10, 100), value=1e4),
            run__steps=100,
            guard__spike="skip",
            guard__window=4,
            guard__max_consecutive=3,
        )
    assert [event["batch"] for event in runs.events(tmp_path, "bad_update")][:3] == [10, 11, 12]


# Behaviours rows 49, 50: the fault is in one shard of four, the decision is everywhere the same.
@pytest.mark.parametrize(
    ("value", "mode"), [(math.nan, "jit"), (math.nan, "shard_map"), (1e4, "jit"), (1e4, "pmap")]
)
def test_a_fault_in_one_shard(tmp_path, value, mode):
    options = {
        "devices": 4,
        "guard__spike": "skip",
        "guard__window": 4,
        "run__steps": 8,
        "parallel__mode": mode,
        "evals": {},
    }
    outcome = runs.run(tmp_path, poisoned({6}, where=7, value=value), **options)
    assert [event["batch"] for event in runs.events(tmp_path, "bad_update")] == [6]
    assert int(outcome.state.guard.bad) == 1
    for leaf in jax.tree.leaves(outcome.state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert np.isfinite(copies[0]).all()
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


def seeds_task(config, mesh, seeds):
    from experiments.tasks import with_seed

    guards = view(config, guard.GuardConfig, "guard")
    return [guard.attach(toy.build(with_seed(config, seed), mesh), guards) for seed in seeds]


def test_five_seeds_side_by_side(tmp_path):
    """Each is the run it is alone, guard and stop-and-resume included."""
    _, config, mesh = runs.prepare(run__num_seeds=5, nan_at=3)
    together = vmap_seeds(seeds_task(config, mesh, range(5)))
    outcome = loop.fit(together, config, str(tmp_path / "five"), mesh)
    rows = read_metrics(tmp_path / "five")
    assert [event["batch"] for event in runs.events(tmp_path / "five", "bad_update")] == [3]
    for seed in (0, 3):
        alone = runs.run(tmp_path / str(seed), run__seed=seed, nan_at=3)
        mine = take_seed(outcome.state, seed)
        for a, b in zip(jax.tree.leaves(mine.params), jax.tree.leaves(alone.state.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        for row, expected in zip(rows, read_metrics(tmp_path / str(seed)), strict=True):
            for name in {"loss", "fit/error"} & row.keys():
                assert row[name][seed] == pytest.approx(expected[name], rel=1e-5, nan_ok=True)


def test_seeds_resume(tmp_path):
    def fit(folder, steps):
        _, config, mesh = runs.prepare(run__num_seeds=3, run__steps=steps)
        return loop.fit(vmap_seeds(seeds_task(config, mesh, range(3))), config, str(tmp_path / folder), mesh)

    fit("parts", 3)
    runs.assert_same(fit("parts", 6).state, fit("whole", 6).state)


def test_the_step_cannot_recompile(tmp_path, monkeypatch):
    """It is compiled ahead of time: one trace, and a batch of another shape is an error that says so."""
    traced = []

    def counted(task):
        return dataclasses.replace(
            task, step=lambda state, batch: (traced.append(1), task.step(state, batch))[1]
        )

    runs.run(tmp_path / "run", counted, run__steps=6)
    assert len(traced) == 1

    def growing(task):
        def batches(first):
            for step, batch in enumerate(task.batches(first), start=first):
                yield batch if step < 3 else {key: value[:, None] for key, value in batch.items()}

        return dataclasses.replace(task, batches=batches)

    with pytest.raises(TypeError, match="compiled"):
        runs.run(tmp_path / "other", growing)
    assert runs.checkpoints(tmp_path / "other") == [2]


# Behaviours rows 51, 52, 55 and other fields that cannot be: one line, before anything is computed.
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch_size": 12}, r"batch size=12: must be a multiple of 8 \(mesh axes data=8 × fsdp=1\)"),
        ({"batch_size": 9}, "batch size=9: must be a multiple of 8"),
        ({"parallel__data": 4}, "multiplies to 4, but there are 8 devices"),
        ({"parallel__data": 3, "parallel__fsdp": -1}, "3 does not divide 8 devices"),
        ({"parallel__mode": "pjit"}, "parallel.mode='pjit': must be one of jit, shard_map, pmap"),
        (
            {"parallel__mode": "pmap", "parallel__fsdp": 8, "parallel__data": 1},
            "parallel.mode='pmap': replicates",
        ),
        ({"run__log_every": 0}, "run.log_every=0: must be at least 1"),
        ({"run__save_every": 0}, "run.save_every=0: must be at least 1"),
        ({"run__steps": -1}, "run.steps=-1: must be at least 0"),
        ({"run__stall_timeout": -1.0}, "run.stall_timeout=-1.0: must be 0"),
        ({"run__seed": 2**32}, "run.seed=4294967296: must be between"),
        ({"run__debug": True, "parallel__mode": "pmap"}, "parallel.mode='pmap': run.debug needs mode=jit"),
        ({"checkpoint__keep": 0}, "checkpoint.keep=0: must be at least 1"),
        ({"checkpoint__best_mode": "low"}, "checkpoint.best_mode='low': must be min or max"),
        ({"guard__metric": "los"}, "guard.metric='los': must be one of"),
        ({"run__trackers": ("tensorbord",)}, "tensorbord"),
        ({"run__resume_from": "/nowhere"}, "run.resume_from='/nowhere': holds no complete checkpoint"),
    ],
)
def test_impossible_configs(tmp_path, monkeypatch, overrides, message):
    monkeypatch.setattr(start.jax.stages.Compiled, "__call__", lambda *args: pytest.fail("a step was made"))
    with pytest.raises(ConfigError, match=message) as error:
        runs.run(tmp_path, arrays=toy.data(), **overrides)
    assert "\n" not in str(error.value)
    assert runs.checkpoints(tmp_path) == []


def test_a_step_that_does_not_fit_is_refused_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "device_memory", lambda device: 1000)
    monkeypatch.setattr(start.jax.stages.Compiled, "__call__", lambda *args: pytest.fail("a step was made"))
    with pytest.raises(ConfigError, match=r"one step needs .* GiB per device, but there are"):
        runs.run(tmp_path)
    assert runs.checkpoints(tmp_path) == []


def test_a_last_batch_that_does_not_divide(tmp_path):
    """Behaviours row 51: named, and what was done before is saved."""

    def partial(task):
        def batches(first):
            for step, batch in enumerate(task.batches(first), start=first):
                yield batch if step < 3 else {key: value[:3] for key, value in batch.items()}

        return dataclasses.replace(task, batches=batches)

    with pytest.raises(ConfigError, match="global batch size=3: must be a multiple of 8"):
        runs.run(tmp_path, partial)
    assert runs.checkpoints(tmp_path) == [2]


def test_metrics_file_is_strict_json(tmp_path):
    runs.run(tmp_path, poisoned({1}), run__steps=3)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
