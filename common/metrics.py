"""Metrics that merge exactly: partial results of batches and devices give the value of the pooled data.

A step returns names mapped to `Metric` pytrees or plain scalars; nothing leaves the device until `to_host`.
"""

from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

PyTree = Any


@runtime_checkable
class Metric(Protocol):
    """A pytree of sums. `compute` works on device and host arrays; it gives an array or a mapping of them."""

    def merge(self, other: Self) -> Self: ...
    def reduce(self, axis: str) -> Self: ...
    def compute(self) -> Any: ...


Metrics = Mapping[str, jax.Array | Metric]


def _float(x: ArrayLike) -> jax.Array:
    """At least float32, so that sums of bfloat16 values keep their digits."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _weighted(values: ArrayLike, weights: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
    """(values with those of weight 0 set to 0, weights): a masked NaN must not reach the sum."""
    values = _float(values)
    if weights is None:
        return values, jnp.ones_like(values)
    weights = _float(weights)
    if weights.ndim not in (0, values.ndim):
        raise ValueError(f"weights {weights.shape} must have the rank of the values {values.shape}")
    weights = jnp.broadcast_to(weights, values.shape)
    return jnp.where(weights == 0, 0, values), weights


@struct.dataclass
class Mean:
    """Weighted mean of everything pooled; NaN where the total weight is 0."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> "Mean":
        """Over all elements of `values`; `weights` (a mask, counts) must be a scalar or of its rank."""
        values, weights = _weighted(values, weights)
        return cls(jnp.sum(values * weights), jnp.sum(weights))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def reduce(self, axis: str) -> "Mean":
        return jax.lax.psum(self, axis)

    def compute(self) -> jax.Array:
        return self.total / self.count


@struct.dataclass
class Sum:
    """Sum of everything pooled."""

    total: jax.Array

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> "Sum":
        return cls(Mean.of(values, weights).total)

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def reduce(self, axis: str) -> "Sum":
        return jax.lax.psum(self, axis)

    def compute(self) -> jax.Array:
        return self.total


@struct.dataclass
class Max:
    """Largest value pooled; a NaN anywhere gives NaN."""

    value: jax.Array

    @classmethod
    def of(cls, values: ArrayLike) -> "Max":
        return cls(jnp.max(_float(values), initial=-jnp.inf))

    def merge(self, other: "Max") -> "Max":
        return Max(jnp.maximum(self.value, other.value))

    def reduce(self, axis: str) -> "Max":
        return Max(jnp.max(jax.lax.all_gather(self.value, axis), axis=0))  # pmax may lose a NaN

    def compute(self) -> jax.Array:
        return self.value


@struct.dataclass
class Min:
    """Smallest value pooled; a NaN anywhere gives NaN."""

    value: jax.Array

    @classmethod
    def of(cls, values: ArrayLike) -> "Min":
        return cls(jnp.min(_float(values), initial=jnp.inf))

    def merge(self, other: "Min") -> "Min":
        return Min(jnp.minimum(self.value, other.value))

    def reduce(self, axis: str) -> "Min":
        return Min(jnp.min(jax.lax.all_gather(self.value, axis), axis=0))

    def compute(self) -> jax.Array:
        return self.value


