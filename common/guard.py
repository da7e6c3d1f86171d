"""Watches one metric inside the compiled step: what to do about a non-finite value or a spike.

The decision is part of the step: it is taken on the device from values that are the same on all of them, and
its counters live in the state, so it cannot hang a sharded run, differ between devices, or be forgotten by a
restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from common.config import require
from common.metrics import Metric, all_finite
from common.task import Batch, Step, Task
from common.train_state import TrainState

ACTIONS = ("off", "alert", "skip", "stop")
COUNTERS = ("bad", "stops", "consecutive", "bad_steps")
_REMEMBERED = 8


@dataclass(frozen=True)
class GuardConfig:
    """What to do about bad updates.

    Attributes:
      metric: the step metric that is watched for spikes.
      nonfinite: the action where any metric of the step is not finite; a step should report its gradient
        norm, which is not finite where a gradient is not.
      spike: the action where `metric` spikes. Actions: off; alert (apply the update, write an event); skip
        (drop the update, write an event, go on with the next batch); stop (drop the update, save, end the run
        with exit code 3, at the latest after one more update).
      spike_factor: a value is a spike where it is above m + (spike_factor − 1)·|m|, m the median of the last
        `window` good values; that is spike_factor · m where m is positive.
      window: number of values the median is taken over; no spike is called before it is full.
      max_consecutive: so many bad updates in a row end the run whatever the action; looked at when the run
        logs or saves, unless an action is stop.
    """

    metric: str = "loss"
    nonfinite: str = "skip"
    spike: str = "off"
    spike_factor: float = 3.0
    window: int = 64
    max_consecutive: int = 20


class GuardState(struct.PyTreeNode):
    """What the guard carries from step to step.

    Attributes:
      bad, stops: int32, updates found bad, and those of them whose action was stop.
      consecutive: int32, bad updates in a row up to now.
      bad_steps: int32[8], the newest bad steps (0-based, newest first), −1 where there was none.
      history: float32[window], good values of the metric, a ring buffer; `seen` were put in so far.
    """

    bad: jax.Array
    stops: jax.Array
    consecutive: jax.Array
    bad_steps: jax.Array
    history: jax.Array
    seen: jax.Array


def check(config: GuardConfig) -> None:
    """Raises ConfigError for an impossible field."""
    for field in ("nonfinite", "spike"):
        value = getattr(config, field)
        require(value in ACTIONS, f"guard.{field}", value, f"must be one of {', '.join(ACTIONS)}")
    require(config.spike_factor > 1, "guard.spike_factor", config.spike_factor, "must be above 1")
    require(config.window >= 4, "guard.window", config.window, "must be at least 4")
    require(
        config.max_consecutive >= 1, "guard.max_consecutive", config.max_consecutive, "must be at least 1"
    )


def attach(task: Task, config: GuardConfig) -> Task:
    """The same task with guarded updates; apply it before `vmap_seeds`, so that each seed is judged alone."""
    check(config)
    if config.nonfinite == "off" and config.spike == "off":
        return task

    def init(key: jax.Array) -> TrainState:
        # Arrays of their own: a state that is donated to a step must not hold one buffer twice.
        bad, stops, consecutive, seen = (jnp.zeros((), jnp.int32) for _ in range(4))
        bad_steps, history = jnp.full((_REMEMBERED,), -1, jnp.int32), jnp.zeros((config.window,))
        guard = GuardState(bad, stops, consecutive, bad_steps, history, seen)
        return task.init(key).replace(guard=guard)

    return replace(task, init=init, step=_guarded(task.step, config))


def _guarded(step: Step, config: GuardConfig) -> Step:
    def guarded(state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, Any]]:
        new, metrics = step(state, batch)
        require(config.metric in metrics, "guard.metric", config.metric, f"must be one of {sorted(metrics)}")
        value = _scalar(metrics[config.metric], config.metric)
        # Of the metrics, not of the new parameters: the choice below then fuses into the update and is free.
        nonfinite = ~all_finite(metrics) & (config.nonfinite != "off")
        spike = _is_spike(state.guard, value, config) & ~nonfinite & (config.spike != "off")
        drop = (nonfinite & (config.nonfinite != "alert")) | (spike & (config.spike != "alert"))
        old = state.replace(step=new.step, guard=new.guard)
        chosen = jax.tree.map(lambda a, b: a if a is b else _where(drop, a, b), old, new)
        stop = (nonfinite & (config.nonfinite == "stop")) | (spike & (config.spike == "stop"))
        guard = _updated(state.guard, state.step, nonfinite | spike, stop, value)
        counters = {f"guard/{name}": getattr(guard, name) for name in COUNTERS}
        return chosen.replace(guard=guard), {**metrics, **counters}

    return guarded


def _scalar(metric: Any, name: str) -> jax.Array:
    computed = metric.compute() if isinstance(metric, Metric) else metric
    scalar = not isinstance(computed, Mapping) and jnp.ndim(computed) == 0
    require(scalar, "guard.metric", name, "must be a metric with one value")
    return jnp.asarray(computed, jnp.float32)


def _is_spike(guard: GuardState, value: jax.Array, config: GuardConfig) -> jax.Array:
    full = guard.seen >= config.window
    median = jnp.median(guard.history)
    return full & (value > median + (config.spike_factor - 1) * jnp.abs(median))


def _updated(
    guard: GuardState, step: jax.Array, bad: jax.Array, stop: jax.Array, value: jax.Array
) -> GuardState:
    good = ~bad & jnp.isfinite(value)
    slot = guard.seen % guard.history.shape[0]
    return GuardState(
        bad=guard.bad + bad,
        stops=guard.stops + stop,
        consecutive=jnp.where(bad, guard.consecutive + 1, 0),
        bad_steps=jnp.where(bad, jnp.roll(guard.bad_steps, 1).at[0].set(step), guard.bad_steps),
        history=jnp.where(good, guard.history.at[slot].set(value), guard.history),
        seen=guard.seen + good,
    )


def _where(drop: jax.Array, old: jax.Array, fresh: jax.Array) -> jax.Array:
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        return old  # the run's key never changes
    return jnp.where(drop, old, fresh)


@dataclass(frozen=True)
class Judgement:
    """What the host does about the counters read at a log step."""

    bad_steps: list[int]
    stop: str = ""


class Judge:
    """Turns the guard's counters, read one log step after the other, into new bad steps and a reason to stop.

    `start` is the guard's part of the state a run begins with: what it counts belongs to an earlier attempt
    and is not reported again.
    """

    def __init__(self, config: GuardConfig, start: GuardState | Mapping[str, Any]):
        self._config = config
        # Whether to be asked at every step: with a stop to make, the next log step is too late.
        self.prompt = "stop" in (config.nonfinite, config.spike)
        self._newest, self._stops = -1, 0
        if isinstance(start, GuardState):
            self._newest, self._stops = int(jnp.max(start.bad_steps)), int(jnp.sum(start.stops))

    def __call__(self, metrics: Mapping[str, Any]) -> Judgement:
        """Judges host `metrics`, whose values are scalars or one list entry per seed."""
        if "guard/bad" not in metrics:
            return Judgement([])
        new = sorted({int(step) for step in _flat(metrics["guard/bad_steps"]) if step > self._newest})
        self._newest = max([self._newest, *new])
        earlier, self._stops = self._stops, int(sum(_flat(metrics["guard/stops"])))
        if self._stops > earlier:
            return Judgement(new, f"bad update at step {new[-1]}")
        row, limit = int(max(_flat(metrics["guard/consecutive"]))), self._config.max_consecutive
        if row >= limit:
            return Judgement(new, f"{row} bad updates in a row (guard.max_consecutive={limit})")
        return Judgement(new)


def _flat(value: Any) -> list[float]:
    return [x for item in value for x in _flat(item)] if isinstance(value, list) else [value]
