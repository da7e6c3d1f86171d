"""Checkpoints: the only file that imports orbax.

A state is saved as a flat {path: array} tree, so that what is on disk can be compared with what a run needs
by name and shape, leaf by leaf, before anything is loaded. Each checkpoint is a folder `checkpoints/<step>`
that appears whole (orbax renames a temporary folder) and is then sealed; one that does not match its seal is
not used.
"""

import logging
import math
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from etils import epath

from common import seal
from common.config import ConfigError, require
from common.mesh import is_lead
from common.seal import CorruptCheckpoint, first_line
from common.sharding import path_of

PyTree = Any
# Orbax logs the traceback of a failed write once per layer; the error itself reaches us.
logging.getLogger("absl").addFilter(
    lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname
)


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are kept.

    Attributes:
      keep: the newest so many are kept.
      best_metric: the checkpoint with the best value of this eval metric is kept as well; "" is off.
      best_mode: whether the best value is the "min" or the "max".
    """

    keep: int = 2
    best_metric: str = ""
    best_mode: str = "min"


def check(config: CheckpointConfig) -> None:
    """Raises ConfigError for an impossible field."""
    require(config.keep >= 1, "checkpoint.keep", config.keep, "must be at least 1")
    mode = config.best_mode
    require(mode in ("min", "max"), "checkpoint.best_mode", mode, "must be min or max")


class Checkpoints:
    """The checkpoints of one run. Saving is asynchronous; `wait`, or the next `save`, raises its errors."""

    def __init__(self, folder: epath.PathLike, config: CheckpointConfig):
        check(config)
        self.folder, self._config = _absolute(folder), config
        self._pending: tuple[int, Future[None]] | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint")
        # Saved steps and their metrics, in memory: while the lead seals and prunes, the disk may answer each
        # process differently, and they must all decide alike.
        self._saved = {step: self._metrics(step) for step in self.steps()}

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first; unsealed folders are not complete."""
        if not self.folder.exists():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit() and seal.is_sealed(p))

    def save(self, step: int, state: PyTree, metrics: Mapping[str, float] | None = None) -> None:
        """Starts saving `state` as checkpoint `step`; a complete one only gets new `metrics`.

        `metrics`: the eval metrics measured on this very state, for `best_metric`.
        """
        self.wait()
        if step in self._saved:
            if metrics:
                self._saved[step] = dict(metrics)
                if is_lead():
                    seal.write(self.folder / str(step), metrics)
            return
        target = self.folder / str(step)
        if is_lead() and target.exists():  # left behind by a run that was killed before it was sealed
            target.rmtree()
        # On CPU orbax may write from the live buffers, which the next step's donation would overwrite.
        copy = jax.default_backend() == "cpu"
        leaves = {path: leaf.copy() if copy else leaf for path, leaf in flatten(state).items() if leaf.size}
        try:
            response = ocp.save_async(target, leaves)
        except Exception as error:
            raise self._failure(step, error) from error
        self._saved[step] = dict(metrics or {})
        self._pending = (step, self._background.submit(self._complete, step, response))

    def _complete(self, step: int, response: Any) -> None:
        """Seals a checkpoint as soon as it is written: a run killed before its next save has it."""
        response.result()
        if is_lead():
            seal.write(self.folder / str(step), self._saved[step])

    def wait(self) -> None:
        """Ends the save in progress and drops what is no longer kept. Raises OSError if it failed."""
        if self._pending is None:
            return
        (step, completed), self._pending = self._pending, None
        try:
            completed.result()
        except Exception as error:
            raise self._failure(step, error) from error
        self._prune()

    def _failure(self, step: int, error: Exception) -> OSError:
        self._saved.pop(step, None)
        kept = self.steps()
        last = f"the last complete one is {kept[-1]}" if kept else "there is no earlier one"
        return OSError(
            f"checkpoint {self.folder / str(step)} could not be written ({first_line(error)}); {last}"
        )

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether `metrics` hold a `best_metric` that is better than those of all kept checkpoints."""
        best = self.best()
        score = self._score(metrics)
        return math.isfinite(score) and (best is None or score < self._score(self._saved[best]))

    def best(self) -> int | None:
        """The step with the best value of `best_metric`; NaN is never best; None if nothing was measured."""
        scores = {step: self._score(metrics) for step, metrics in self._saved.items()}
        measured = [step for step, score in scores.items() if math.isfinite(score)]
        return min(measured, key=lambda step: (scores[step], -step)) if measured else None

    def _score(self, metrics: Mapping[str, float]) -> float:
        """The smaller, the better."""
        value = metrics.get(self._config.best_metric, math.nan)
        return value if self._config.best_mode == "min" else -value

    def _metrics(self, step: int) -> dict[str, float]:
        try:
            return seal.read(self.folder / str(step)).metrics
        except CorruptCheckpoint:
            return {}

    def _prune(self) -> None:
        keep = {*sorted(self._saved)[-self._config.keep :], self.best()}
        for step in self._saved.keys() - keep:
            del self._saved[step]
            if is_lead():
                seal.remove(self.folder / str(step))  # first: a kill half-way then leaves no false checkpoint
                (self.folder / str(step)).rmtree()

    def restore_newest(self, like: PyTree, shardings: PyTree) -> tuple[int, PyTree, list[str]]:
        """(step, state, notes) of the newest usable checkpoint; `notes` says which were passed over and why.

        Raises: ConfigError if a checkpoint holds other names or shapes than `like`, or if none can be read.
        """
        notes = []
        for step in reversed(self.steps()):
            try:
                return step, restore(self.folder / str(step), like, shardings), notes
            except CorruptCheckpoint as error:
                notes.append(f"checkpoint {step} cannot be used: {error}")
        raise CorruptCheckpoint(f"no usable checkpoint in {self.folder}: {'; '.join(notes)}")

    def incomplete(self) -> list[str]:
        """One line for each checkpoint whose writing a killed run did not finish."""
        why = "it was being written when an earlier run ended"
        return [f"checkpoint {path.name} is incomplete: {why}" for path in self._unsealed()]

    def discard(self, keep_up_to: int) -> None:
        """Removes what is newer than step `keep_up_to` or not sealed: it would be in the way of new saves."""
        self._saved = {step: metrics for step, metrics in self._saved.items() if step <= keep_up_to}
        if not is_lead():
            return
        for path in [*self._unsealed(), *(self.folder / str(s) for s in self.steps() if s > keep_up_to)]:
            path.rmtree()

    def _unsealed(self) -> list[epath.Path]:
        if not self.folder.exists():
            return []
        folders = [path for path in sorted(self.folder.iterdir()) if path.is_dir()]
        return [path for path in folders if not (path.name.isdigit() and seal.is_sealed(path))]


def _absolute(folder: epath.PathLike) -> epath.Path:
    """Orbax refuses a relative path, and says so only when it has written half a checkpoint."""
    path = os.fspath(folder)
    return epath.Path(path if "://" in path else os.path.abspath(path))


def flatten(state: PyTree) -> dict[str, jax.Array]:
    """{path: leaf} of a state; paths do not depend on how containers are typed or keyed.

    Raises: ConfigError when two leaves have one path, as those of {"a/b": x} and {"a": {"b": x}}.
    """
    pairs = [(path_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
    flat = dict(pairs)
    require(len(flat) == len(pairs), "state", sorted(flat), "two leaves have the same path")
    return flat


def restore(folder: epath.PathLike, like: PyTree, shardings: PyTree) -> PyTree:
    """Loads a state shaped as `like` (ShapeDtypeStructs) onto `shardings`, whatever devices saved it.

    Raises: ConfigError naming each path that is missing, left over or of another shape; CorruptCheckpoint.
    """
    folder = _absolute(folder)
    seal.verify(folder)
    return jax.tree.unflatten(jax.tree.structure(like), _load(folder, _targets(like, shardings)))


def restore_params(folder: str, like: PyTree, shardings: PyTree) -> PyTree:
    """Loads only `params` (for `run.init_from`): `like` and `shardings` are those of the parameters.

    `folder` is a checkpoint, or a workdir, whose newest checkpoint is taken.
    """
    path = _absolute(folder)
    require(path.exists(), "run.init_from", folder, "no such folder")
    if not seal.is_sealed(path):
        steps = Checkpoints(str(path / "checkpoints"), CheckpointConfig()).steps()
        require(bool(steps), "run.init_from", folder, "holds no complete checkpoint")
        path = path / "checkpoints" / str(steps[-1])
    seal.verify(path)
    leaves = _load(path, _targets({"params": like}, shardings), only="params/")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _targets(like: PyTree, shardings: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    leaves = zip(flatten(like).items(), jax.tree.leaves(shardings), strict=True)
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for (path, x), sharding in leaves}


def _load(folder: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct], only: str = "") -> list[jax.Array]:
    """The leaves `wanted`, in order. `only`: the part of the checkpoint that must match, e.g. "params/"."""
    # Orbax refuses empty arrays: they are not stored.
    stored = {path: target for path, target in wanted.items() if math.prod(target.shape)}
    empty = {
        path: jax.device_put(np.zeros(target.shape, target.dtype), target.sharding)
        for path, target in wanted.items()
        if path not in stored
    }
    try:
        saved: Any = ocp.metadata(folder).metadata
    except Exception as error:
        raise CorruptCheckpoint(f"{folder} has unreadable metadata ({first_line(error)})") from error
    _compare(folder, stored, {path: meta for path, meta in saved.items() if path.startswith(only)})
    context = ocp.Context()
    # Each process reads its own shards and waits for no other: one that is slow is then the one that is late.
    context.multiprocessing.active_processes = {jax.process_index()}
    context.multiprocessing.primary_host = jax.process_index()
    context.pytree.loading.partial_load = bool(only)
    try:
        with context:
            loaded = ocp.load(folder, stored)
    except Exception as error:
        raise CorruptCheckpoint(f"{folder} is unreadable ({first_line(error)})") from error
    return [{**loaded, **empty}[path] for path in wanted]


def _compare(
    folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], saved: Mapping[str, Any]
) -> None:
    """Raises ConfigError for the first differences in names, shapes or types between checkpoint and run."""
    problems = []
    for path, target in wanted.items():
        if path not in saved:
            problems.append(f"{path} is missing from it")
            continue
        if jax.numpy.issubdtype(target.dtype, jax.dtypes.prng_key):  # stored as raw words
            target = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(target.shape, target.dtype))
        ours, theirs = _signature(target), _signature(saved[path])
        if ours != theirs:
            problems.append(f"{path} is {theirs} in it and {ours} in this run")
    problems += [f"{path} is in it, but not in this run" for path in saved if path not in wanted]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        first = "; ".join(problems[:3])
        raise ConfigError(f"checkpoint {folder} does not fit this config: {first}{more}")


def _signature(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
