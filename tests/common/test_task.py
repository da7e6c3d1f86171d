"""The contract of a task, held by the toy task: pure, repeatable, and blind to who calls it."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from common import schedule
from common.mesh import ParallelConfig, make_mesh
from common.sharding import ShardingRules
from common.task import Eval, Task
from tests.common import toy


@pytest.fixture
def task() -> Task:
    return toy.build(toy.config(), make_mesh(ParallelConfig(), jax.devices()[:1]))


def test_a_task_needs_only_init_and_step():
    task = Task(init=lambda key: key, step=lambda state, batch: (state, {}))
    assert (task.batches, task.examples_per_step, task.batch_axis) == (None, 0, 0)
    assert (dict(task.evals), dict(task.fallbacks), task.rules) == ({}, {}, ShardingRules())
    other = Task(init=task.init, step=task.step)
    assert task.evals is not other.evals


def test_tasks_and_evals_are_frozen(task):
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.step = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        Eval(lambda state: {}, schedule.never()).when = schedule.every(1)


def test_init_works_on_shapes_and_is_a_function_of_the_key(task, key):
    shapes = jax.eval_shape(task.init, key)
    first, second = task.init(key), jax.jit(task.init)(key)
    assert jax.tree.structure(first) == jax.tree.structure(shapes)
    assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(first)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), first.params, second.params)


def test_the_same_state_and_batch_give_the_same_update(task, key):
    state, batch, step = task.init(key), next(task.batches(2)), jax.jit(task.step)
    (first, m1), (second, m2) = step(state, batch), step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, (first.params, m1), (second.params, m2))
    assert int(first.step) == int(state.step) + 1
    later = step(state.replace(step=state.step + 1), batch)[1]
    assert float(later["loss"]) != float(m1["loss"])  # other noise


def test_an_eval_does_not_change_the_state(task, key):
    state = task.init(key)
    before = jax.tree.map(np.array, state.params)
    task.evals["fit"].fn(state)
    jax.tree.map(np.testing.assert_array_equal, before, state.params)


def test_batches_at_a_step_do_not_depend_on_the_start(task):
    for a, b in zip(itertools.islice(task.batches(0), 3, 6), task.batches(3), strict=False):
        jax.tree.map(np.testing.assert_array_equal, a, b)
