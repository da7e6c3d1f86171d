"""Runs configs as subprocesses, several at a time, each on its own share of the cores."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from ml_collections import ConfigDict

from common import runtime
from common.config import require, to_json
from common.workdir import is_done


def run_all(configs: Mapping[str, ConfigDict], folder: Path, jobs: int = 0) -> dict[str, str]:
    """Trains each config in `folder/<name>`; finished ones are skipped. Gives {name: last line of its error}
    of those that failed.

    Args:
      jobs: runs at a time; 0 is one a core, or one where there is a GPU or TPU.
    """
    require(jobs >= 0, "--jobs", jobs, "must be at least 1, or 0 to choose")
    todo = {name: config for name, config in configs.items() if not is_done(str(folder / name))}
    for name in configs.keys() - todo.keys():
        print(f"{name}: done, skipped", flush=True)
    slots: SimpleQueue[set[int] | None] = SimpleQueue()
    width = min(jobs or default_jobs(), max(len(todo), 1))
    for cores in _shares(width):
        slots.put(cores)

    children: set[subprocess.Popen] = set()

    def one(name: str) -> str:
        cores = slots.get()
        try:
            return _run(name, todo[name], folder / name, cores, children)
        finally:
            slots.put(cores)

    # Longest first, so that the last to end is short.
    order = sorted(todo, key=lambda name: -todo[name].run.steps)
    pool = ThreadPoolExecutor(width)
    try:
        errors = dict(zip(order, pool.map(one, order), strict=True))
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(children):
            child.terminate()  # each saves its state, and the next call goes on from there
        raise
    finally:
        pool.shutdown()
    return {name: error for name, error in errors.items() if error}


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


def _run(
    name: str, config: ConfigDict, workdir: Path, cores: set[int] | None, children: set[subprocess.Popen]
) -> str:
    """'' on success, else the last line of standard error."""
    workdir.parent.mkdir(parents=True, exist_ok=True)
    request, log = (workdir.parent / f"{name}{suffix}" for suffix in (".json", ".log"))
    request.write_text(to_json(config))
    command = [sys.executable, "-m", "experiments.train", f"--config={request}", f"--workdir={workdir}"]
    env = os.environ if cores is None else {**os.environ, runtime.CORES: ",".join(map(str, sorted(cores)))}
    started = time.time()
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env)
        children.add(child)
        code = child.wait()
        children.discard(child)
    if code == 0 and is_done(str(workdir)):
        seconds = time.time() - started
        print(
            f"{name}: {config.run.steps} steps, {config.run.num_seeds} seeds in {seconds:.0f} s", flush=True
        )
        return ""
    lines = log.read_text().strip().splitlines()
    error = lines[-1] if lines else f"exit code {code}"
    print(f"{name}: not finished (exit code {code}): {error}", flush=True)
    return error
