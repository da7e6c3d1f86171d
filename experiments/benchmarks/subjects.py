"""What the foundation benchmark times: the compiled step of a config, the loop around it, and the sampler."""

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from common import profile
from common.config import view
from common.loop import fit
from common.mesh import ParallelConfig, make_mesh, to_global
from common.parallel import compile_step
from common.sharding import state_shardings
from common.start import batch_shapes, run_key
from common.writer import read_metrics
from diffusion_mem.process import NoisePredictor, Process
from diffusion_mem.sampler import ddim
from experiments.tasks import build


class Subject:
    """A config's task, its compiled step, a state and one resident batch."""

    def __init__(self, config: ConfigDict):
        self.config = config
        parallel = view(config, ParallelConfig, "parallel")
        self.mesh = make_mesh(parallel)
        self.task = build(config, self.mesh)
        if self.task.batches is None:
            raise ValueError(f"task {config.task}: makes its own data; there is no batch to keep resident")
        shapes = jax.eval_shape(self.task.init, run_key(config.run))
        shardings = state_shardings(shapes, self.mesh, self.task.rules)
        self.state = jax.jit(self.task.init, out_shardings=shardings)(run_key(config.run))
        batch = batch_shapes(self.task, self.mesh, 0)
        self.compiled = compile_step(
            self.task.step, self.mesh, parallel.mode, shapes, shardings, batch, self.task.batch_axis
        )
        self.cost = profile.cost_of(self.compiled, shapes.params, self.mesh.local_devices[0])
        self.batch = to_global(next(self.task.batches(0)), self.mesh, self.task.batch_axis)

    def bare(self, steps: int) -> float:
        """Seconds per step of the compiled step alone, over so many, on the resident batch."""
        state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for _ in range(steps):
            previous, (state, metrics) = metrics, self.compiled(state, self.batch)
            jax.block_until_ready(previous)  # as the loop does: one step in flight, the next dispatched
        jax.block_until_ready((state, metrics))
        seconds = (time.perf_counter() - start) / steps
        self.state = state
        return seconds

    def looped(self) -> float:
        """Seconds per step inside `fit`: data, logging and guard, without evaluations and checkpoints.

        Between the first and the last logged row; both are stamped when their step has ended.
        """
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            fit(replace(self.task, evals={}), self.config, folder, self.mesh)
            rows = read_metrics(folder, kind="train")
        return (rows[-1]["time"] - rows[0]["time"]) / (rows[-1]["step"] - rows[0]["step"])


def matmul_seconds() -> float:
    """Seconds for one GFLOP of matrix product on the default device."""
    return 1e9 / profile.matmul_rate(repeats=1)


def jax_sampler(
    predict: NoisePredictor, params: Any, process: Process, num_steps: int
) -> Callable[[np.ndarray], np.ndarray]:
    """DDIM from a given starting noise, to host arrays."""
    compiled = jax.jit(partial(ddim, predict, num_steps=num_steps))
    return lambda x_init: np.asarray(compiled(params, process, x_init))


def seconds_of(sample: Callable[[np.ndarray], np.ndarray], x_init: np.ndarray) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    sample(x_init)
    return time.perf_counter() - start
