"""Deterministic DDIM sampling: exact step counts, in blocks whose size does not change the samples."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.config import require
from common.parallel import row_keys
from diffusion_mem.process import NoisePredictor, Process


def ddim_timesteps(num_train_steps: int, num_steps: int) -> np.ndarray:
    """Exactly `num_steps` strictly decreasing step indices, evenly spaced from T-1 down to 1.

    Step 0 is never trained (see `epsilon_loss`), so the network is asked there only where there is no other
    way: for num_steps = T. A single step is T-1. After the last of them the sampler goes to alpha-bar 1, no
    noise at all.
    """
    require(
        1 <= num_steps <= num_train_steps,
        "num_steps",
        num_steps,
        f"between 1 and the {num_train_steps} trained steps",
    )
    last = 1 if num_steps < num_train_steps else 0
    # Whole numbers throughout: rounded floats may repeat an index.
    offsets = np.arange(num_steps) * (num_train_steps - 1 - last) // max(num_steps - 1, 1)
    return (num_train_steps - 1 - offsets).astype(np.int32)


def ddim(
    apply_fn: NoisePredictor, params: Any, process: Process, x_init: jax.Array, num_steps: int
) -> jax.Array:
    """Integrates the reverse process from `x_init` at step T-1 to clean data (DDIM, eta = 0).

    Args:
      x_init: (B, ...) noise, standard normal.
      num_steps: network evaluations, 1 to T.

    Returns:
      Samples in x_init's shape. A network that always returns the true noise gives back the true x_0.
    """
    t = ddim_timesteps(process.num_steps, num_steps)
    signal, sigma = process.signal[t], process.sigma[t]
    next_signal = jnp.append(signal[1:], jnp.ones(1))
    next_sigma = jnp.append(sigma[1:], jnp.zeros(1))

    def step(x: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        t, signal, sigma, next_signal, next_sigma = inputs
        noise = apply_fn(params, x, jnp.full(x.shape[0], t))
        x0 = (x - sigma * noise) / signal
        return next_signal * x0 + next_sigma * noise, None

    return jax.lax.scan(step, x_init, (jnp.asarray(t), signal, sigma, next_signal, next_sigma))[0]


def sample(
    apply_fn: NoisePredictor,
    params: Any,
    process: Process,
    key: jax.Array,
    num_samples: int,
    shape: tuple[int, ...],
    num_steps: int,
    batch_size: int,
) -> jax.Array:
    """Draws `num_samples` samples of `shape` by DDIM, `batch_size` at a time.

    Sample i starts from noise of fold_in(key, i), so it does not depend on `batch_size` or `num_samples` (up
    to float rounding). The last block is filled up and cut: one compilation per `apply_fn` object, shape and
    number of steps.

    Returns:
      (num_samples, *shape) float32.
    """
    require(num_samples >= 1, "num_samples", num_samples, "at least 1")
    require(batch_size >= 1, "batch_size", batch_size, "at least 1")
    batch_size = min(batch_size, num_samples)
    blocks = [
        _sample_rows(apply_fn, params, process, key, start + jnp.arange(batch_size), shape, num_steps)
        for start in range(0, num_samples, batch_size)
    ]
    return jnp.concatenate(blocks)[:num_samples]


@partial(jax.jit, static_argnames=("apply_fn", "shape", "num_steps"))
def _sample_rows(
    apply_fn: NoisePredictor,
    params: Any,
    process: Process,
    key: jax.Array,
    rows: jax.Array,
    shape: tuple[int, ...],
    num_steps: int,
) -> jax.Array:
    x_init = jax.vmap(lambda k: jax.random.normal(k, shape))(row_keys(key, rows))
    return ddim(apply_fn, params, process, x_init, num_steps)
