"""Checkpoints: what survives, what is refused, what is kept."""

import math
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from common import checkpoint, seal
from common.checkpoint import CheckpointConfig, Checkpoints, restore
from common.config import ConfigError
from common.mesh import ParallelConfig, make_mesh
from common.sharding import ShardingRules, state_shardings
from common.train_state import TrainState
from common.workdir import is_done
from tests.common import runs, toy


def save(folder, step, state, metrics=None, **config):
    kept = Checkpoints(folder, CheckpointConfig(**config))
    kept.save(step, state, metrics)
    kept.wait()
    return kept


def load(folder, like):
    shapes = jax.eval_shape(lambda: like)
    shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    return restore(folder, shapes, shardings)


def damage(path, how):
    """Damages one checkpoint folder."""
    data = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-7])
    elif how == "changed":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "file missing":
        data.unlink()
    elif how == "unsealed":
        (path / "seal.json").unlink()
    elif how == "seal truncated":
        (path / "seal.json").write_text((path / "seal.json").read_text()[:20])
    elif how == "half deleted":
        shutil.rmtree(path / "state")
    elif how == "temporary":
        path.rename(path.with_name(f"{path.name}.orbax-checkpoint-tmp-0"))
    elif how == "deleted":
        shutil.rmtree(path)


# Behaviours row 13.
@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "changed",
        "file missing",
        "unsealed",
        "seal truncated",
        "half deleted",
        "temporary",
        "deleted",
    ],
)
def test_damaged_newest_falls_back(tmp_path, capfd, how):
    runs.run(tmp_path / "whole")
    runs.run(tmp_path / "run", run__steps=4)
    damage(tmp_path / "run/checkpoints/4", how)
    resumed = runs.run(tmp_path / "run")
    assert resumed.step == 6
    assert runs.checkpoints(tmp_path / "run") == [4, 6]
    assert not list(tmp_path.glob("run/checkpoints/*tmp*"))
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    notes = runs.events(tmp_path / "run", "checkpoint_skipped")
    assert [note["attempt"] for note in notes] == ([] if how == "deleted" else [2])
    assert [note["step"] for note in notes] == ([] if how == "deleted" else [2])
    assert ("checkpoint_skipped: checkpoint 4" in capfd.readouterr().err) == (how != "deleted")
    starts = runs.events(tmp_path / "run", "start")
    assert (starts[1]["step"], starts[1]["message"]) == (2, "resumed")


def test_leftover_folders_are_in_nobodys_way(tmp_path):
    """Behaviours row 13: an empty temporary folder, and an empty one of a step still to be saved."""
    runs.run(tmp_path, run__steps=2)
    (tmp_path / "checkpoints/4.orbax-checkpoint-tmp-0").mkdir()
    (tmp_path / "checkpoints/6").mkdir()
    assert runs.run(tmp_path).step == 6
    assert runs.checkpoints(tmp_path) == [4, 6]


def test_nothing_usable_is_refused(tmp_path):
    """Training from scratch over a damaged run would destroy what is left of it."""
    runs.run(tmp_path, run__steps=2)
    damage(tmp_path / "checkpoints/2", "truncated")
    with pytest.raises(ConfigError, match=r"no usable checkpoint in .*checkpoint 2 cannot be used: .* bytes"):
        runs.run(tmp_path)
    assert (tmp_path / "checkpoints/2").exists()


def test_a_damaged_older_seal_does_not_stop_the_run(tmp_path):
    runs.run(tmp_path, run__steps=4)
    damage(tmp_path / "checkpoints/2", "seal truncated")
    assert runs.run(tmp_path, checkpoint__best_metric="fit/error").step == 6
    assert runs.checkpoints(tmp_path) == [4, 6]


BIG = {"width": 64, "batch_size": 8}


def on(count, axis):
    mesh = make_mesh(
        ParallelConfig(data=1, **{axis: count}) if axis != "data" else ParallelConfig(), jax.devices()[:count]
    )
    return mesh, ShardingRules(fsdp_min_size=8)


