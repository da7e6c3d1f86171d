"""Frechet distance between sets of images, on named features.

The paper's FID needs Inception weights. These features need none, so a value here compares only with values
on the same features, and the name travels with it. Prefer "random-conv": the distance on pixels cannot tell
images from a Gaussian of their mean and covariance (which a linear denoiser samples), that on a fixed random
network can.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from common.config import nearest, require

_CONV_CHANNELS = (32, 32)
_CONV_BLOCK = 256


@dataclass(frozen=True)
class GaussianStats:
    """Mean (d,) and covariance (d, d) of `count` feature vectors, in float64, and the features' name."""

    mean: np.ndarray
    covariance: np.ndarray
    count: int
    features: str


@dataclass(frozen=True)
class FrechetResult:
    """A Frechet distance with what it depends on.

    Attributes:
      value: the squared distance; real and at least 0.
      features: name of the features.
      n_fake, n_real: sizes of the two sets. The value falls as they grow: compare only equal sizes.
      warning: "" or why the value is not to be trusted.
    """

    value: float
    features: str
    n_fake: int
    n_real: int
    warning: str


def features(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """The feature map `name`: images (N, H, W, C) or (N, H, W) in [-1, 1] -> (N, d) float64.

    "pixels": the image itself. "random-conv": 128 numbers from two convolutions with fixed random weights;
    grey images count as RGB with three equal channels.
    """
    require(name in _FEATURES, "features", name, f"not known features{nearest(name, _FEATURES)}")
    return _FEATURES[name]


def gaussian_stats(values: np.ndarray, name: str) -> GaussianStats:
    """Mean and unbiased covariance of feature vectors (N, d), called `name`.

    Raises:
      ValueError: for fewer than 2 rows or values that are not finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or values.shape[0] < 2 or values.shape[1] < 1:
        raise ValueError(f"features of shape {values.shape}: needs (N, d) with at least 2 rows")
    bad_rows = int(np.sum(~np.isfinite(values).all(axis=1)))
    if bad_rows:
        raise ValueError(f"features: {bad_rows} of {values.shape[0]} rows are not finite")
    mean = values.mean(axis=0)
    centred = values - mean[None]
    return GaussianStats(mean, centred.T @ centred / (values.shape[0] - 1), values.shape[0], name)


def frechet_distance(fake: GaussianStats, real: GaussianStats) -> FrechetResult:
    """|m_a - m_b|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2), for any number of samples.

    With A = F F^T and B = G G^T the last trace is the sum of the singular values of F^T G: no square root of
    a rounded eigenvalue is taken, so the distance of a set to itself is 0 to rounding even with
    rank-deficient covariances.

    Raises:
      ValueError: for sets of different features or dimensions.
    """
    if (fake.features, fake.mean.shape) != (real.features, real.mean.shape):
        sides = [f"{s.features!r} of dimension {s.mean.size}" for s in (fake, real)]
        raise ValueError(f"features differ: {sides[0]} against {sides[1]}")
    overlap = np.linalg.svd(_factor(fake.covariance).T @ _factor(real.covariance), compute_uv=False).sum()
    traces = np.trace(fake.covariance) + np.trace(real.covariance)
    value = np.square(fake.mean - real.mean).sum() + traces - 2 * overlap
    smallest = min(fake.count, real.count)
    warning = ""
    if smallest <= fake.mean.size:
        warning = (
            f"{smallest} samples for {fake.mean.size} features: singular covariance, value biased upwards"
        )
    # Rounding can leave a distance of 0 a little below it.
    return FrechetResult(max(float(value), 0.0), fake.features, fake.count, real.count, warning)


def _factor(covariance: np.ndarray) -> np.ndarray:
    """F with F F^T = covariance; eigenvalues that rounding made negative count as 0."""
    eigenvalues, eigenvectors = np.linalg.eigh(covariance)
    return eigenvectors * np.sqrt(np.maximum(eigenvalues, 0))[None]


def _image_batch(images: np.ndarray) -> np.ndarray:
    images = np.asarray(images)
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"images of type {images.dtype}: needs floats scaled to [-1, 1]")
    images = images.astype(np.float32)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[0] < 1 or images.shape[-1] not in (1, 3):
        raise ValueError(f"images of shape {images.shape}: needs (N, H, W) or (N, H, W, C) with C = 1 or 3")
    return images


def _pixel_features(images: np.ndarray) -> np.ndarray:
    images = _image_batch(images)
    return images.reshape(images.shape[0], -1).astype(np.float64)


def _random_conv_features(images: np.ndarray) -> np.ndarray:
    images = _image_batch(images)
    if min(images.shape[1:3]) < 4:
        raise ValueError(f"images of shape {images.shape}: random-conv needs sides of at least 4")
    num_images = images.shape[0]
    # Blocks of one size compile once, whatever the number of images.
    padding = -num_images % _CONV_BLOCK
    images = np.concatenate([images, np.zeros((padding, *images.shape[1:]), np.float32)])
    blocks = [_random_conv(images[i : i + _CONV_BLOCK]) for i in range(0, len(images), _CONV_BLOCK)]
    return np.concatenate(blocks).astype(np.float64)[:num_images]


@cache
def _conv_weights() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """He-scaled random kernels and biases; the generator and seed are part of the features' name."""
    rng = np.random.default_rng(0)
    channels_in = (3, *_CONV_CHANNELS[:-1])
    return tuple(
        (
            (rng.normal(size=(3, 3, c_in, c_out)) * np.sqrt(2 / (9 * c_in))).astype(np.float32),
            (rng.normal(size=c_out) * 0.5).astype(np.float32),
        )
        for c_in, c_out in zip(channels_in, _CONV_CHANNELS, strict=True)
    )


@jax.jit
def _random_conv(images: jax.Array) -> jax.Array:
    """Two 3x3 convolutions with ReLU, 2x2 means between them, then means over a 2x2 grid of the image."""
    x = jnp.broadcast_to(images, (*images.shape[:-1], 3))
    for i, (kernel, bias) in enumerate(_conv_weights()):
        if i:
            pooled = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = pooled / 4
        x = jax.lax.conv_general_dilated(
            x,
            jnp.asarray(kernel),
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=jax.lax.Precision.HIGHEST,
        )
        x = jax.nn.relu(x + bias[None, None, None])
    rows = jnp.array_split(x, 2, axis=1)
    cells = [cell for row in rows for cell in jnp.array_split(row, 2, axis=2)]
    return jnp.concatenate([cell.mean(axis=(1, 2)) for cell in cells], axis=-1)


_FEATURES = {"pixels": _pixel_features, "random-conv": _random_conv_features}
