"""Several seeds in one program: small networks share one compile and one dispatch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from common.config import require
from common.sharding import ShardingRules
from common.task import Batch, Eval, Task
from common.train_state import TrainState

# `step` counts for all seeds at once; everything else has a leading seed axis.
_AXES = TrainState(step=None, params=0, opt_state=0, key=0, extra=0, guard=0)  # type: ignore[arg-type]


def vmap_seeds(tasks: Sequence[Task]) -> Task:
    """One task that trains `len(tasks)` seeds of the same network side by side.

    The tasks may differ in data and evaluation, not in step or shapes. Every leaf of the state except `step`,
    every batch leaf and every metric has a leading axis of seeds; batches are cut over devices along their
    second axis. `init` takes an array of keys, one a seed. A seed's keys and batches are those it has alone,
    so results agree to rounding with separate runs.
    """
    require(len(tasks) >= 1, "run.num_seeds", len(tasks), "must be at least 1")
    first = tasks[0]

    def init(keys: jax.Array) -> TrainState:
        return jax.vmap(first.init, out_axes=_AXES)(keys)

    def step(state: TrainState, batch: Batch) -> Any:
        return jax.vmap(first.step, in_axes=(_AXES, 0), out_axes=(_AXES, 0))(state, batch)

    evals = {name: Eval(_stacked(name, tasks), first.evals[name].when) for name in first.evals}
    return replace(
        first,
        init=init,
        step=step,
        batches=_zipped([task.batches for task in tasks]),
        evals=evals,
        rules=_shifted(first.rules),
        examples_per_step=first.examples_per_step * len(tasks),
        batch_axis=1,
        fallbacks={},
    )


def _shifted(rules: ShardingRules) -> ShardingRules:
    """The same rules for leaves with a leading seed axis, which stays whole."""
    return replace(rules, rules=tuple((pattern, (None, *spec)) for pattern, spec in rules.rules))


def _zipped(
    streams: Sequence[Callable[[int], Iterator[Batch]] | None],
) -> Callable[[int], Iterator[Batch]] | None:
    starts = [stream for stream in streams if stream is not None]
    if not starts:
        return None

    def batches(start_step: int) -> Iterator[Batch]:
        for parts in zip(*(start(start_step) for start in starts), strict=True):
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

    return batches


def _stacked(name: str, tasks: Sequence[Task]) -> Callable[[TrainState], Mapping[str, Any]]:
    """Evaluates each seed with its own task; scalars become vectors over seeds, arrays get a leading axis."""

    def evaluate(state: TrainState) -> Mapping[str, Any]:
        results = [task.evals[name].fn(take_seed(state, i)) for i, task in enumerate(tasks)]
        return {key: np.stack([np.asarray(result[key]) for result in results]) for key in results[0]}

    return evaluate


def take_seed(state: TrainState, index: int) -> TrainState:
    """The state of one seed, shaped as in a run of its own."""
    parts = jax.tree.map(lambda x: x[index], state.replace(step=()))
    return parts.replace(step=state.step)
