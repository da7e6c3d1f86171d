"""The training loss (paper eq. 4), and the loss at one noise level that compares train with test (Fig. 2)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.config import require
from common.parallel import row_keys
from diffusion_mem.process import NoisePredictor, Process


class LossEstimate(NamedTuple):
    """A mean over data points and its standard error over them (NaN for a single point)."""

    mean: jax.Array
    stderr: jax.Array


def epsilon_loss(
    apply_fn: NoisePredictor, params: Any, process: Process, x0: jax.Array, keys: jax.Array
) -> jax.Array:
    """The noise-prediction loss of each row, |eps_hat(x_t, t) - eps|^2 / dimensions for one draw of t, eps.

    t is uniform over steps 1 .. T-1: the official code never trains step 0, the least noisy one.

    Args:
      x0: clean data of shape (B, ...).
      keys: (B,) typed keys. A row's draws depend on its own key only, whatever the batch or the devices.

    Returns:
      (B,) float32 losses.
    """
    require(process.num_steps >= 2, "num_steps", process.num_steps, "at least 2, since step 0 is left out")

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        time_key, noise_key = jax.random.split(key)
        t = jax.random.randint(time_key, (), 1, process.num_steps)
        return t, jax.random.normal(noise_key, x0.shape[1:])

    t, noise = jax.vmap(draw)(keys)
    return _mean_square(apply_fn(params, process.noisy(x0, noise, t), t) - noise)


@partial(jax.jit, static_argnames=("apply_fn", "num_noise", "block_size"))
def fixed_time_loss(
    apply_fn: NoisePredictor,
    params: Any,
    process: Process,
    x: jax.Array,
    t_index: int | jax.Array,
    key: jax.Array,
    num_noise: int = 5,
    block_size: int = 512,
) -> LossEstimate:
    """The loss at step `t_index` over all rows of `x`: the paper's monitored curve (t = 0.01, 5 noise draws).

    Row i's noise is drawn from fold_in(key, i): with one key, train and test sets and all training times
    share their draws, so that differences between them are not noise. Blocks bound the memory (block_size x
    num_noise images at a time) and change nothing else. Compiles once per `apply_fn` object and shape of `x`.
    """
    num_rows = x.shape[0]
    require(num_rows >= 1, "x", x.shape, "at least one row")
    block_size = min(block_size, num_rows)

    def block_loss(rows: jax.Array) -> jax.Array:
        x_block = x[jnp.minimum(rows, num_rows - 1)]
        shape = (num_noise, *x.shape[1:])
        noise = jax.vmap(lambda k: jax.random.normal(k, shape))(row_keys(key, rows))
        noise = noise.reshape(-1, *x.shape[1:])
        t = jnp.full(noise.shape[0], t_index, jnp.int32)
        noisy = process.noisy(jnp.repeat(x_block, num_noise, axis=0), noise, t)
        losses = _mean_square(apply_fn(params, noisy, t) - noise)
        return losses.reshape(block_size, num_noise).mean(axis=1)

    num_blocks = -(-num_rows // block_size)
    rows = jnp.arange(num_blocks * block_size).reshape(num_blocks, block_size)
    losses = jax.lax.map(block_loss, rows).reshape(-1)[:num_rows]
    return LossEstimate(losses.mean(), losses.std(ddof=1) / jnp.sqrt(num_rows))


def _mean_square(residual: jax.Array) -> jax.Array:
    return jnp.square(residual).reshape(residual.shape[0], -1).mean(axis=1)
