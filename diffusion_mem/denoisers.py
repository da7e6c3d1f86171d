"""Networks that predict the noise in an image. Modules live here only; the rest sees apply(params, x, t)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

# torch's default, which the official networks use (flax's own is 1e-6).
_LAYER_NORM_EPSILON = 1e-5
_TIME_FEATURES = 64


def time_features(t: jax.Array, size: int) -> jax.Array:
    """Sinusoidal features of integer steps: t_B -> (B, size), periods from 2 pi to about 2 pi 10^4."""
    half = size // 2
    frequencies_F = np.exp(-math.log(10_000) * np.arange(half) / half).astype(np.float32)
    angles_BxF = t.astype(jnp.float32)[:, None] * frequencies_F[None]
    return jnp.concatenate([jnp.cos(angles_BxF), jnp.sin(angles_BxF)], axis=-1)


class ResidualMLP(nn.Module):
    """A time-conditioned residual MLP: (x of shape (B, ...), integer steps t_B) -> noise, shaped like x.

    Images are flattened to vectors and restored. The input also reaches the output directly, each pixel
    scaled by a learned function of t: at high noise the answer is nearly x itself, whose magnitude the layer
    norms discard, and the sampler amplifies what is missed there (157 times from the noisiest official step).
    The output layers start at zero: an untrained network predicts no noise and its loss is 1 on any data, as
    with A(0) = 0 in the paper's random-features model.

    Attributes:
      width: units of every hidden layer.
      blocks: residual blocks, each of two dense layers.
      dtype: of the computation; parameters and the output are float32.
    """

    width: int
    blocks: int = 3
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        x_BxD = x.reshape(x.shape[0], -1)
        temb_BxW = self._dense("time_in")(time_features(t, _TIME_FEATURES))
        temb_BxW = self._dense("time_out")(nn.silu(temb_BxW))
        h_BxW = self._dense("stem")(x_BxD)
        for i in range(self.blocks):
            update_BxW = self._norm(f"block{i}_norm")(h_BxW) + self._dense(f"block{i}_time")(temb_BxW)
            update_BxW = nn.gelu(self._dense(f"block{i}_up")(update_BxW))
            h_BxW = h_BxW + self._dense(f"block{i}_down")(update_BxW)
        out_BxD = self._output(x_BxD.shape[-1], "head")(self._norm("head_norm")(h_BxW))
        gain_BxD = self._output(x_BxD.shape[-1], "input_gain")(temb_BxW)
        # In float32: at high noise this term is the noise itself, which bfloat16 would round to three digits.
        return (out_BxD.astype(jnp.float32) + gain_BxD.astype(jnp.float32) * x_BxD).reshape(x.shape)

    def _dense(self, name: str) -> nn.Dense:
        return nn.Dense(self.width, dtype=self.dtype, name=name)

    def _output(self, size: int, name: str) -> nn.Dense:
        return nn.Dense(size, dtype=self.dtype, kernel_init=nn.initializers.zeros, name=name)

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=_LAYER_NORM_EPSILON, dtype=self.dtype, name=name)
