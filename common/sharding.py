"""Where parameters live: regular expressions on their paths, one table per model."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common.config import require

# An array of fewer elements is not worth an all-gather.
_FSDP_MIN_SIZE = 2**14


@dataclass(frozen=True)
class ShardingRules:
    """Rules `(pattern, spec)`: the first pattern found in a leaf's path decides.

    `spec` holds one mesh axis name (or None) per dimension, from the left. A leaf no rule matches is split
    over the `fsdp` axis along its largest divisible dimension if it has at least `fsdp_min_size` elements.
    Optimizer moments repeat the parameter's path, so they follow the same rule.
    """

    rules: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    fsdp_min_size: int = _FSDP_MIN_SIZE


def path_of(key_path: tuple[Any, ...]) -> str:
    """'params/Dense_0/kernel' for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def state_shardings(state: Any, mesh: Mesh, rules: ShardingRules) -> Any:
    """A NamedSharding for every leaf of `state` (arrays or ShapeDtypeStructs).

    Raises: ConfigError naming the path when a rule does not fit the leaf's shape.
    """

    def one(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _spec(path_of(key_path), leaf, mesh, rules))

    return jax.tree_util.tree_map_with_path(one, state)


def _spec(path: str, leaf: Any, mesh: Mesh, rules: ShardingRules) -> PartitionSpec:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.ndim == 0:
        return PartitionSpec()
    for pattern, spec in rules.rules:
        if re.search(pattern, path):
            return _checked(path, pattern, spec, leaf, mesh)
    return _fsdp_spec(leaf, mesh, rules.fsdp_min_size)


def _checked(path: str, pattern: str, spec: tuple[str | None, ...], leaf: Any, mesh: Mesh) -> PartitionSpec:
    field = f"sharding rule {pattern!r} on {path}"
    require(len(spec) <= leaf.ndim, field, spec, f"has more entries than the shape {leaf.shape}")
    used = [axis for axis in spec if axis is not None]
    require(len(used) == len(set(used)), field, spec, "names an axis twice")
    for size, axis in zip(leaf.shape, spec, strict=False):
        require(axis is None or axis in mesh.shape, field, axis, f"must be one of {tuple(mesh.shape)}")
        require(
            axis is None or size % mesh.shape[axis] == 0,
            field,
            axis,
            f"has size {mesh.shape.get(axis)}, which does not divide {size} of the shape {leaf.shape}",
        )
    return PartitionSpec(*spec)


def _fsdp_spec(leaf: Any, mesh: Mesh, min_size: int) -> PartitionSpec:
    shards = mesh.shape["fsdp"]
    if shards == 1 or np.prod(leaf.shape) < min_size:
        return PartitionSpec()
    divisible = [(size, -axis) for axis, size in enumerate(leaf.shape) if size % shards == 0]
    if not divisible:
        return PartitionSpec()
    axis = -max(divisible)[1]
    return PartitionSpec(*[None] * axis, "fsdp")


def describe(state: Any, shardings: Any) -> list[tuple[str, str, str, int]]:
    """Rows (path, shape, spec, bytes on one device) of every leaf, in tree order."""
    rows = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (key_path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        local = sharding.shard_shape(leaf.shape)
        size = int(np.prod(local)) * leaf.dtype.itemsize
        rows.append((path_of(key_path), str(tuple(leaf.shape)), str(tuple(sharding.spec)), size))
    return rows
