"""What the tests of whole runs share: the toy task through `fit`, here or in a process of its own."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np

from common import guard
from common.config import view
from common.loop import Outcome, fit
from common.mesh import ParallelConfig, make_mesh
from common.sharding import ShardingRules
from common.task import Task
from common.writer import read_events, read_metrics
from tests.common import toy

ROOT = pathlib.Path(__file__).parents[2]
TIMES = ("time", "attempt", "steps_per_second", "examples_per_second")


def prepare(devices: int = 8, evals=None, arrays=None, **overrides) -> tuple:
    """(task, config, mesh) of the guarded toy task on the first `devices` devices."""
    config = toy.config(**overrides)
    mesh = make_mesh(view(config, ParallelConfig, "parallel"), jax.devices()[:devices])
    task = toy.build(config, mesh, evals=evals, arrays=arrays)
    return guard.attach(task, view(config, guard.GuardConfig, "guard")), config, mesh


def run(workdir: pathlib.Path, change=lambda task: task, **kwargs) -> Outcome:
    """The toy task to its end; `change` alters the task."""
    task, config, mesh = prepare(**kwargs)
    return fit(change(task), config, str(workdir), mesh)


def sharded(task: Task) -> Task:
    """The task whose parameters, small as they are, are split over the fsdp axis."""
    return dataclasses.replace(task, rules=ShardingRules(fsdp_min_size=8))


def hashed(task: Task, log: list[tuple[int, int]]) -> Task:
    """The task that appends (step, hash of the batch) to `log`, the peek for shapes left out."""
    streams: list[int] = []

    def batches(start: int) -> Iterator:
        streams.append(start)
        first = len(streams) % 2 == 1  # each attempt opens the stream twice: for shapes, then for training
        for i, batch in enumerate(task.batches(start), start=start):
            if not first:
                log.append((i, hash(batch["x"].tobytes() + batch["y"].tobytes())))
            yield batch

    return dataclasses.replace(task, batches=batches)


def assert_same(a, b) -> None:
    """Bit for bit the same tree, of the same structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    paths = jax.tree_util.tree_leaves_with_path(a)
    for (path, x), y in zip(paths, jax.tree.leaves(b), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


def curve(workdir: pathlib.Path) -> list[dict]:
    """The clean curve of a run without what depends on the clock."""
    rows = read_metrics(workdir)
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def events(workdir: pathlib.Path, name: str) -> list[dict]:
    return [event for event in read_events(workdir) if event["event"] == name]


def checkpoints(workdir: pathlib.Path) -> list[int]:
    return sorted(int(p.parent.name) for p in workdir.glob("checkpoints/*/seal.json"))


class Process:
    """`tests.common.run_toy` in a process of its own, whose output can be read meanwhile."""

    def __init__(
        self, workdir: pathlib.Path, *arguments: str, env: dict[str, str] | None = None, devices: int = 8
    ):
        self.log = workdir.parent / f"{workdir.name}.{time.monotonic_ns()}.log"
        command = [
            sys.executable,
            "-u",
            "-m",
            "tests.common.run_toy",
            f"--workdir={workdir}",
            f"--devices={devices}",
        ]
        with open(self.log, "w") as out:
            self._process = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **(env or {})}
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while text not in self.output:
            assert self._process.poll() is None, f"ended before {text!r}: {self.output}"
            assert time.monotonic() < end, f"no {text!r} in time: {self.output}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code."""
        return self._process.wait(timeout)

    def end(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def process(workdir: pathlib.Path, *arguments: str, **kwargs) -> Iterator[Process]:
    """A `Process` that does not outlive the block."""
    started = Process(workdir, *arguments, **kwargs)
    try:
        yield started
    finally:
        started.end()
