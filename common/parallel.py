"""One step, three ways to compile it: jit (global view), shard_map and pmap (per device).

A step is written in the global view. It calls `pmean`, `psum`, `all_gather` and `row_ids` with the axis that
`reduce_axis(mode)` gives: None under jit, where the compiler places the collectives and these are no-ops, and
"data" in the per-device modes. Gradients are reduced explicitly, so shard_map runs with `check_vma=False`:
with the check on, a `pmean` of gradients comes out as many times too large as there are devices.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from common.flops import count_flops
from common.mesh import BATCH_AXES, batch_sharding, batch_shards, replicated

PyTree = Any


def reduce_axis(mode: str) -> str | None:
    """The axis name a step passes to the reductions below; None in the global view."""
    return None if mode == "jit" else "data"


def pmean(tree: PyTree, axis: str | None) -> PyTree:
    """Mean over devices; the identity in the global view."""
    return tree if axis is None else jax.lax.pmean(tree, axis)


def psum(tree: PyTree, axis: str | None) -> PyTree:
    """Sum over devices; the identity in the global view."""
    return tree if axis is None else jax.lax.psum(tree, axis)


def all_gather(tree: PyTree, axis: str | None) -> PyTree:
    """The global batch (dimension 0) from per-device parts; the identity in the global view."""
    return tree if axis is None else jax.lax.all_gather(tree, axis, axis=0, tiled=True)


def row_ids(local_rows: int, axis: str | None) -> jax.Array:
    """int32 ids, within the global batch, of the `local_rows` examples this view of the step sees."""
    start = 0 if axis is None else jax.lax.axis_index(axis) * local_rows
    return start + jnp.arange(local_rows, dtype=jnp.int32)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """One key per example, from its id in the global batch: noise does not depend on how a batch is cut."""
    return jax.vmap(functools.partial(jax.random.fold_in, key))(rows)


def compile_step(
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    mesh: Mesh,
    mode: str,
    state: PyTree,
    shardings: PyTree,
    batch: PyTree,
    batch_axis: int = 0,
) -> "CompiledStep":
    """Compiles `step(state, batch) -> (state, metrics)` ahead of time; the state is donated (not under pmap).

    Args:
      state, batch: ShapeDtypeStructs of the global arrays; `batch` is None where the step makes its own data.
      shardings: of the state, from `common.sharding.state_shardings`.
      batch_axis: the dimension of batch leaves that is cut over devices.
    """
    if mode == "pmap":
        return _compile_pmap(step, mesh, state, batch, batch_axis)
    if mode == "shard_map":
        state_specs = jax.tree.map(lambda s: s.spec, shardings)
        specs = (state_specs, PartitionSpec(*[None] * batch_axis, BATCH_AXES))
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(state_specs, PartitionSpec()), check_vma=False
        )
    jitted = jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh, batch_axis)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )
    traced = jitted.trace(state, batch)
    return CompiledStep(traced.lower().compile(), count_flops(traced.jaxpr))


class CompiledStep:
    """An executable step. It cannot recompile: another shape or dtype is an error.

    Attributes:
      executable: what JAX compiled; it knows its memory.
      flops: of one step on all devices together.
    """

    def __init__(self, executable: Any, flops: float, split: Callable[[PyTree], PyTree] | None = None):
        self.executable, self.flops, self._split = executable, flops, split

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """(state, batch) -> (state, metrics), whole arrays in every mode."""
        return self.executable(state, batch if self._split is None else self._split(batch))


def _compile_pmap(step: Callable, mesh: Mesh, state: PyTree, batch: PyTree, batch_axis: int) -> CompiledStep:
    shards = batch_shards(mesh)

    def split(x: jax.Array) -> jax.Array:
        """(…, B, …) → (devices, …, B / devices, …)."""
        shape = (*x.shape[:batch_axis], shards, x.shape[batch_axis] // shards, *x.shape[batch_axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), batch_axis, 0)

    def parts_of(tree: PyTree) -> tuple[jax.Array, PyTree]:
        """Device numbers beside the cut batch: pmap needs an array to map, and a batch may be None."""
        return jnp.arange(shards), jax.tree.map(split, tree)

    mapped = jax.pmap(
        lambda state, parts: step(state, parts[1]),
        axis_name="data",
        in_axes=(None, 0),
        out_axes=None,
        devices=list(mesh.devices.flat),
    )
    split_batch = jax.jit(parts_of)
    parts = jax.eval_shape(split_batch, batch)
    flops = count_flops(jax.make_jaxpr(mapped)(state, parts))
    return CompiledStep(mapped.lower(state, parts).compile(), flops, split_batch)
