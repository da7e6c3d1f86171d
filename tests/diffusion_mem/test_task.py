import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import guard, train_state
from common.config import ConfigError, from_dataclass, override, view
from common.defaults import base_config
from common.loop import fit
from common.mesh import ParallelConfig, make_mesh, replicated, to_global
from common.optim import OptimConfig, learning_rate
from common.parallel import compile_step
from common.seeds import take_seed, vmap_seeds
from common.sharding import ShardingRules, state_shardings
from common.start import batch_shapes, run_key
from common.writer import read_metrics
from diffusion_mem import data, fid, loss, memorization, sampler
from diffusion_mem.evaluate import EvaluateConfig
from diffusion_mem.memorization import gap_ratio
from diffusion_mem.task import DataConfig, ModelConfig, ProcessConfig, build

TIMES = ("time", "attempt", "steps_per_second", "examples_per_second")


def config_of(**changes):
    """A small locked config; `changes` name keys with __ for the dot."""
    config = base_config("diffusion_mem")
    config.data = from_dataclass(DataConfig(n=32, batch_size=16))
    config.process = from_dataclass(ProcessConfig())
    config.model = from_dataclass(ModelConfig(width=32, blocks=1))
    config.evaluate = from_dataclass(
        EvaluateConfig(milestones=2, first=3, samples=16, sampler_steps=4, gallery=2)
    )
    config.run.steps, config.run.log_every = 6, 1
    override(config, {key.replace("__", "."): value for key, value in changes.items()})
    return config.lock()


def mesh_of(config, devices=None):
    return make_mesh(view(config, ParallelConfig, "parallel"), jax.devices()[:devices])


def task_of(config, devices=None):
    return build(config, mesh_of(config, devices))


def after(steps, devices=8, fsdp_min_size=None, **changes):
    """(state, losses, shardings) after so many compiled steps."""
    config = config_of(**changes)
    mesh = mesh_of(config, devices)
    task = build(config, mesh)
    if fsdp_min_size:
        task = dataclasses.replace(task, rules=ShardingRules(fsdp_min_size=fsdp_min_size))
    key = run_key(config.run)
    shapes = jax.eval_shape(task.init, key)
    shardings = state_shardings(shapes, mesh, task.rules)
    state = jax.jit(task.init, out_shardings=shardings)(key)
    batch = batch_shapes(task, mesh, 0)
    compiled = compile_step(task.step, mesh, config.parallel.mode, shapes, shardings, batch, task.batch_axis)
    losses, batches = [], task.batches(0)
    for _ in range(steps):
        state, metrics = compiled(state, to_global(next(batches), mesh, task.batch_axis))
        losses.append(float(metrics["loss"]))
    return state, losses, shardings


