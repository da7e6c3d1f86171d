"""A linear-regression task small enough to compile in a moment, with noise, minibatches and evals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import schedule, train_state
from common.batches import array_batches
from common.config import view
from common.defaults import base_config
from common.gradients import mean_value_and_grad
from common.optim import OptimConfig, make_optimizer
from common.parallel import reduce_axis, row_ids, row_keys
from common.task import Eval, Task
from common.train_state import TrainState

DIM, ROWS = 6, 40


def config(**overrides) -> ConfigDict:
    c = base_config("toy")
    c.run.steps, c.run.log_every, c.run.save_every = 6, 1, 2
    c.batch_size, c.width, c.nan_at = 8, 4, -1
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        if key:
            c[section][key] = value
        else:
            c[section] = value
    return c.lock()


def data(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, DIM)).astype(np.float32)
    return {
        "x": x,
        "y": (x @ rng.normal(size=(DIM, 1))).astype(np.float32),
        "id": np.arange(rows, dtype=np.int32),
    }


def build(c: ConfigDict, mesh: Mesh, evals=None, arrays=None) -> Task:
    optim = view(c, OptimConfig, "optim")
    optimizer = make_optimizer(optim, max(c.run.steps, 1))
    axis = reduce_axis(c.parallel.mode)
    arrays = data(seed=c.run.seed) if arrays is None else arrays

    def init(key: jax.Array) -> TrainState:
        keys = jax.random.split(key)
        params = {
            "hidden": {
                "kernel": jax.random.normal(keys[0], (DIM, c.width)) / DIM**0.5,
                "bias": jnp.zeros(c.width),
            },
            "out": {"kernel": jax.random.normal(keys[1], (c.width, 1)) / c.width**0.5},
        }
        return train_state.create(params, optimizer.init(params), key)

    def predict(params, x):
        return (
            jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
            @ params["out"]["kernel"]
        )

    def sum_loss(params, batch):
        noise = jax.vmap(lambda k: jax.random.normal(k, (DIM,)))(batch["key"])
        errors = jnp.square(predict(params, batch["x"] + 0.1 * noise) - batch["y"])
        return errors.sum(), (jnp.asarray(errors.size, jnp.float32), {})

    def step(state, batch):
        keys = row_keys(train_state.step_key(state, "noise"), row_ids(batch["x"].shape[0], axis))
        poison = jnp.where(state.step == c.nan_at, jnp.nan, 0.0)
        batch = {"x": batch["x"] + poison, "y": batch["y"], "key": keys}
        loss, grads, _ = mean_value_and_grad(sum_loss, state.params, batch, optim.microbatches, axis)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss}

    def fit_error(state):
        return {"error": jnp.mean(jnp.square(predict(state.params, arrays["x"]) - arrays["y"]))}

    default = {"fit": Eval(fit_error, schedule.every(2))}
    return Task(
        init=init,
        step=step,
        batches=array_batches(arrays, c.batch_size, c.run.seed, "batch_size"),
        evals=default if evals is None else evals,
        examples_per_step=c.batch_size,
    )
