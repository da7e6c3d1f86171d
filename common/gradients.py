"""Gradients of a weighted mean over the global batch, however the batch is cut."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from common.config import require
from common.parallel import psum

PyTree = Any
# (params, batch) -> (sum of losses, (sum of weights, auxiliary sums))
SumLoss = Callable[[PyTree, PyTree], tuple[jax.Array, tuple[jax.Array, PyTree]]]


def mean_value_and_grad(
    loss: SumLoss, params: PyTree, batch: PyTree, microbatches: int = 1, axis: str | None = None
) -> tuple[jax.Array, PyTree, PyTree]:
    """(mean loss, gradients of it, auxiliary means) of `loss` over microbatches and devices.

    `loss` returns sums, never means, and its weight (number of examples or of unmasked tokens): the sums are
    added up over microbatches and devices and divided once, so parts of unequal weight give the gradient of
    the whole batch. Peak memory holds the activations of one microbatch and one extra copy of the gradients.
    """
    grad = jax.value_and_grad(loss, has_aux=True)
    if microbatches == 1:
        (total, (weight, aux)), grads = grad(params, batch)
    else:
        parts = jax.tree.map(lambda x: _split(x, microbatches), batch)

        def add(carry: PyTree, part: PyTree) -> tuple[PyTree, None]:
            (value, (weight, aux)), grads = grad(params, part)
            return jax.tree.map(jnp.add, carry, (value, weight, aux, grads)), None

        shapes = jax.eval_shape(lambda p: grad(params, p), jax.tree.map(lambda x: x[0], parts))
        (value, (weight, aux)), grads = shapes
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (value, weight, aux, grads))
        (total, weight, aux, grads), _ = jax.lax.scan(add, zeros, parts)
    total, weight, aux, grads = psum((total, weight, aux, grads), axis)
    scale = 1.0 / jnp.maximum(weight, 1e-9)
    return (
        total * scale,
        jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads),
        jax.tree.map(lambda a: a * scale, aux),
    )


def _split(x: jax.Array, parts: int) -> jax.Array:
    """(B, …) → (parts, B/parts, …). Part i holds rows i, i + parts, …: no part lacks rows of a device."""
    require(x.shape[0] % parts == 0, "optim.microbatches", parts, f"must divide the batch of {x.shape[0]}")
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def check_microbatches(batch_size: int, microbatches: int, shards: int) -> None:
    """Raises ConfigError unless every device's share of the batch splits into equal microbatches."""
    require(microbatches >= 1, "optim.microbatches", microbatches, "must be at least 1")
    require(
        batch_size % (microbatches * shards) == 0,
        "optim.microbatches",
        microbatches,
        f"times {shards} devices must divide the batch of {batch_size}",
    )
