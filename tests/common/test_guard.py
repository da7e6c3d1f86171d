"""What happens to a bad update, on the device and on the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import guard, metrics, train_state
from common.config import ConfigError
from common.guard import GuardConfig, Judge, attach
from common.mesh import MODES, ParallelConfig, make_mesh, to_global
from common.parallel import compile_step, pmean, reduce_axis
from common.seeds import take_seed, vmap_seeds
from common.sharding import ShardingRules, state_shardings
from common.task import Task


def walk(axis=None) -> Task:
    """Each update adds the mean of its batch, which is the loss too; `norm` is that of its second column."""

    def init(key):
        return train_state.create({"w": jnp.zeros(())}, {"count": jnp.int32(0)}, key)

    def step(state, batch):
        value, norm = pmean(batch[:, 0].mean(), axis), pmean(batch[:, 1].mean(), axis)
        params = {"w": state.params["w"] + value}
        new = state.replace(
            step=state.step + 1, params=params, opt_state={"count": state.opt_state["count"] + 1}
        )
        return new, {"loss": value, "norm": norm, "mean": metrics.Mean.of(value)}

    return Task(init=init, step=step)


def batch(loss: float, norm: float = 1.0) -> jax.Array:
    return jnp.array([[loss, norm]], jnp.float32)


def run(losses, config: GuardConfig, norms=None, log_every: int = 1, state=None, judge=None):
    """(state, rows of host metrics, judgements of every `log_every` steps)."""
    task = attach(walk(), config)
    state = task.init(jax.random.key(0)) if state is None else state
    judge = judge or Judge(config, state.guard)
    rows, judged, step = [], [], jax.jit(task.step)
    for i, loss in enumerate(losses):
        state, m = step(state, batch(loss, 1.0 if norms is None else norms[i]))
        rows.append(metrics.to_host(m))
        if (i + 1) % log_every == 0:
            judged.append(judge(rows[-1]))
    return state, rows, judged


NAN, INF = float("nan"), float("inf")
SPIKES = GuardConfig(nonfinite="off", spike="skip", window=4, spike_factor=3.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_skip_drops_the_update_and_goes_on(bad):
    state, rows, judged = run([1.0, 2.0, bad, 4.0], GuardConfig(nonfinite="skip"))
    assert float(state.params["w"]) == 7.0
    assert (int(state.step), int(state.opt_state["count"])) == (4, 3)
    assert [row["guard/bad"] for row in rows] == [0, 0, 1, 1]
    assert [j.bad_steps for j in judged] == [[], [], [2], []]
    assert not any(j.stop for j in judged)


def test_alert_applies_the_update_and_reports_it():
    state, _, judged = run([1.0, NAN], GuardConfig(nonfinite="alert"))
    assert np.isnan(state.params["w"])
    assert (judged[1].bad_steps, judged[1].stop) == ([1], "")


def test_stop_drops_the_update_and_says_where():
    state, _, judged = run([1.0, NAN], GuardConfig(nonfinite="stop"))
    assert float(state.params["w"]) == 1.0
    assert "step 1" in judged[1].stop


def test_an_infinite_gradient_norm_with_a_finite_loss_is_bad():
    state, _, judged = run([1.0, 2.0], GuardConfig(nonfinite="skip"), norms=[1.0, INF])
    assert float(state.params["w"]) == 1.0
    assert judged[1].bad_steps == [1]


@pytest.mark.parametrize("mixed", [("alert", "stop"), ("stop", "alert"), ("skip", "stop")])
def test_each_kind_has_its_own_action(mixed):
    config = GuardConfig(nonfinite=mixed[0], spike=mixed[1], window=4)
    state, rows, judged = run([1.0, 1.0, 1.0, 1.0, 50.0], config)
    assert bool(judged[-1].stop) == (mixed[1] == "stop")
    assert float(state.params["w"]) == (54.0 if mixed[1] == "alert" else 4.0)
    assert (rows[-1]["guard/bad"], rows[-1]["guard/stops"]) == (1, mixed[1] == "stop")
    judged = run([1.0, NAN], config)[2]
    assert bool(judged[-1].stop) == (mixed[0] == "stop")


def test_no_spike_before_the_window_is_full():
    assert run([1.0, 1.0, 1.0, 99.0], SPIKES)[1][-1]["guard/bad"] == 0
    assert run([1.0, 1.0, 1.0, 1.0, 99.0], SPIKES)[1][-1]["guard/bad"] == 1


@pytest.mark.parametrize(("value", "bad"), [(2.99, 0), (3.01, 1), (-99.0, 0), (INF, 1)])
def test_a_spike_is_above_the_factor_times_the_median(value, bad):
    rows = run([0.5, 1.0, 1.0, 7.0, value], SPIKES)[1]
    assert rows[-1]["guard/bad"] == bad


def test_negative_values_are_judged_by_their_distance_from_the_median():
    losses = [-2.0, -2.0, -2.1, -1.9]  # as a log-likelihood or an actor's loss
    assert run([*losses, -1.0], SPIKES)[1][-1]["guard/bad"] == 0
    assert run([*losses, 2.1], SPIKES)[1][-1]["guard/bad"] == 1


def test_bad_values_do_not_enter_the_median():
    rows = run([1.0, 1.0, 1.0, 1.0, *[50.0] * 6, 1.0, 50.0], SPIKES)[1]
    assert rows[-1]["guard/bad"] == 7
    config = dataclasses.replace(SPIKES, nonfinite="off")
    assert run([1.0, NAN, 1.0, 1.0, 1.0, 50.0], config)[1][-1]["guard/bad"] == 1


def test_the_window_moves_on():
    assert run([1.0] * 4 + [2.5] * 4 + [6.0], SPIKES)[1][-1]["guard/bad"] == 0


def test_too_many_in_a_row_end_the_run_whatever_the_action():
    config = GuardConfig(nonfinite="alert", max_consecutive=3)
    stops = [j.stop for j in run([1.0, NAN, NAN, 1.0, NAN, NAN, NAN], config)[2]]
    assert stops[:-1] == [""] * 6
    assert "3 bad updates in a row (guard.max_consecutive=3)" in stops[-1]


def test_bad_steps_between_two_log_steps_are_all_reported_once():
    judged = run([NAN, 1.0, NAN, 1.0, 1.0, 1.0, NAN, 1.0], GuardConfig(), log_every=4)[2]
    assert [j.bad_steps for j in judged] == [[0, 2], [6]]
    many = run([NAN, NAN, *[NAN, 1.0] * 5], GuardConfig(), log_every=12)[2]
    assert many[0].bad_steps == [0, 1, 2, 4, 6, 8, 10][-8:]


def test_a_restart_does_not_report_again_what_the_state_counts():
    config = GuardConfig(nonfinite="stop")
    state, _, judged = run([1.0, NAN], config)
    assert judged[-1].stop
    state, rows, judged = run([1.0, 1.0], config, state=state, judge=Judge(config, state.guard))
    assert [(j.bad_steps, j.stop) for j in judged] == [([], ""), ([], "")]
    assert rows[-1]["guard/bad"] == 1
    judged = run([NAN], config, state=state, judge=Judge(config, state.guard))[2]
    assert (judged[0].bad_steps, judged[0].stop) == ([4], "bad update at step 4")


def test_off_leaves_the_task_and_the_state_alone():
    task = walk()
    config = GuardConfig(nonfinite="off", spike="off")
    assert attach(task, config) is task
    assert Judge(config, {})({"loss": 1.0}).bad_steps == []


def test_the_key_and_the_structure_of_the_state_stay():
    task = attach(walk(), GuardConfig())
    state = task.init(jax.random.key(3))
    new = jax.jit(task.step)(state, batch(NAN))[0]
    assert jax.tree.structure(new) == jax.tree.structure(state)
    np.testing.assert_array_equal(jax.random.key_data(new.key), jax.random.key_data(state.key))
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("name", ["loss", "mean"])
def test_a_plain_scalar_or_a_mergeable_metric_can_be_watched(name):
    rows = run([1.0] * 4 + [99.0], dataclasses.replace(SPIKES, metric=name))[1]
    assert rows[-1]["guard/bad"] == 1


def trace(config: GuardConfig, extra=None) -> None:
    plain = walk()
    step = plain.step if extra is None else lambda s, b: (plain.step(s, b)[0], extra)
    task = attach(dataclasses.replace(plain, step=step), config)
    jax.eval_shape(lambda: task.step(task.init(jax.random.key(0)), batch(1.0)))


def test_a_missing_metric_is_refused_while_the_step_is_traced():
    with pytest.raises(ConfigError, match=r"guard.metric='los': must be one of \['loss', 'mean', 'norm'\]"):
        trace(GuardConfig(metric="los"))


@pytest.mark.parametrize("value", [jnp.zeros(3), metrics.Moments.of(jnp.zeros(3))])
def test_a_metric_of_several_values_cannot_be_watched(value):
    with pytest.raises(ConfigError, match=r"guard.metric='loss': must be a metric with one value"):
        trace(GuardConfig(), {"loss": value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonfinite", "rollback"),
        ("spike", "on"),
        ("spike_factor", 1.0),
        ("spike_factor", NAN),
        ("window", 3),
        ("max_consecutive", 0),
    ],
)
def test_impossible_fields_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"guard.{field}="):
        attach(walk(), dataclasses.replace(GuardConfig(), **{field: value}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [NAN, 1e6])
def test_a_bad_shard_is_dropped_on_every_device(mode, bad):
    """A NaN or a spike in the data of one of four devices: no hang, the same decision everywhere."""
    config = GuardConfig(nonfinite="skip", spike="skip", window=4)
    task = attach(walk(reduce_axis(mode)), config)
    mesh = make_mesh(ParallelConfig(mode=mode), jax.devices()[:4])
    state = task.init(jax.random.key(0))
    shardings = state_shardings(state, mesh, ShardingRules())
    good = np.ones((8, 2), np.float32)
    poisoned = good.copy()
    poisoned[5, 0] = bad
    step = compile_step(
        task.step,
        mesh,
        mode,
        jax.eval_shape(task.init, jax.random.key(0)),
        shardings,
        jax.eval_shape(lambda: good),
    )
    state = jax.device_put(state, shardings)
    for data in (good, good, good, good, poisoned, good):
        state, m = step(state, to_global(data, mesh))
    for value, expected in ((state.params["w"], 5.0), (m["guard/bad"], 1), (state.opt_state["count"], 5)):
        copies = [float(shard.data) for shard in value.addressable_shards]
        assert copies == [expected] * 4


def test_each_seed_is_judged_alone():
    config = GuardConfig(nonfinite="skip")
    task = vmap_seeds([attach(walk(), config)] * 3)
    state = task.init(jax.random.split(jax.random.key(0), 3))
    judge, step = Judge(config, state.guard), jax.jit(task.step)
    judged = []
    for bad in ((), (1,), (), (0, 1), ()):
        data = np.ones((3, 1, 2), np.float32)
        data[list(bad), 0, 0] = NAN
        state, m = step(state, data)
        judged.append(judge(metrics.to_host(m)).bad_steps)
    assert judged == [[], [1], [], [3], []]
    np.testing.assert_array_equal(state.params["w"], [4.0, 3.0, 5.0])
    assert int(take_seed(state, 1).guard.bad) == 2
    assert Judge(config, state.guard)(metrics.to_host(m)).bad_steps == []


def test_counters_are_the_ones_a_row_and_the_judge_read():
    assert set(guard.COUNTERS) <= {field.name for field in dataclasses.fields(guard.GuardState)}
