"""The one train state of all three papers, and its named random streams."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

PyTree = Any


class TrainState(struct.PyTreeNode):
    """Everything a run needs to go on bit for bit; all of it is saved.

    Attributes:
      step: int32 scalar, updates done so far.
      params: any pytree; several networks are a dict of trees.
      opt_state: the optimizer's state, keyed like `params` where there are several.
      key: typed PRNG key, constant through the run. Streams are derived, never threaded, so that a restored
        or rolled-back state replays exactly.
      extra: what else a task carries (EMA, environments, replay buffer).
      guard: the counters and window of `common.guard`.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    key: jax.Array
    extra: PyTree = struct.field(default_factory=dict)
    guard: PyTree = struct.field(default_factory=dict)


def create(params: PyTree, opt_state: PyTree, key: jax.Array, extra: PyTree | None = None) -> TrainState:
    """A state at step 0."""
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, key, {} if extra is None else extra)


def named_key(key: jax.Array, name: str) -> jax.Array:
    """The stream of `key` called `name`; the same on every machine (a hash of the name, not Python's)."""
    digest = hashlib.sha256(name.encode()).digest()
    return jax.random.fold_in(key, int.from_bytes(digest[:4], "little"))


def step_key(state: TrainState, name: str) -> jax.Array:
    """The key of stream `name` at the state's step: two names or two steps never share a key."""
    return jax.random.fold_in(named_key(state.key, name), state.step)
