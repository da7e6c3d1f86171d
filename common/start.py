"""From a task to a compiled step and a state to begin with.

The state comes from the first of these that exists: a checkpoint in the workdir, `run.resume_from` (a whole
state of another run), `run.init_from` (parameters only), the task's `init`.
"""

from dataclasses import dataclass
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import profile
from common.checkpoint import CheckpointConfig, Checkpoints, restore_params
from common.config import require, view
from common.mesh import ParallelConfig, from_lead, to_global
from common.parallel import compile_step
from common.sharding import state_shardings
from common.task import Step, Task
from common.train_state import TrainState
from common.watchdog import Watchdog
from common.writer import Writer


@dataclass(frozen=True)
class RunConfig:
    """Length, seed and cadence of a run.

    Attributes:
      steps: updates in total.
      seed, num_seeds: seeds `seed` … `seed + num_seeds − 1` are trained side by side (`common.seeds`).
      log_every, save_every: steps between rows and between checkpoints; the last step has both.
      resume_from: a workdir whose newest state a new run begins with.
      init_from: a workdir or checkpoint whose parameters a new run begins with, at step 0.
      trackers: any of tensorboard, wandb, trackio.
      matmul_precision: default, high or highest. By default a TPU multiplies float32 matrices in bfloat16 and
        a GPU in TF32; highest is float32 everywhere, as on CPU.
      debug: run the step without compiling it, and stop at the first NaN.
      stall_timeout: end the run when a step, evaluation, compilation or restore takes more seconds; 0 is off.
    """

    steps: int = 1000
    seed: int = 0
    num_seeds: int = 1
    log_every: int = 50
    save_every: int = 1000
    resume_from: str = ""
    init_from: str = ""
    trackers: tuple[str, ...] = ()
    matmul_precision: str = "default"
    debug: bool = False
    stall_timeout: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """A state on the mesh, its step, and the function that advances it."""

    state: TrainState
    step: int
    compiled: Any
    resumed: bool


def run_key(run: RunConfig) -> jax.Array:
    """The run's typed key; with several seeds an array of the keys of seeds `seed`, `seed + 1`, …"""
    require(run.num_seeds >= 1, "run.num_seeds", run.num_seeds, "must be at least 1")
    last = run.seed + run.num_seeds - 1  # a larger one would wrap to a small one
    require(run.seed >= 0 and last < 2**32, "run.seed", run.seed, "must be between 0 and 2**32 − num_seeds")
    keys = [jax.random.key(run.seed + i) for i in range(run.num_seeds)]
    return keys[0] if run.num_seeds == 1 else jax.numpy.stack(keys)


def prepare(
    task: Task, config: ConfigDict, mesh: Mesh, checkpoints: Checkpoints, writer: Writer, watchdog: Watchdog
) -> Prepared:
    """Shards, restores or initialises the state and compiles the step.

    Raises: ConfigError for a checkpoint that does not fit or a step that does not fit into memory.
    """
    run, parallel = view(config, RunConfig, "run"), view(config, ParallelConfig, "parallel")
    require(run.steps >= 0, "run.steps", run.steps, "must be at least 0")
    require(
        not run.debug or parallel.mode == "jit", "parallel.mode", parallel.mode, "run.debug needs mode=jit"
    )
    key = run_key(run)
    shapes = jax.eval_shape(task.init, key)
    shardings = state_shardings(shapes, mesh, task.rules)
    watchdog.beat("restore")
    state, resumed = _first_state(task, run, key, shapes, shardings, checkpoints, writer)
    step = int(state.step)
    watchdog.beat("restored")
    require(from_lead(step) == step, "checkpoint", step, "process 0 restored another step")
    require(step <= run.steps, "run.steps", run.steps, f"the checkpoint is already at step {step}")
    writer.event(step, "start", "resumed" if resumed else "new run", devices=jax.device_count())
    if step == run.steps:
        return Prepared(state, step, None, resumed)
    if run.debug:
        return Prepared(state, step, _uncompiled(task.step), resumed)
    batch = None
    if task.batches is not None and (batch := batch_shapes(task, mesh, step)) is None:
        return Prepared(state, step, None, resumed)  # the data ended before this step
    watchdog.beat("compilation")
    compiled = compile_step(
        task.step, mesh, parallel.mode, _abstract(state), shardings, batch, task.batch_axis
    )
    cost = profile.cost_of(compiled, shapes.params, mesh.local_devices[0])
    writer.event(step, "compiled", profile.describe(cost), flops=cost.flops, memory=cost.memory)
    profile.check_fits(cost)
    return Prepared(state, step, compiled, resumed)


def _uncompiled(step: Step) -> Step:
    def run(state: TrainState, batch: Any) -> Any:
        with jax.disable_jit():
            return step(state, batch)

    return run


def _first_state(
    task: Task,
    run: RunConfig,
    key: jax.Array,
    shapes: Any,
    shardings: Any,
    checkpoints: Checkpoints,
    writer: Writer,
) -> tuple[TrainState, bool]:
    step, state, damaged = -1, None, []
    resumed = bool(checkpoints.steps())
    if resumed:
        step, state, damaged = checkpoints.restore_newest(shapes, shardings)
    elif run.resume_from:
        source = Checkpoints(epath.Path(run.resume_from) / "checkpoints", CheckpointConfig())
        require(bool(source.steps()), "run.resume_from", run.resume_from, "holds no complete checkpoint")
        _, state, damaged = source.restore_newest(shapes, shardings)
    for note in checkpoints.incomplete() + damaged:
        writer.event(max(step, 0), "checkpoint_skipped", note)
    checkpoints.discard(step)
    if state is not None:
        return state, resumed
    state = jax.jit(task.init, out_shardings=shardings)(key)
    if run.init_from:
        params = restore_params(run.init_from, shapes.params, shardings.params)
        state = state.replace(params=params)
    return state, False


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def batch_shapes(task: Task, mesh: Mesh, step: int) -> Any:
    """Shapes of the global batch, from the first one, checked against the mesh; None if there is none."""
    batch = next(task.batches(step), None) if task.batches is not None else None
    if batch is None:
        return None
    return _abstract(to_global(batch, mesh, task.batch_axis))
