"""From a config to its task, with the guard and the side-by-side seeds in place."""

import importlib
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import config as config_lib
from common import guard
from common.config import require
from common.seeds import vmap_seeds
from common.start import RunConfig, run_key
from common.task import Task

_ROOT = Path(__file__).parents[1]


def papers() -> list[str]:
    """The packages beside this one that have a `task.py` to build from."""
    return sorted(file.parent.name for file in _ROOT.glob("*/task.py") if file.parent.name != "common")


def build(config: ConfigDict, mesh: Mesh) -> Task:
    """The task that `config.task` names; with `run.num_seeds` > 1 the vmapped task of seeds `run.seed`,
    `run.seed + 1`, …"""
    known = papers()
    task = config.task if "task" in config else None
    require(task in known, "config.task", task, f"must be one of {', '.join(known)}")
    run_key(config_lib.view(config, RunConfig, "run"))  # refuses seeds there cannot be
    package = importlib.import_module(f"{task}.task")
    guards = config_lib.view(config, guard.GuardConfig, "guard")
    seeds = range(config.run.seed, config.run.seed + config.run.num_seeds)
    tasks = [guard.attach(package.build(with_seed(config, seed), mesh), guards) for seed in seeds]
    return tasks[0] if len(tasks) == 1 else vmap_seeds(tasks)


def with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """A locked copy for one seed alone."""
    alone = config.copy_and_resolve_references()
    alone.run.seed, alone.run.num_seeds = seed, 1
    return alone.lock()