# Behaviours row 11.
@pytest.mark.parametrize(("before", "after"), [(8, 4), (8, 2), (8, 1), (1, 8), (2, 8)])
def test_resharding(tmp_path, before, after):
    state = toy.build(toy.config(width=16), make_mesh(ParallelConfig())).init(jax.random.key(0))
    mesh, rules = on(before, "fsdp")
    shardings = state_shardings(state, mesh, rules)
    assert before == 1 or any(s.spec != jax.P() for s in jax.tree.leaves(shardings))
    save(tmp_path, 0, jax.device_put(state, shardings))
    mesh, rules = on(after, "fsdp")
    target = state_shardings(state, mesh, rules)
    restored = restore(tmp_path / "0", jax.eval_shape(lambda: state), target)
    runs.assert_same(state, restored)
    assert all(
        x.sharding.is_equivalent_to(s, x.ndim)
        for x, s in zip(jax.tree.leaves(restored), jax.tree.leaves(target))
    )
    assert restored.params["hidden"]["kernel"].sharding.mesh == mesh


@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.slow), 1])
def test_a_run_goes_on_with_fewer_devices(tmp_path, devices):
    """Behaviours row 11, the loss of the next steps included."""
    eight = {"parallel__data": 1, "parallel__fsdp": 8, "width": 16}
    whole = runs.run(tmp_path / "whole", runs.sharded, **eight)
    assert not whole.state.params["hidden"]["kernel"].sharding.is_fully_replicated
    runs.run(tmp_path / "run", runs.sharded, run__steps=3, **eight)
    runs.run(tmp_path / "run", runs.sharded, devices=devices, **{**eight, "parallel__fsdp": devices})
    rows = [row for row in runs.curve(tmp_path / "run") if (row["step"], row["kind"]) != (3, "eval")]
    for row, expected in zip(rows, runs.curve(tmp_path / "whole"), strict=True):
        assert row.pop("kind") == expected.pop("kind")
        assert row == pytest.approx(expected, rel=1e-6)


def test_another_model_is_refused(tmp_path):
    """Behaviours rows 9, 10: by name, before anything is loaded."""
    state = {"params": {"a": {"kernel": jnp.ones((2, 3))}, "b": {"kernel": jnp.ones((3, 2))}}}
    save(tmp_path, 1, state)
    deeper = {"params": {**state["params"], "c": {"kernel": jnp.ones((3, 3))}}}
    shallower = {"params": {"a": state["params"]["a"]}}
    wider = {"params": {**state["params"], "b": {"kernel": jnp.ones((3, 4))}}}
    other = {"params": {**state["params"], "b": {"kernel": jnp.ones((3, 2), jnp.bfloat16)}}}
    for like, message in [
        (deeper, "params/c/kernel is missing from it"),
        (shallower, "params/b/kernel is in it, but not in this run"),
        (wider, r"params/b/kernel is float32\[3, 2\] in it and float32\[3, 4\] in this run"),
        (other, r"params/b/kernel is float32\[3, 2\] in it and bfloat16\[3, 2\]"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            load(tmp_path / "1", like)
        assert "\n" not in str(error.value)


def test_a_run_of_another_width_is_refused(tmp_path):
    runs.run(tmp_path / "a", run__steps=1)
    with pytest.raises(ConfigError, match="params/hidden/bias"):
        runs.run(tmp_path / "b", run__resume_from=str(tmp_path / "a"), width=8)
    with pytest.raises(ConfigError, match="params/hidden/bias"):
        runs.run(tmp_path / "c", run__init_from=str(tmp_path / "a"), width=8)
    for path, message in [("nowhere", "no such folder"), ("c", "no complete checkpoint")]:
        with pytest.raises(ConfigError, match=message):
            runs.run(tmp_path / "d", run__init_from=str(tmp_path / path))


def test_every_kind_of_leaf_survives(tmp_path):
    """Behaviours rows 23, 25, 26."""
    params = {
        "layers": [{"w": jnp.arange(3.0)}, {"w": jnp.ones((2, 0))}],
        "by": {0: jnp.ones(2), 10: (jnp.zeros(()), jnp.ones(1))},
    }
    state = TrainState(
        step=jnp.asarray(7, jnp.int32),
        params=params,
        opt_state=optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params),
        key=jax.random.key(3),
        extra={
            "keys": jax.random.split(jax.random.key(4), (2, 3)),
            "rbg": jax.random.key(5, impl="rbg"),
            "half": jnp.ones(3, jnp.bfloat16),
            "flags": jnp.array([True, False]),
            "bytes": jnp.arange(3, dtype=jnp.uint8),
            "nothing": {},
            "none": None,
        },
    )
    save(tmp_path, 7, state)
    restored = load(tmp_path / "7", state)
    runs.assert_same(state, restored)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, restored)
    draw = jax.random.bernoulli(state.key, 0.5, (64,))
    np.testing.assert_array_equal(draw, jax.random.bernoulli(restored.key, 0.5, (64,)))


