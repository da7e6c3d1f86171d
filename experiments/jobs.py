"""Runs configs as subprocesses, several at a time, each on its own share of the cores."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from ml_collections import ConfigDict

from common import runtime
from common.config import require, to_json
from common.workdir import is_done, saved_config


def run_all(configs: Mapping[str, ConfigDict], folder: Path, jobs: int = 0) -> dict[str, str]:
    """Trains each config in `folder/<name>`; finished ones are skipped. Gives {name: last line of its error}
    of those that failed.

    SIGINT and SIGTERM let the runs save their state and end, and raise KeyboardInterrupt when they have.

    Args:
      jobs: runs at a time; 0 is one a core, or one where there is a GPU or TPU.
    """
    require(jobs >= 0, "--jobs", jobs, "must be at least 1, or 0 to choose")
    todo = {name: config for name, config in configs.items() if not _is_finished(folder / name, config)}
    for name in configs.keys() - todo.keys():
        print(f"{name}: done, skipped", flush=True)
    slots: SimpleQueue[set[int] | None] = SimpleQueue()
    width = min(jobs or default_jobs(), max(len(todo), 1))
    for cores in _shares(width):
        slots.put(cores)

    children = _Children()

    def one(name: str) -> str:
        cores = slots.get()
        try:
            return _run(name, todo[name], folder / name, cores, children)
        finally:
            slots.put(cores)

    # Longest first, so that the last to end is short.
    order = sorted(todo, key=lambda name: -todo[name].run.steps)
    with _terminated_as_interrupted(), ThreadPoolExecutor(width) as pool:
        try:
            errors = dict(zip(order, pool.map(one, order), strict=True))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            children.end()
            raise
    return {name: error for name, error in errors.items() if error}


class _Children:
    """The processes that are running; after `end` there will be no more."""

    def __init__(self) -> None:
        self._lock, self._running, self._ended = threading.Lock(), set[subprocess.Popen](), False

    def run(self, command: list[str], **options: Any) -> int:
        """Starts a process and waits for its exit code."""
        with self._lock:
            if self._ended:
                return 0
            child = subprocess.Popen(command, **options)
            self._running.add(child)
        try:
            return child.wait()
        finally:
            with self._lock:
                self._running.discard(child)

    def end(self) -> None:
        """Asks all to save and end; the next call of `run_all` goes on from there."""
        with self._lock:
            self._ended = True
            for child in self._running:
                child.terminate()


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGINT raise KeyboardInterrupt: their defaults may leave the runs without a parent.

    A shell's background job is born with SIGINT ignored, and Python then leaves it so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_finished(workdir: Path, config: ConfigDict) -> bool:
    """Whether a run ended here that was asked for as many steps."""
    return is_done(str(workdir)) and saved_config(workdir).run.steps >= config.run.steps


def default_jobs() -> int:
    """One job per core on a CPU machine, one where an accelerator would be shared."""
    accelerated = shutil.which("nvidia-smi") is not None or Path("/dev/accel0").exists()
    return 1 if accelerated and os.environ.get("JAX_PLATFORMS") != "cpu" else len(_cores())


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _shares(width: int) -> list[set[int] | None]:
    """Disjoint sets of cores, one a job: jobs that share cores slow one another by more than their share."""
    cores = _cores()
    if width == 1 or not hasattr(os, "sched_setaffinity"):
        return [None] * width
    return [set(cores[i::width]) or {cores[i % len(cores)]} for i in range(width)]


def _run(name: str, config: ConfigDict, workdir: Path, cores: set[int] | None, children: _Children) -> str:
    """'' on success, else the last line of standard error."""
    workdir.parent.mkdir(parents=True, exist_ok=True)
    request, log = (workdir.parent / f"{name}{suffix}" for suffix in (".json", ".log"))
    request.write_text(to_json(config))
    command = [sys.executable, "-m", "experiments.train", f"--config={request}", f"--workdir={workdir}"]
    env = os.environ if cores is None else {**os.environ, runtime.CORES: ",".join(map(str, sorted(cores)))}
    started = time.time()
    with log.open("w") as output:
        code = children.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env)
    if code == 0 and _is_finished(workdir, config):
        seconds = time.time() - started
        print(
            f"{name}: {config.run.steps} steps, {config.run.num_seeds} seeds in {seconds:.0f} s", flush=True
        )
        return ""
    lines = log.read_text().strip().splitlines()
    error = lines[-1] if lines else f"exit code {code}"
    print(f"{name}: not finished (exit code {code}): {error}", flush=True)
    return error
