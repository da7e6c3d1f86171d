"""Optimizers and learning-rate schedules from config data."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from common.config import require
from common.sharding import path_of

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "cosine", "wsd")


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer and its schedule.

    Attributes:
      name: adam, adamw (decoupled decay) or sgd (with heavy-ball momentum, as torch.optim.SGD).
      lr: peak learning rate.
      schedule: after the warm-up: constant; cosine to `end_factor · lr`; wsd (constant, then linear to
        `end_factor · lr` over the last `decay_fraction` of all updates).
      warmup_steps: updates of linear warm-up. The first update has lr / warmup_steps, not zero.
      momentum: of sgd; b1, b2 and eps are those of adam and adamw.
      weight_decay: of adamw; applied to parameters in whose path `decay_pattern` is found.
      clip_norm: gradients of a larger global norm are scaled down to it; 0 is off.
      microbatches: parts a batch is cut into and accumulated over inside one update.
    """

    name: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_pattern: str = "kernel$"
    clip_norm: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    end_factor: float = 0.0
    decay_fraction: float = 0.2
    microbatches: int = 1


def learning_rate(config: OptimConfig, total_steps: int) -> Callable[[Any], jax.Array]:
    """The schedule lr(k) of update k = 0 … N−1, N = `total_steps`, w = `warmup_steps`.

    k < w: lr·(k+1)/w. Then, with e = `end_factor`: cosine has lr·(e + (1−e)(1+cos πx)/2), x = (k−w)/(N−1−w);
    wsd is constant up to update N−1−D, D = max(decay_fraction·N, 1), and falls linearly. Both reach e·lr
    exactly at the last update N−1 and stay there. An update that the guard dropped does not count: k is
    `updates_done`, not the step.

    Raises: ConfigError for an impossible field.
    """
    _check_schedule(config, total_steps)
    warmup, last = config.warmup_steps, total_steps - 1
    end = config.end_factor

    def schedule(count: Any) -> jax.Array:
        k = jnp.asarray(count, jnp.float32)
        if config.schedule == "cosine":
            x = jnp.clip((k - warmup) / max(last - warmup, 1), 0.0, 1.0)
            factor = end + (1 - end) * (1 + jnp.cos(math.pi * x)) / 2
        elif config.schedule == "wsd":
            decay = _decay_steps(config, total_steps)
            factor = 1 - (1 - end) * jnp.clip((k - (last - decay)) / decay, 0.0, 1.0)
        else:
            factor = jnp.ones(())
        rise = (k + 1) / warmup if warmup else 1.0
        return config.lr * jnp.where(k < warmup, rise, factor)

    return schedule


def _check_schedule(config: OptimConfig, total_steps: int) -> None:
    names = ", ".join(SCHEDULES)
    require(config.schedule in SCHEDULES, "optim.schedule", config.schedule, f"must be one of {names}")
    require(0 < config.lr < math.inf, "optim.lr", config.lr, "must be positive")
    require(0 <= config.end_factor <= 1, "optim.end_factor", config.end_factor, "must be between 0 and 1")
    fraction = config.decay_fraction
    require(0 < fraction <= 1, "optim.decay_fraction", fraction, "must be above 0 and at most 1")
    warmup = config.warmup_steps
    allowed = f"must be between 0 and run.steps={total_steps}"
    require(0 <= warmup <= total_steps, "optim.warmup_steps", warmup, allowed)
    if config.schedule == "wsd":
        room = total_steps - _decay_steps(config, total_steps)
        require(warmup <= max(room, 0), "optim.warmup_steps", warmup, f"the decay begins at update {room:g}")


def _decay_steps(config: OptimConfig, total_steps: int) -> float:
    return max(config.decay_fraction * total_steps, 1.0)


def make_optimizer(config: OptimConfig, total_steps: int) -> optax.GradientTransformation:
    """Clip → optimizer → decay → learning rate, as `config` says.

    Raises: ConfigError for an impossible field; at `init`, when no parameter's path fits `decay_pattern`.
    """
    _check_optimizer(config)
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    if config.name != "sgd":
        parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    elif config.momentum:
        parts.append(optax.trace(decay=config.momentum))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask(config.decay_pattern)))
    parts.append(optax.scale_by_learning_rate(learning_rate(config, total_steps)))
    return optax.chain(*parts)


def updates_done(opt_state: Any) -> jax.Array:
    """The k of `learning_rate` that the next update of a `make_optimizer` state has."""

    def counts(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    (schedule,) = filter(counts, jax.tree.leaves(opt_state, is_leaf=counts))
    return schedule.count


def _check_optimizer(config: OptimConfig) -> None:
    require(config.name in OPTIMIZERS, "optim.name", config.name, f"must be one of {', '.join(OPTIMIZERS)}")
    for field in ("momentum", "b1", "b2"):
        value = getattr(config, field)
        require(0 <= value < 1, f"optim.{field}", value, "must be at least 0 and below 1")
    require(0 < config.eps < math.inf, "optim.eps", config.eps, "must be positive")
    require(
        0 <= config.clip_norm < math.inf, "optim.clip_norm", config.clip_norm, "must be 0 (off) or positive"
    )
    decay = config.weight_decay
    require(0 <= decay < math.inf, "optim.weight_decay", decay, "must be 0 (off) or positive")
    require(decay == 0 or config.name == "adamw", "optim.weight_decay", decay, "only adamw decays weights")
    require(config.microbatches >= 1, "optim.microbatches", config.microbatches, "must be at least 1")
    try:
        re.compile(config.decay_pattern)
    except re.error as error:
        allowed = f"must be a regular expression ({error})"
        require(False, "optim.decay_pattern", config.decay_pattern, allowed)


def decay_mask(pattern: str) -> Callable[[Any], Any]:
    """A function from parameters to booleans: True where `pattern` is found in the parameter's path.

    Raises: ConfigError where it is found in none, so that a misspelt pattern cannot switch the decay off.
    """

    def mask(params: Any) -> Any:
        found = jax.tree_util.tree_map_with_path(
            lambda key_path, _: re.search(pattern, path_of(key_path)) is not None, params
        )
        require(
            any(jax.tree.leaves(found)), "optim.decay_pattern", pattern, "is found in no parameter's path"
        )
        return found

    return mask
