"""`fit`: runs any task from its config to DONE.

The order inside an iteration is frozen: evaluate → save → step → log the step before → guard. Evaluation and
checkpoint of step k see the same state, and reading step k−1's metrics after step k was dispatched never
makes the device wait.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import checkpoint, guard, metrics, profile, schedule
from common.checkpoint import CheckpointConfig, Checkpoints
from common.config import require, view
from common.mesh import from_lead, is_lead, to_global
from common.signals import StopSignal
from common.start import Prepared, RunConfig, prepare
from common.task import Batch, Task
from common.trackers import import_packages
from common.train_state import TrainState
from common.watchdog import Watchdog
from common.workdir import Workdir, open_workdir
from common.writer import Writer, read_metrics

_NOT_LOGGED = ("guard/stops", "guard/consecutive", "guard/bad_steps")


class GuardStop(Exception):
    """The guard ended the run; the state is saved, without the updates that were dropped."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the state, its step, and why ("finished", "preempted" or "data ended")."""

    state: TrainState
    step: int
    reason: str


def fit(task: Task, config: ConfigDict, workdir: str, mesh: Mesh) -> Outcome:
    """Trains `task` to `config.run.steps` in `workdir`, going on where an earlier attempt stopped.

    Raises: ConfigError before any compute for anything wrong with config or workdir; GuardStop; OSError when
    a checkpoint cannot be written (earlier ones stay).
    """
    run, kept = view(config, RunConfig, "run"), view(config, CheckpointConfig, "checkpoint")
    _check(task, run, kept)
    profiling = view(config, profile.ProfileConfig, "profile")
    tracer = profile.Tracer(profiling, str(epath.Path(workdir) / "trace"))
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(run.stall_timeout))
        stop = stack.enter_context(StopSignal())
        folder = stack.enter_context(contextlib.closing(open_workdir(workdir, config)))
        writer = stack.enter_context(
            Writer(
                workdir,
                folder.attempt,
                run.steps,
                trackers=run.trackers,
                config=config.to_dict(),
                enabled=is_lead(),
            )
        )
        checkpoints = Checkpoints(folder.checkpoints, kept)
        with stop.nothing_unsaved():
            prepared = prepare(task, config, mesh, checkpoints, writer, watchdog)
        folder.record_config()
        return _Loop(
            task, config, run, mesh, folder, checkpoints, writer, stop, watchdog, tracer, prepared
        ).run()


def _check(task: Task, run: RunConfig, kept: checkpoint.CheckpointConfig) -> None:
    """Raises ConfigError for what can be told before there is a folder."""
    require(run.log_every >= 1, "run.log_every", run.log_every, "must be at least 1")
    require(run.save_every >= 1, "run.save_every", run.save_every, "must be at least 1")
    import_packages(run.trackers)
    checkpoint.check(kept)
    measured = not kept.best_metric or kept.best_metric.partition("/")[0] in task.evals
    allowed = f"must be <eval>/<metric> of the evals {', '.join(sorted(task.evals))}"
    require(measured, "checkpoint.best_metric", kept.best_metric, allowed)