def test_a_written_checkpoint_is_complete_before_the_next_one(tmp_path):
    """A run killed between two saves has the first."""
    kept = Checkpoints(tmp_path, CheckpointConfig())
    kept.save(3, {"w": jnp.ones(3)})
    end = time.monotonic() + 30
    while not kept.steps():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert Checkpoints(tmp_path, CheckpointConfig()).incomplete() == []


def test_two_leaves_of_one_path_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="same path"):
        save(tmp_path, 0, {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}})


def test_saving_each_step_with_donation(tmp_path):
    """Behaviours row 22: the state of that step is written, though its buffers are donated to the next."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5 + 1, state), donate_argnums=0)
    state = {"w": jnp.arange(100_000.0), "b": jnp.ones(3)}
    kept = Checkpoints(tmp_path, CheckpointConfig(keep=20))
    expected = {}
    for k in range(20):
        expected[k] = jax.tree.map(lambda x: np.array(x), state)
        kept.save(k, state)
        state = step(state)
    kept.wait()
    assert kept.steps() == list(range(20))
    for k, value in expected.items():
        runs.assert_same(value, jax.tree.map(np.asarray, load(tmp_path / str(k), value)))


# Behaviours rows 19, 20.
@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], "min", 0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "max", 4),
        ([5.0, 1.0, 3.0, 4.0, 2.0], "min", 1),
        ([1.0, math.nan, 0.9, 2.0, 3.0], "min", 2),
        ([math.nan, 1.0, 2.0, 3.0, 4.0], "min", 1),
        ([math.nan, math.inf, 2.0, 3.0, -math.inf], "max", 3),
        ([math.nan] * 5, "min", None),
    ],
)
def test_best_and_newest_are_kept(tmp_path, values, mode, best):
    kept = Checkpoints(tmp_path, CheckpointConfig(keep=2, best_metric="fit/error", best_mode=mode))
    for step, value in enumerate(values):
        kept.save(step, {"x": jnp.full(1, value)}, {"fit/error": value, "other": 0.0})
    kept.wait()
    assert kept.best() == best
    assert kept.steps() == sorted({3, 4} | ({best} if best is not None else set()))
    again = Checkpoints(tmp_path, CheckpointConfig(keep=2, best_metric="fit/error", best_mode=mode))
    assert again.best() == best


def test_the_best_state_of_a_run_is_kept(tmp_path):
    """Behaviours row 19: kept though no periodic save was due there; the run resumes from the newest."""
    errors = {0: 9.0, 2: 1.0, 4: 5.0, 6: 7.0, 8: math.nan}

    def evals():
        from common import schedule
        from common.task import Eval

        return {"fit": Eval(lambda state: {"error": errors[int(state.step)]}, schedule.every(2))}

    options = {
        "evals": evals(),
        "run__save_every": 3,
        "checkpoint__best_metric": "fit/error",
        "checkpoint__keep": 1,
    }
    runs.run(tmp_path, run__steps=6, **options)
    assert runs.checkpoints(tmp_path) == [2, 6]
    longer = runs.run(tmp_path, run__steps=8, **options)
    assert runs.events(tmp_path, "start")[-1]["step"] == 6
    assert runs.checkpoints(tmp_path) == [2, 8]
    assert longer.step == 8
    for typo, known in (("fti/error", "fit"), ("fit/eror", "fit/error"), ("fit", "fit/error")):
        with pytest.raises(ConfigError, match=rf"checkpoint.best_metric='{typo}': must be .*{known}"):
            runs.run(tmp_path / "typo", checkpoint__best_metric=typo)
        assert runs.checkpoints(tmp_path / "typo") == []


def test_a_failed_write_is_an_error(tmp_path, monkeypatch):
    """Behaviours row 21: in the background or at once, and the earlier checkpoint stays."""

    class Failing:
        def result(self):
            raise ValueError("the disk is gone\nlong story")

    kept = save(tmp_path, 1, {"x": jnp.ones(2)})
    monkeypatch.setattr(checkpoint.ocp, "save_async", lambda *args: Failing())
    kept.save(2, {"x": jnp.ones(2)})
    with pytest.raises(
        OSError, match=r"checkpoint .*/2 could not be written .*gone.*; the last complete one is 1"
    ) as error:
        kept.wait()
    assert "\n" not in str(error.value)
    monkeypatch.setattr(checkpoint.ocp, "save_async", lambda *args: 1 / 0)
    with pytest.raises(OSError, match=r"checkpoint .*/3 could not be written"):
        kept.save(3, {"x": jnp.ones(2)})
    monkeypatch.undo()
    kept.save(2, {"x": jnp.ones(2)})
    kept.wait()
    assert kept.steps() == [1, 2]


def test_a_failed_seal_is_an_error(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path, CheckpointConfig())

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seal, "write", full)
    kept.save(1, {"x": jnp.ones(2)})
    with pytest.raises(
        OSError, match=r"checkpoint .*/1 could not be written .*No space left.*there is no earlier one"
    ):
        kept.wait()
    assert kept.steps() == []


def test_a_failed_last_save_is_no_success(tmp_path, monkeypatch):
    """Behaviours row 21: nothing comes after it that would raise its error."""
    write = seal.write

    def full(folder, metrics):
        if folder.name == "6":
            raise OSError(28, "No space left on device")
        write(folder, metrics)

    monkeypatch.setattr(seal, "write", full)
    with pytest.raises(OSError, match=r"/6 could not be written .*No space left.*the last complete one is 4"):
        runs.run(tmp_path)
    assert not is_done(tmp_path)
    assert runs.events(tmp_path, "end") == []
    monkeypatch.undo()
    assert runs.run(tmp_path).reason == "finished"
    assert runs.checkpoints(tmp_path) == [4, 6]


def test_a_failed_write_ends_the_run_with_one_line(tmp_path):
    """Behaviours row 21, through a limit on the size of files."""
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); sys.argv[0] = 'run_toy'; "
        "import runpy; runpy.run_module('tests.common.run_toy', run_name='__main__')"
    )
    width = ["--config.width=20000", "--config.run.save_every=2", "--devices=1"]
    small = runs.run(tmp_path, devices=1, run__steps=2, width=20_000)
    result = subprocess.run(
        [sys.executable, "-c", limited, f"--workdir={tmp_path}", *width],
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stderr
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "checkpoint" in errors[0]
    assert "the last complete one is 2" in errors[0]
    assert "Traceback" not in result.stderr
    assert runs.checkpoints(tmp_path) == [2]
    assert runs.run(tmp_path, devices=1, width=20_000).step == 6
    assert small.step == 2
