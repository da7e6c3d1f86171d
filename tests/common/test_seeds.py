"""Side-by-side seeds are separate runs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from common import guard, schedule, train_state
from common.config import ConfigError, view
from common.guard import GuardConfig
from common.mesh import ParallelConfig, make_mesh
from common.metrics import to_host
from common.seeds import take_seed, vmap_seeds
from common.sharding import ShardingRules, state_shardings
from common.start import RunConfig, run_key
from common.task import Eval, Task
from tests.common import toy

SEEDS = (3, 4, 5)


def alone(seed: int) -> tuple[Task, jax.Array]:
    c = toy.config(run__seed=seed, nan_at=2)
    task = toy.build(c, make_mesh(ParallelConfig(), jax.devices()[:1]))
    return guard.attach(task, GuardConfig(nonfinite="skip")), run_key(view(c, RunConfig, "run"))


def train(task: Task, key: jax.Array, steps: int = 5):
    state, step, rows = task.init(key), jax.jit(task.step), []
    for batch in itertools.islice(task.batches(0), steps):
        state, m = step(state, batch)
        rows.append(to_host(m))
    return state, rows, task.evals["fit"].fn(state)


def stacked_key(count: int) -> jax.Array:
    keys = run_key(RunConfig(seed=SEEDS[0], num_seeds=count))
    return keys if count > 1 else keys[None]


def assert_same_state(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_seeds_side_by_side_equal_separate_runs(count):
    """With the guard, which drops step 2, and the evals."""
    together = vmap_seeds([alone(seed)[0] for seed in SEEDS[:count]])
    state, rows, evaluated = train(together, stacked_key(count))
    assert int(state.step) == 5
    assert together.examples_per_step == count * alone(SEEDS[0])[0].examples_per_step
    for i, seed in enumerate(SEEDS[:count]):
        own_state, own_rows, own_evaluated = train(*alone(seed))
        assert_same_state(take_seed(state, i), own_state)
        assert int(own_state.guard.bad) == 1
        for name in own_rows[0]:
            np.testing.assert_allclose(
                [row[name][i] for row in rows], [row[name] for row in own_rows], rtol=1e-5, atol=1e-5
            )
        assert evaluated["error"].shape == (count,)
        np.testing.assert_allclose(evaluated["error"][i], own_evaluated["error"], rtol=1e-5)
    losses = [tuple(row["loss"]) for row in rows[:2]]
    assert all(len(set(row)) == count for row in losses)  # seeds differ


def test_batches_of_a_seed_are_those_it_has_alone_from_any_step():
    tasks = [alone(seed)[0] for seed in SEEDS]
    batch = next(vmap_seeds(tasks).batches(3))
    for i, task in enumerate(tasks):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), batch, next(task.batches(3)))


def chain() -> Task:
    """Makes its own data: a random walk whose environment is in `extra`."""

    def init(key):
        return train_state.create({"w": jax.random.normal(key)}, (), key, extra={"env": jnp.zeros(2)})

    def step(state, batch):
        assert batch is None
        env = state.extra["env"] + jax.random.normal(train_state.step_key(state, "env"), (2,))
        return state.replace(step=state.step + 1, extra={"env": env}), {"loss": env.sum()}

    def positions(state):
        return {"mean": float(state.extra["env"].mean()), "path": np.asarray(state.extra["env"])}

    rules = ShardingRules(rules=(("extra/env", ("fsdp",)),))
    return Task(init=init, step=step, evals={"positions": Eval(positions, schedule.every(1))}, rules=rules)


def test_a_step_that_makes_its_own_data():
    together, keys = vmap_seeds([chain()] * 3), jax.random.split(jax.random.key(0), 3)
    assert together.batches is None
    state, step = together.init(keys), jax.jit(together.step)
    for _ in range(4):
        state, m = step(state, None)
    assert m["loss"].shape == (3,)
    result = together.evals["positions"].fn(state)
    assert (result["mean"].shape, result["path"].shape) == ((3,), (3, 2))
    for i in range(3):
        own = chain().init(keys[i])
        for _ in range(4):
            own = jax.jit(chain().step)(own, None)[0]
        assert_same_state(take_seed(state, i), own)
        np.testing.assert_allclose(result["path"][i], own.extra["env"], rtol=1e-5)


def test_sharding_rules_leave_the_seed_axis_whole():
    together = vmap_seeds([chain()] * 2)
    mesh = make_mesh(ParallelConfig(data=1, fsdp=2), jax.devices()[:2])
    shapes = jax.eval_shape(together.init, jax.random.split(jax.random.key(0), 2))
    assert state_shardings(shapes, mesh, together.rules).extra["env"].spec == P(None, "fsdp")


def test_no_seed_is_refused():
    with pytest.raises(ConfigError, match=r"run.num_seeds=0"):
        vmap_seeds([])