def assert_close(a, b, tolerance):
    """Relative to the largest entry of each leaf."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        scale = max(np.abs(y).max(), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


def moved(**kwargs):
    """SGD: Adam would blow up rounding in gradients near zero to whole steps."""
    return after(5, optim__name="sgd", optim__lr=0.05, **kwargs)


@pytest.fixture(scope="module")
def one_device():
    return moved(devices=1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("8 along data", {}),
        ("8 along fsdp", {"parallel__data": 1, "parallel__fsdp": 8}),
        ("2 along data, 4 along fsdp", {"parallel__data": 2, "parallel__fsdp": 4}),
        ("shard_map", {"parallel__mode": "shard_map"}),
        ("pmap", {"parallel__mode": "pmap"}),
        ("two microbatches", {"optim__microbatches": 2}),
        (
            "four microbatches on 4 devices in shard_map",
            {"optim__microbatches": 4, "parallel__mode": "shard_map"},
        ),
    ],
)
def test_devices_modes_and_accumulation_do_not_change_the_result(name, changes, one_device):
    devices = 4 if "4 devices" in name else 8
    state, losses, shardings = moved(devices=devices, fsdp_min_size=64, **changes)
    if changes.get("parallel__fsdp", 1) > 1:
        assert any("fsdp" in s.spec for s in jax.tree.leaves(shardings.params))
        assert any("fsdp" in s.spec for s in jax.tree.leaves(shardings.opt_state))
    expected, expected_losses, _ = one_device
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_close(state.params, expected.params, 1e-6)


def test_adam_agrees_between_one_and_eight_devices():
    state, losses, _ = after(5, devices=8)
    expected, expected_losses, _ = after(5, devices=1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_close(state.params, expected.params, 1e-4)


def test_loss_starts_at_one_and_falls_in_training():
    _, losses, _ = after(60, devices=1, data__n=64, data__batch_size=64, optim__lr=3e-3)
    # The network starts at zero, so the loss is the mean of squares of normal draws: 64 images x 64 pixels.
    assert losses[0] == pytest.approx(1, abs=5 * np.sqrt(2 / 64**2))
    assert np.mean(losses[-10:]) < 0.7


def test_three_steps_restored_and_three_more_are_six_bit_for_bit(tmp_path):
    def run(folder, steps):
        config = config_of(run__steps=steps, run__save_every=3)
        task = dataclasses.replace(task_of(config_of()), evals={})  # its schedule is that of six steps
        return fit(task, config, str(tmp_path / folder), mesh_of(config)).state

    run("parts", 3)
    parts, whole = run("parts", 6), run("whole", 6)
    assert int(parts.step) == 6
    for x, y in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    curves = [
        [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(tmp_path / name)]
        for name in ("parts", "whole")
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 6


def test_seeds_side_by_side_are_the_runs_alone():
    """SGD: Adam would blow up rounding in gradients near zero to whole steps."""
    configs = [config_of(run__seed=seed, optim__name="sgd", optim__lr=0.05) for seed in (3, 4)]
    tasks = [task_of(config) for config in configs]
    both = vmap_seeds(tasks)
    state = both.init(jnp.stack([jax.random.key(3), jax.random.key(4)]))
    batches, step = both.batches(0), jax.jit(both.step)
    singles = [task.init(jax.random.key(seed)) for task, seed in zip(tasks, (3, 4), strict=True)]
    streams = [task.batches(0) for task in tasks]
    for _ in range(3):
        state, metrics = step(state, next(batches))
        results = [
            jax.jit(task.step)(one, next(stream))
            for task, one, stream in zip(tasks, singles, streams, strict=True)
        ]
        singles = [one for one, _ in results]
        np.testing.assert_allclose(metrics["loss"], [float(m["loss"]) for _, m in results], rtol=1e-5)
    for i, one in enumerate(singles):
        assert_close(take_seed(state, i).params, one.params, 1e-4)
    together = both.evals["sample"].fn(state)
    for i, (task, one) in enumerate(zip(tasks, singles, strict=True)):
        alone = task.evals["sample"].fn(one)
        assert together.keys() == alone.keys()
        np.testing.assert_allclose(together["frechet"][i], alone["frechet"], rtol=1e-3)
        np.testing.assert_array_equal(together["nearest"][i], alone["nearest"])


def test_logged_learning_rate_is_that_of_the_update(tmp_path):
    """Behaviours row 40: with accumulation, and with an update that the guard drops."""
    schedule = {"optim__schedule": "cosine", "optim__warmup_steps": 2, "optim__microbatches": 2}
    config = config_of(run__steps=8, **schedule)

    def batches(start):
        for step, batch in enumerate(task.batches(start), start=start):
            yield {"image": np.full_like(batch["image"], np.nan) if step == 5 else batch["image"]}

    task = dataclasses.replace(task_of(config), evals={})
    expected = [float(learning_rate(view(config, OptimConfig, "optim"), 8)(k)) for k in range(8)]
    fit(task, config, str(tmp_path / "whole"), mesh_of(config))
    rows = read_metrics(tmp_path / "whole", kind="train")
    np.testing.assert_allclose([row["learning_rate"] for row in rows], expected, rtol=1e-6)
    assert rows[0]["learning_rate"] == pytest.approx(5e-4)
    assert rows[-1]["learning_rate"] == 0
    guarded = guard.attach(dataclasses.replace(task, batches=batches), guard.GuardConfig())
    fit(guarded, config, str(tmp_path / "dropped"), mesh_of(config))
    rates = [row["learning_rate"] for row in read_metrics(tmp_path / "dropped", kind="train")]
    np.testing.assert_allclose(rates, [*expected[:6], *expected[5:7]], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__blocks": 2}, "params/block1_down/bias is missing from it"),
        ({"model__width": 64}, r"params/block0_down/bias is float32\[32\] in it and float32\[64\]"),
    ],
)
@pytest.mark.parametrize("source", ["resume_from", "init_from"])
def test_checkpoint_of_another_network_is_refused(tmp_path, changes, message, source):
    """Behaviours row 9."""

    def run(folder, **changes):
        config = config_of(run__steps=1, evaluate__milestones=1, **changes)
        return fit(task_of(config), config, str(tmp_path / folder), mesh_of(config))

    run("saved")
    with pytest.raises(ConfigError, match=message):
        run("other", **changes, **{f"run__{source}": str(tmp_path / "saved")})
    assert not list(tmp_path.glob("other/checkpoints/*"))


def images_of(**changes):
    """The training images of a config, as a set of rows."""
    config = config_of(data__batch_size=0, **changes)
    return {row.tobytes() for row in next(task_of(config).batches(0))["image"]}


def test_seeds_have_their_own_images_if_asked():
    assert images_of(run__seed=0) == images_of(run__seed=0)
    assert images_of(run__seed=0) != images_of(run__seed=1)
    assert images_of(run__seed=0, data__per_seed=False) == images_of(run__seed=1, data__per_seed=False)
    held_out = {row.tobytes() for row in data.load("digits").test}
    for seed in (0, 1):
        assert not images_of(run__seed=seed, data__n=1280) & held_out


def test_subsets_of_one_size_share_no_image():
    first, second = images_of(data__index=0), images_of(data__index=1)
    assert len(first) == len(second) == 32
    assert not first & second


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"data__batch_size": 16}, 16),
        ({"data__batch_size": 64}, 32),
        ({"data__batch_size": 0}, 32),
        ({"data__batch_size": 64, "data__fill_batch": True}, 64),
    ],
)
def test_batch_size_is_the_smaller_of_the_asked_and_n_unless_it_is_to_be_filled(changes, size, devices):
    task = task_of(config_of(**changes), devices)
    assert len(next(task.batches(0))["image"]) == task.examples_per_step == size


def test_filled_batch_holds_every_image_equally_often_with_its_own_noise():
    task = task_of(config_of(data__batch_size=64, data__fill_batch=True))
    rows = [row.tobytes() for row in next(task.batches(0))["image"]]
    assert {rows.count(row) for row in rows} == {2}
    keys = jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(64)))
    assert len(np.unique(keys, axis=0)) == 64


def test_evaluation_is_repeatable_and_leaves_the_state_alone():
    task = task_of(config_of())
    state = task.init(jax.random.key(0))
    before = jax.tree.map(np.asarray, state.params)
    for name, evaluation in task.evals.items():
        first, second = evaluation.fn(state), evaluation.fn(state)
        assert first.keys() == second.keys(), name
        for key in first:
            np.testing.assert_array_equal(first[key], second[key])
        later = evaluation.fn(state.replace(step=state.step + 7))  # the same noise at all times
        np.testing.assert_array_equal(list(map(np.sum, later.values())), list(map(np.sum, first.values())))
        other = evaluation.fn(task.init(jax.random.key(1)))
        assert any(np.any(np.asarray(other[key]) != np.asarray(first[key])) for key in first)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), before)


def test_evaluation_takes_any_number_of_images_on_any_number_of_devices():
    """Behaviours rows 51, 53: 19 images do not divide over 8 devices, and all of them count."""
    losses = []
    for devices in (1, 8):
        config = config_of(data__n=19, model__width=16)
        task, mesh = task_of(config, devices), mesh_of(config, devices)
        state = jax.device_put(task.init(jax.random.key(0)), replicated(mesh))
        head = state.params["head"] | {"bias": jnp.ones_like(state.params["head"]["bias"])}
        losses.append(task.evals["loss"].fn(state.replace(params={**state.params, "head": head})))
        assert task.evals["sample"].fn(state)["nearest"].shape == (2, 8, 8, 1)
    for name in ("train", "test"):
        np.testing.assert_allclose(losses[0][name], losses[1][name], rtol=1e-6)


def test_evaluation_compiles_once_for_all_milestones_and_seeds():
    compiled = (sampler._sample_rows, memorization._gap_ratio, loss.fixed_time_loss, fid._random_conv)
    for function in compiled:
        function.clear_cache()
    for seed in (0, 1):
        task = task_of(config_of(run__seed=seed))
        state, step = task.init(jax.random.key(seed)), jax.jit(task.step)
        for _, batch in zip(range(2), task.batches(0), strict=False):
            for evaluation in task.evals.values():
                evaluation.fn(state)
            state, _ = step(state, batch)
    # Train and test set have different sizes.
    assert [function._cache_size() for function in compiled] == [1, 1, 2, 1]


def test_evaluation_period_does_not_change_training():
    states = []
    for milestones in (1, 4):
        config = config_of(evaluate__milestones=milestones)
        task = task_of(config)
        state, step, batches = task.init(jax.random.key(0)), jax.jit(task.step), task.batches(0)
        for k in range(4):
            for evaluation in task.evals.values():
                if evaluation.when(k, 6):
                    evaluation.fn(state)
            state, _ = step(state, next(batches))
        states.append(state)
    jax.tree.map(np.testing.assert_array_equal, states[0].params, states[1].params)


def test_untrained_losses_are_one_and_the_gallery_shows_real_neighbours(tmp_path):
    config = config_of()
    fit(task_of(config), config, str(tmp_path), mesh_of(config))
    rows = read_metrics(tmp_path, kind="eval")
    assert [row["step"] for row in rows] == [3, 6]
    assert {name for row in rows for name in row if "/" in name} == {
        "loss/train",
        "loss/test",
        "sample/frechet",
        "sample/memorized",
        "sample/memorized_low",
        "sample/memorized_high",
    }
    with np.load(tmp_path / "artifacts" / "sample_6.npz", allow_pickle=False) as kept:
        samples, nearest = kept["samples"], kept["nearest"]
    assert samples.shape == nearest.shape == (2, 8, 8, 1)
    assert samples.dtype == np.float32
    assert np.abs(samples).max() <= 1
    train = np.stack([np.frombuffer(row, np.float32).reshape(8, 8, 1) for row in sorted(images_of())])
    np.testing.assert_array_equal(nearest, train[gap_ratio(samples, train).nearest])
    task = task_of(config)
    losses = task.evals["loss"].fn(task.init(jax.random.key(0)))
    np.testing.assert_allclose([losses["train"], losses["test"]], 1, atol=0.05)


def test_diverged_model_has_nan_metrics_not_a_memorized_fraction_of_zero():
    task = task_of(config_of())
    state = task.init(jax.random.key(0))
    broken = state.replace(params=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params))
    measured = task.evals["sample"].fn(broken)
    for name in ("frechet", "memorized", "memorized_low", "memorized_high"):
        assert np.isnan(measured[name]), name
    assert np.isnan(measured["samples"]).all()  # not written as black
    assert all(np.isnan(value) for value in task.evals["loss"].fn(broken).values())


def test_one_bad_image_in_a_batch_is_skipped_by_the_guard():
    config = config_of()
    task = guard.attach(task_of(config), guard.GuardConfig())
    state, step, batches = task.init(jax.random.key(0)), jax.jit(task.step), task.batches(0)
    for i in range(3):
        batch = {"image": next(batches)["image"].copy()}
        if i == 1:
            batch["image"][5] = np.nan
        before, (state, metrics) = state, step(state, batch)
        assert np.isfinite(metrics["loss"]) == (i != 1)
        unchanged = all(
            np.array_equal(x, y)
            for x, y in zip(jax.tree.leaves(before.params), jax.tree.leaves(state.params), strict=True)
        )
        assert unchanged == (i == 1)
    assert (int(state.step), int(state.guard.bad)) == (3, 1)


@pytest.mark.slow
def test_training_long_on_few_images_is_seen_as_memorization():
    config = config_of(
        data__n=16, data__batch_size=128, data__fill_batch=True, model__width=256, model__blocks=3,
        evaluate__samples=64, evaluate__sampler_steps=25,
    )  # fmt: skip
    task = task_of(config, 1)
    state, step, batches = task.init(jax.random.key(0)), jax.jit(task.step, donate_argnums=0), task.batches(0)
    fractions = []
    for k in range(2001):
        if k in (20, 2000):
            measured = task.evals["sample"].fn(state)
            fractions.append((measured["memorized_low"], measured["memorized"], measured["memorized_high"]))
        state, _ = step(state, next(batches))
    assert fractions[0][1] < 0.1
    assert fractions[1][1] > 0.5
    for low, value, high in fractions:
        assert low <= value <= high


def test_streams_of_a_step_are_its_own():
    """Two steps on one batch differ in their noise; a step repeated does not."""
    task = task_of(config_of())
    state, batch, step = task.init(jax.random.key(0)), next(task.batches(0)), jax.jit(task.step)
    loss = float(step(state, batch)[1]["loss"])
    assert loss == float(step(state, batch)[1]["loss"])
    assert loss != float(step(state.replace(step=state.step + 1), batch)[1]["loss"])
    key = train_state.step_key(state, "noise")
    assert not jnp.array_equal(
        jax.random.key_data(key), jax.random.key_data(train_state.step_key(state, "samples"))
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__batch_size": -1}, "data.batch_size=-1"),
        ({"data__batch_size": 20}, "data.batch_size=20: must be a multiple of 8"),
        ({"data__n": 12, "data__batch_size": 0}, "data.batch_size=12: must be a multiple of 8"),
        ({"optim__microbatches": 4}, "optim.microbatches=4"),
        ({"process__num_steps": 0}, "num_steps=0"),
        ({"process__beta_max": 1.0}, "beta_max"),
        ({"model__blocks": 0}, "model.blocks=0"),
        ({"evaluate__samples": 1}, "evaluate.samples=1"),
        ({"evaluate__threshold": 1.5}, "evaluate.threshold=1.5"),
        ({"evaluate__loss_time": 0.0}, "evaluate.loss_time=0.0"),
    ],
)
def test_field_that_cannot_be_used_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        task_of(config_of(**changes))
