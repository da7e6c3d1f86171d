"""Optional trackers: TensorBoard, and one adapter for W&B and trackio. The local files stay the truth.

A package is imported only when its name is configured; a missing one is a one-line error before any compute.
"""

import importlib
import math
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from common.config import ConfigError, nearest

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
INSTALL = "pip install 'triptych[track]'"


class Tracker(Protocol):
    """Takes scalars of one step; steps may come out of order within a log interval."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def start(
    names: Sequence[str], workdir: pathlib.Path, attempt: int, project: str, config: Mapping[str, Any]
) -> dict[str, Tracker]:
    """Starts the trackers `names`. Raises ConfigError for an unknown, missing or unwilling one."""
    modules = import_packages(names)
    started: dict[str, Tracker] = {}
    for name in names:
        try:
            if name == "tensorboard":
                started[name] = TensorBoard(modules[name], workdir / "tensorboard", attempt)
            else:
                # W&B puts its files into the current folder unless told otherwise; trackio has its own place.
                place = {"dir": str(workdir)} if name == "wandb" else {}
                described = {"project": project, "config": dict(config), **place}
                started[name] = RunTracker(modules[name], workdir.name, attempt, described)
        except Exception as error:  # packages raise their own types: not logged in, no network, bad project
            for tracker in started.values():
                tracker.close()
            raise ConfigError(f"trackers={name!r}: could not be started ({_one_line(error)})") from error
    return started


def import_packages(names: Sequence[str]) -> dict[str, types.ModuleType]:
    """The modules behind tracker `names`. Raises ConfigError for an unknown name or a missing package."""
    if isinstance(names, str):
        raise ConfigError(f"trackers={names!r}: must be a tuple of names, of {', '.join(_PACKAGES)}")
    modules = {}
    for name in names:
        if name not in _PACKAGES:
            raise ConfigError(f"trackers={name!r}: unknown tracker{nearest(str(name), _PACKAGES)}")
        try:
            modules[name] = importlib.import_module(_PACKAGES[name])
        except ImportError as error:
            reason = f"{_PACKAGES[name]} is not installed ({_one_line(error)})"
            raise ConfigError(f"trackers={name!r}: {reason}; run {INSTALL}") from error
    return modules


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class TensorBoard:
    """Event files under `<workdir>/tensorboard`; a resumed run purges what it is about to write again."""

    def __init__(self, module: types.ModuleType, logdir: pathlib.Path, attempt: int):
        self._module, self._writer = module, None
        self._place = {"logdir": str(logdir), "filename_suffix": f".{attempt}"}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:  # the first step is known only now, and purging needs it
            self._writer = self._module.SummaryWriter(**self._place, purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class RunTracker:
    """W&B or trackio: one tracker run for each attempt, grouped by workdir.

    One run for all attempts would lose the rows of a resumed run, whose steps start below the last one seen.
    """

    def __init__(self, module: types.ModuleType, name: str, attempt: int, options: Mapping[str, Any]):
        self._module = module
        self._run = module.init(name=f"{name}-attempt{attempt}", group=name, **options)
        self._own_step = hasattr(self._run, "define_metric")
        if self._own_step:
            # W&B drops a row whose built-in step is below the last one; its own step metric takes any order.
            self._run.define_metric("*", step_metric="global_step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._own_step:
            self._run.log({"global_step": step, **scalars})
        else:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._module.finish()


def scalars_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers; a list over seeds gives its mean, NaN if one of them is not finite."""
    found = {}
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(item, float | int) for item in value):
            value = math.fsum(value) / len(value) if all(map(math.isfinite, value)) else math.nan
        if isinstance(value, float | int) and not isinstance(value, bool):
            found[name] = float(value)
    return found