@dataclass
class _Loop:
    """The loop's collaborators, so that its parts can be short functions."""

    task: Task
    config: ConfigDict
    settings: RunConfig
    mesh: Mesh
    folder: Workdir
    checkpoints: Checkpoints
    writer: Writer
    stop: StopSignal
    watchdog: Watchdog
    tracer: profile.Tracer
    start: InitVar[Prepared]

    def __post_init__(self, start: Prepared) -> None:
        self.state, self.step, self.compiled = start.state, start.step, start.compiled
        self.judge = guard.Judge(view(self.config, guard.GuardConfig, "guard"), start.state.guard)
        self.due_log = schedule.every(self.settings.log_every, first=False)
        self.due_save = schedule.every(self.settings.save_every, first=False)
        self.evaluated_at = self._evaluated_before() if start.resumed else -1
        self.pending: tuple[int, metrics.Metrics] | None = None
        # Several in-flight steps on a multi-device CPU can exhaust XLA's thread pool and deadlock in a
        # collective.
        self.in_order = jax.default_backend() == "cpu" and jax.local_device_count() > 1

    def run(self) -> Outcome:
        """Goes through the steps that are left."""
        try:
            return self._steps(self.settings.steps)
        except BaseException:
            # What was being saved is worth keeping; with several processes it may never be complete.
            if jax.process_count() == 1:
                with contextlib.suppress(OSError):
                    self.checkpoints.wait()
            raise
        finally:
            self.tracer.close()

    def _steps(self, total: int) -> Outcome:
        batches = (
            self.task.batches(self.step) if self.task.batches is not None and self.step < total else None
        )
        while True:
            measured = self._evaluate(total)
            if measured is None:
                return self._finish("preempted", {})
            if self.step == total:
                return self._finish("finished", measured)
            if self.stop.agreed(self.step):
                return self._finish("preempted", measured)
            if self.due_save(self.step, total) or self.checkpoints.improves(measured):
                self._save(measured)
            self.watchdog.beat(f"batch of step {self.step + 1}")
            batch = None if batches is None else self._next(batches)
            if batches is not None and batch is None:
                return self._finish("preempted" if self.stop.requested else "data ended", measured)
            self.watchdog.beat(f"step {self.step + 1}")
            self.tracer.before(self.step)
            self.state, step_metrics = self.compiled(self.state, batch)
            if self.in_order:
                jax.block_until_ready(step_metrics)
            self.step += 1
            previous, self.pending = self.pending, (self.step, step_metrics)
            self._log(previous)

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch on the mesh; None when there is none, or a signal came while waiting for it."""
        batch = self.stop.interruptible(lambda: next(batches, None))
        return None if batch is None else to_global(batch, self.mesh, self.task.batch_axis)

    def _log(self, pending: tuple[int, metrics.Metrics] | None) -> None:
        """Waits for a dispatched step, which bounds those in flight; if due, logs it and asks the guard."""
        if pending is None:
            return
        step, step_metrics = pending
        if not self.due_log(step, self.settings.steps):
            jax.block_until_ready(step_metrics)
            self.writer.progress(step)
            if self.judge.prompt:
                self._guard(metrics.to_host(step_metrics))
            return
        host = metrics.to_host(step_metrics)
        rate = self.writer.steps_per_second
        speed = {"steps_per_second": rate}
        if self.task.examples_per_step:
            speed["examples_per_second"] = rate * self.task.examples_per_step
        self.writer.log(step, {key: value for key, value in host.items() if key not in _NOT_LOGGED} | speed)
        self._guard(host)

    def _flush(self) -> None:
        """Logs the last step before an eval, a save or the end, so that rows stay in order.

        The guard judges it in any case: a bad update that is in a saved state and was not reported never
        would be, since what a state counts belongs to the attempt that saved it.
        """
        previous, self.pending = self.pending, None
        self._log(previous)
        if previous is not None:
            self._guard(metrics.to_host(previous[1]))

    def _guard(self, host: Mapping[str, Any]) -> None:
        judgement = self.judge(host)
        for bad in judgement.bad_steps:
            self.writer.event(bad, "bad_update", f"non-finite or spiking update from batch {bad}", batch=bad)
        if judgement.stop:
            self._save({})
            self.checkpoints.wait()
            self.writer.event(self.step, "guard_stop", judgement.stop)
            raise GuardStop(f"stopped at step {self.step}: {judgement.stop}; the state is saved")

    def _evaluate(self, total: int) -> dict[str, float] | None:
        """Runs the evals due at this step and writes one row.

        Returns their scalars, for the choice of the best checkpoint; None if a signal cut them short.
        """
        due = {name: ev.fn for name, ev in self.task.evals.items() if ev.when(self.step, total)}
        if not due or self.step == self.evaluated_at:
            return {}
        self._flush()
        self.watchdog.beat(f"evaluation at step {self.step}")
        results = self.stop.interruptible(
            lambda: {name: jax.device_get(dict(fn(self.state))) for name, fn in due.items()}
        )
        if results is None:
            return None
        row: dict[str, Any] = {}
        for name, result in results.items():
            row |= self._record(name, {key: np.asarray(value) for key, value in result.items()})
        best = self.config.checkpoint.best_metric
        found = best in row or best.partition("/")[0] not in results
        require(found, "checkpoint.best_metric", best, f"must be one of {', '.join(sorted(row))}")
        self.writer.log(self.step, row, kind="eval")
        return {key: float(np.mean(value)) for key, value in row.items()}

    def _record(self, name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """An eval's scalars and per-seed vectors, renamed for its row; larger arrays go to artifacts/."""
        kept: dict[str, Any] = {key: value for key, value in arrays.items() if value.ndim >= 2}
        if kept and is_lead():
            target = self.folder.path / "artifacts" / f"{name}_{self.step}.npz"
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                np.savez(file, **kept)
        return {
            f"{name}/{key}": value.astype(float).tolist() for key, value in arrays.items() if value.ndim < 2
        }

    def _save(self, measured: Mapping[str, float]) -> None:
        self._flush()
        self.watchdog.beat(f"save at step {self.step}")
        self.checkpoints.save(self.step, self.state, measured)

    def _finish(self, reason: str, measured: Mapping[str, float]) -> Outcome:
        self._save(measured)
        self.checkpoints.wait()
        self.writer.event(self.step, "end", reason)
        if reason != "preempted":
            self.folder.mark_done(self.step)
        return Outcome(self.state, self.step, reason)

    def _evaluated_before(self) -> int:
        """The step of this state if an earlier attempt has evaluated it, else −1."""
        self.watchdog.beat("start of the loop")
        rows = read_metrics(self.folder.path / "metrics.jsonl", kind="eval") if is_lead() else []
        return from_lead(self.step if any(row["step"] == self.step for row in rows) else -1)
