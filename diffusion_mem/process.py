"""The forward noising process: tables of alpha-bar over discrete steps, and the paper's time axis.

The paper (eq. 1-2) writes an Ornstein-Uhlenbeck process, x_t = e^-t x_0 + sqrt(1 - e^-2t) noise; its
experiments run the DDPM form of it, in which step i has signal sqrt(alpha_bar_i): t = -log(alpha_bar_i) / 2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from common.config import require

# What losses and samplers ask of a network: (params, noisy x, integer steps t_B) -> the noise in x.
NoisePredictor = Callable[[Any, jax.Array, jax.Array], jax.Array]

_MOST_STEPS = 1_000_000


class Process(struct.PyTreeNode):
    """A variance-preserving process of T steps, 0 the least noisy; its tables are float32 of shape (T,).

    Attributes:
      alpha_bar: share of signal variance, strictly between 0 and 1 and decreasing.
      signal: sqrt(alpha_bar), the factor of the data.
      sigma: sqrt(1 - alpha_bar), the standard deviation of the noise.
      ou_time: -log(alpha_bar) / 2, the paper's t.
    """

    alpha_bar: jax.Array
    signal: jax.Array
    sigma: jax.Array
    ou_time: jax.Array

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return self.alpha_bar.shape[0]

    def noisy(self, x0: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
        """Returns x_t = sqrt(alpha_bar_t) x0 + sqrt(1 - alpha_bar_t) noise (paper eq. 2).

        Args:
          x0: clean data with any leading batch axes.
          noise: standard normal, in x0's shape.
          t: integer steps whose shape is that of x0's leading axes (a scalar serves all rows).
        """
        return per_row(self.signal[t], x0) * x0 + per_row(self.sigma[t], x0) * noise

    def time(self, t: jax.Array) -> jax.Array:
        """The paper's Ornstein-Uhlenbeck time of integer steps `t`."""
        return self.ou_time[t]

    def nearest_step(self, time: float) -> int:
        """The step whose Ornstein-Uhlenbeck time is nearest `time` (0.01: official step 40)."""
        return int(np.argmin(np.abs(np.asarray(self.ou_time, np.float64) - time)))


def per_row(values: jax.Array, x: jax.Array) -> jax.Array:
    """Reshapes per-row `values` to multiply `x`, whose leading axes they share, without rank promotion."""
    return values.reshape(values.shape + (1,) * (x.ndim - values.ndim))


def from_betas(beta: np.ndarray) -> Process:
    """Builds a process from the noise variances `beta` (T,) of its steps.

    The tables are computed in float64: in float32 the noise level of the first steps would keep three digits.
    """
    beta = np.asarray(beta, np.float64)
    require(beta.ndim == 1 and beta.size > 0, "beta.shape", beta.shape, "one axis, at least one step")
    ends = (float(beta.min()), float(beta.max()))
    require(ends[0] > 0 and ends[1] < 1, "beta range", ends, "strictly between 0 and 1")
    alpha_bar = np.cumprod(1 - beta)
    stored = np.concatenate([[1], alpha_bar, [0]]).astype(np.float32)
    falls = bool(np.all(np.diff(stored) < 0))
    require(falls, "beta range", ends, "alpha_bar must fall at every step and stay above 0 in float32")
    tables = (alpha_bar, np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar), -0.5 * np.log(alpha_bar))
    return Process(*(jnp.asarray(table, jnp.float32) for table in tables))


def ddpm_process(num_steps: int = 1000, beta_min: float = 1e-4, beta_max: float = 2e-2) -> Process:
    """The official linear schedule: `num_steps` betas, evenly spaced from `beta_min` to `beta_max` inclusive.

    The defaults end at alpha_bar 4e-5, close to pure noise. Another `num_steps` needs other betas to end
    there: the values are used as given.
    """
    require(1 <= num_steps <= _MOST_STEPS, "process.num_steps", num_steps, f"must be 1 to {_MOST_STEPS}")
    ends = (beta_min, beta_max)
    require(0 < beta_min <= beta_max < 1, "process.beta_min, beta_max", ends, "must be 0 < min <= max < 1")
    return from_betas(np.linspace(beta_min, beta_max, num_steps))
