"""`Task`: the only contract a paper fills in. `common.loop.fit` runs any of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from common.metrics import Metrics
from common.schedule import When
from common.sharding import ShardingRules
from common.train_state import TrainState

Batch = Any
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclass(frozen=True)
class Eval:
    """A measurement of a state: `fn(state)` gives named scalars, per-seed vectors, or numpy arrays to keep.

    Scalars and vectors (one value per seed) go to `metrics.jsonl`; arrays of more dimensions are written to
    `artifacts/<eval>_<step>.npz`. `when` decides at which global steps it runs.
    """

    fn: Callable[[TrainState], Mapping[str, Any]]
    when: When


@dataclass(frozen=True)
class Task:
    """What to train and what to measure.

    Attributes:
      init: pure function of a typed key; it must work under `jax.eval_shape`.
      step: pure update. `batches` feeds it; where `batches` is None it makes its own data and gets None.
      batches: the batch iterator that starts at a given global step; the same step gives the same batch.
      evals: measurements by name; a metric is logged as `<eval>/<metric>`.
      rules: how parameters are laid out on the mesh.
      examples_per_step: global examples one step consumes, logged as a rate.
      batch_axis: the dimension of batch leaves that is cut over devices.
      fallbacks: named ways to go on with another task from a state, e.g. a shallower network.
    """

    init: Callable[[jax.Array], TrainState]
    step: Step
    batches: Callable[[int], Iterator[Batch]] | None = None
    evals: Mapping[str, Eval] = field(default_factory=dict)
    rules: ShardingRules = field(default_factory=ShardingRules)
    examples_per_step: int = 0
    batch_axis: int = 0
    fallbacks: Mapping[str, Callable[[TrainState], tuple["Task", TrainState]]] = field(default_factory=dict)