@struct.dataclass
class Moments:
    """Mean and (population) variance by Welford's update, merged by Chan et al. (1979): exact and stable."""

    count: jax.Array
    mean: jax.Array
    m2: jax.Array

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> "Moments":
        values, weights = _weighted(values, weights)
        count = jnp.sum(weights)
        mean = jnp.sum(values * weights) / jnp.where(count == 0, 1, count)
        return cls(count, mean, jnp.sum(weights * jnp.square(values - mean)))

    def merge(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        share = other.count / jnp.where(count == 0, 1, count)
        delta = other.mean - self.mean
        m2 = self.m2 + other.m2 + jnp.square(delta) * self.count * share
        return Moments(count, self.mean + delta * share, m2)

    def reduce(self, axis: str) -> "Moments":
        count = jax.lax.psum(self.count, axis)
        mean = jax.lax.psum(self.count * self.mean, axis) / jnp.where(count == 0, 1, count)
        m2 = jax.lax.psum(self.m2 + self.count * jnp.square(self.mean - mean), axis)
        return Moments(count, mean, m2)

    def compute(self) -> dict[str, jax.Array]:
        """{"mean", "std", "count"}; mean and std are NaN where the count is 0."""
        empty = 0 * (1 / self.count)  # 0, or NaN where nothing was counted
        return {"mean": self.mean + empty, "std": (self.m2 / self.count) ** 0.5, "count": self.count}


@struct.dataclass
class Histogram:
    """Counts in equal bins of [lo, hi]; what falls outside is counted in `under`, `over` and `nan`.

    `counts` holds [under, one per bin, over, nan].
    """

    counts: jax.Array
    lo: float = struct.field(pytree_node=False)
    hi: float = struct.field(pytree_node=False)

    @classmethod
    def of(cls, values: ArrayLike, lo: float, hi: float, bins: int = 32) -> "Histogram":
        """Over all elements of `values`; `hi` itself is in the last bin. ValueError unless lo < hi."""
        if not (lo < hi and bins > 0):
            raise ValueError(f"Histogram(lo={lo}, hi={hi}, bins={bins}): needs lo < hi and bins > 0")
        values = _float(values).reshape(-1)
        inside = jnp.clip(jnp.floor((values - lo) / (hi - lo) * bins), 0, bins - 1) + 1
        slot = jnp.where(values < lo, 0, jnp.where(values > hi, bins + 1, inside))
        slot = jnp.where(jnp.isnan(values), bins + 2, slot).astype(jnp.int32)
        return cls(jnp.zeros(bins + 3, jnp.int32).at[slot].add(1), lo, hi)

    def merge(self, other: "Histogram") -> "Histogram":
        if (self.lo, self.hi, self.counts.shape) != (other.lo, other.hi, other.counts.shape):
            raise ValueError("histograms with other bins cannot be merged")
        return Histogram(self.counts + other.counts, self.lo, self.hi)

    def reduce(self, axis: str) -> "Histogram":
        return jax.lax.psum(self, axis)

    def compute(self) -> dict[str, Any]:
        outside = {"under": self.counts[..., 0], "over": self.counts[..., -2], "nan": self.counts[..., -1]}
        return {"counts": self.counts[..., 1:-2], "lo": self.lo, "hi": self.hi, **outside}


def reduce(metrics: Metrics, axis: str | None) -> Metrics:
    """Pools over the devices of a mapped axis (plain scalars are averaged); the identity for axis None."""
    if axis is None:
        return metrics
    return {
        name: value.reduce(axis) if isinstance(value, Metric) else jax.lax.pmean(value, axis)
        for name, value in metrics.items()
    }


def to_host(metrics: Metrics) -> dict[str, Any]:
    """Host values from one device-to-host transfer: a float per scalar, a list per vector (one entry a seed).

    A metric that computes several values gives `name/key` entries, but a `Histogram` one nested dict: its
    counts are no curve.
    """
    host: dict[str, Any] = {}
    with np.errstate(all="ignore"):  # the mean of nothing is NaN, not a warning
        for name, value in jax.device_get(dict(metrics)).items():
            computed = value.compute() if isinstance(value, Metric) else value
            entries = computed if isinstance(computed, Mapping) else {"": computed}
            values = {key: np.asarray(item, np.float64).tolist() for key, item in entries.items()}
            if isinstance(value, Histogram):
                host[name] = values
            else:
                host |= {f"{name}/{key}" if key else name: item for key, item in values.items()}
    return host


def _inexact(tree: PyTree) -> list[jax.Array]:
    leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(tree)]
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


def global_norm(tree: PyTree) -> jax.Array:
    """L2 norm over all floating leaves, summed in float32; 0 for a tree without any."""
    squares = [jnp.sum(jnp.square(jnp.abs(_float(x)))) for x in _inexact(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def norms_by_prefix(tree: PyTree, depth: int = 1) -> dict[str, jax.Array]:
    """L2 norm of each group of leaves that share the first `depth` names of their path, as {"a/b": norm}."""
    groups: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        groups.setdefault(jax.tree_util.keystr(path[:depth], simple=True, separator="/"), []).append(leaf)
    return {prefix: global_norm(leaves) for prefix, leaves in groups.items()}


def all_finite(tree: PyTree) -> jax.Array:
    """bool scalar: no floating leaf holds a NaN or an infinity."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in _inexact(tree)], bool))
