"""Trains the toy task in a process of its own, so that a test can signal, kill or starve it.

`python -m tests.common.run_toy --workdir=DIR [--devices=N] [--config.run.steps=6 …] [--fault=NAME:VALUE …]`
"""

import dataclasses
import os
import sys
import time

DEVICES = next((a.partition("=")[2] for a in sys.argv if a.startswith("--devices=")), "8")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

from common import runtime  # noqa: E402

runtime.configure()

import jax  # noqa: E402
import numpy as np  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_cpu_enable_async_dispatch", False)

from common import checkpoint, guard, schedule  # noqa: E402
from common.config import ConfigError, override, view  # noqa: E402
from common.loop import GuardStop, fit  # noqa: E402
from common.mesh import ParallelConfig, initialize_distributed, make_mesh  # noqa: E402
from common.task import Eval, Task  # noqa: E402
from common.watchdog import leave  # noqa: E402
from tests.common import toy  # noqa: E402


def main(arguments: list[str]) -> int:
    """Exit codes as those of `experiments.train`."""
    flags: dict[str, str] = {}
    faults: dict[str, float] = {}
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if name == "fault":
            fault, _, amount = value.partition(":")
            faults[fault] = float(amount)
        else:
            flags[name] = value
    workdir = flags.pop("workdir")
    flags.pop("devices", None)
    try:
        initialize_distributed()
        config = toy.config().unlock()
        override(config, {name.removeprefix("config."): value for name, value in flags.items()})
        config.lock()
        mesh = make_mesh(view(config, ParallelConfig, "parallel"))
        task = guard.attach(toy.build(config, mesh), view(config, guard.GuardConfig, "guard"))
        outcome = fit(with_faults(task, faults), config, workdir, mesh)
        if "sleep_at_end" in faults:
            time.sleep(faults["sleep_at_end"])
        digest = float(
            sum(np.abs(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(outcome.state.params))
        )
        print(f"outcome {outcome.reason} {outcome.step} {digest!r}", flush=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except GuardStop as error:
        print(f"guard: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"crash: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def with_faults(task: Task, faults: dict[str, float]) -> Task:
    """The task with what a test asked for:

    slow_step, slow_eval, slow_compile, slow_restore: seconds a batch, the eval at step 2, tracing the step,
    or loading takes. stuck_at, raise_at: the step (1, 2, …) whose batch never comes, or raises.
    """
    opened: list[int] = []

    def batches(start: int):
        opened.append(start)
        if len(opened) == 1:  # the peek for shapes
            yield from task.batches(start)
        for i, batch in enumerate(task.batches(start), start=start + 1):
            print(f"batch {i}", flush=True)
            time.sleep(faults.get("slow_step", 0))
            if i == faults.get("stuck_at"):
                time.sleep(1000)
            if i == faults.get("raise_at"):
                raise RuntimeError("a broken batch")
            yield batch

    def step(state, batch):
        print("tracing", flush=True)
        time.sleep(faults.get("slow_compile", 0))
        return task.step(state, batch)

    def fit_error(state):
        if int(state.step) == 2 and faults.get("slow_eval"):
            print("slow eval", flush=True)
            time.sleep(faults["slow_eval"])
        return task.evals["fit"].fn(state)

    load = checkpoint._load

    def slow_load(*args, **kwargs):
        print("slow restore", flush=True)
        time.sleep(faults["slow_restore"])
        return load(*args, **kwargs)

    if "slow_restore" in faults:
        checkpoint._load = slow_load
    evals = {"fit": Eval(fit_error, schedule.every(2))}
    return dataclasses.replace(task, batches=batches, step=step, evals=evals)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
