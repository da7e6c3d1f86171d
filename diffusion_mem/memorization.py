"""How much of what a model generates is copied: the gap ratio and the memorized fraction.

What the measure cannot see (paper notes): a training image that has a near-duplicate is its own second
neighbour, so copies of it are not flagged; nor are flips, crops and partial copies, which are far away in
pixel distance.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.config import require

# Candidates per sample whose distance is computed again without cancellation; two would do but for near ties.
_CANDIDATES = 4


class GapRatios(NamedTuple):
    """Per sample: distance to the nearest training image over that to the second nearest, and which it is.

    Attributes:
      ratio: (m,) in [0, 1]; 0 where both distances are 0 (a copy of an image the training set holds twice);
        NaN for a sample that is not finite.
      nearest: (m,) int32, row of the nearest training image.
      distance: (m,) Euclidean distance to it.
    """

    ratio: jax.Array
    nearest: jax.Array
    distance: jax.Array


def gap_ratio(
    samples: jax.Array, train: jax.Array, sample_block: int = 512, train_block: int = 2048
) -> GapRatios:
    """Compares each of `samples` (m, ...) with its two nearest rows of `train` (n, ...), in L2 distance.

    Memory beyond the inputs is sample_block x train_block, whatever m and n. Distances come from the
    expansion |a|^2 - 2ab + |b|^2 (one matrix product), those of the best few again from differences: exact
    copies give 0.

    Raises:
      ConfigError: for n < 2, no samples, or samples of another shape than the training images.
    """
    require(train.shape[0] >= 2, "train.shape", train.shape, "at least 2 images, for two neighbours")
    require(samples.shape[0] >= 1, "samples.shape", samples.shape, "at least 1 sample")
    same = samples.shape[1:] == train.shape[1:]
    require(same, "samples.shape", samples.shape, f"the training images are {train.shape[1:]}")
    require(sample_block >= 1 and train_block >= 1, "blocks", (sample_block, train_block), "at least 1 each")
    return _gap_ratio(
        jnp.asarray(samples, jnp.float32).reshape(samples.shape[0], -1),
        jnp.asarray(train, jnp.float32).reshape(train.shape[0], -1),
        min(sample_block, samples.shape[0]),
        min(train_block, train.shape[0]),
    )


@partial(jax.jit, static_argnames=("sample_block", "train_block"))
def _gap_ratio(samples: jax.Array, train: jax.Array, sample_block: int, train_block: int) -> GapRatios:
    num_samples = samples.shape[0]
    num_blocks = -(-num_samples // sample_block)
    rows = jnp.minimum(jnp.arange(num_blocks * sample_block), num_samples - 1)
    # Shifting both sides leaves distances alone and takes most of the cancellation out of the expansion.
    centre = train.mean(axis=0, keepdims=True)

    def compare(rows: jax.Array) -> GapRatios:
        block = samples[rows]
        candidates = _nearest_rows(block, train, centre, train_block)
        exact = jnp.sqrt(jnp.square(block[:, None] - train[candidates]).sum(axis=-1))
        order = jnp.argsort(exact, axis=1)
        first, second = jnp.take_along_axis(exact, order[:, :2], axis=1).T
        ratio = jnp.where(first == 0, 0.0, first / jnp.where(second == 0, 1.0, second))
        return GapRatios(ratio, jnp.take_along_axis(candidates, order[:, :1], axis=1)[:, 0], first)

    blocks = jax.lax.map(compare, rows.reshape(num_blocks, sample_block))
    return jax.tree.map(lambda x: x.reshape(-1)[:num_samples], blocks)


def _nearest_rows(block: jax.Array, train: jax.Array, centre: jax.Array, train_block: int) -> jax.Array:
    """Rows of `train` nearest each row of `block`, best first, by a scan over `train`: (b, candidates)."""
    num_rows = train.shape[0]
    num_candidates = min(_CANDIDATES, num_rows)
    block = block - centre

    def scan_block(best: tuple[jax.Array, jax.Array], first_row: jax.Array) -> tuple[Any, None]:
        # The last block is moved back to fit; the rows it shares with the one before are masked out.
        start = jnp.minimum(first_row, num_rows - train_block)
        rows = start + jnp.arange(train_block, dtype=jnp.int32)
        part = jax.lax.dynamic_slice_in_dim(train, start, train_block) - centre
        product = jnp.matmul(block, part.T, precision=jax.lax.Precision.HIGHEST)
        # |a|^2 is the same for all rows of the training set and does not change their order.
        closeness = 2 * product - jnp.square(part).sum(axis=1)[None]
        closeness = jnp.where(rows[None] >= first_row, closeness, -jnp.inf)
        closeness = jnp.concatenate([best[0], closeness], axis=1)
        rows = jnp.concatenate([best[1], jnp.broadcast_to(rows[None], (block.shape[0], train_block))], axis=1)
        closeness, chosen = jax.lax.top_k(closeness, num_candidates)
        return (closeness, jnp.take_along_axis(rows, chosen, axis=1)), None

    shape = (block.shape[0], num_candidates)
    best = (jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32))
    return jax.lax.scan(scan_block, best, jnp.arange(0, num_rows, train_block, dtype=jnp.int32))[0][1]


def memorized_fraction(ratios: jax.Array, threshold: float = 1 / 3) -> jax.Array:
    """The share of `ratios` below `threshold` (paper eq. 6, k = 1/3); NaN if any of them is NaN."""
    ratios = jnp.asarray(ratios)
    return jnp.where(jnp.isnan(ratios), jnp.nan, (ratios < threshold).astype(jnp.float32)).mean()
