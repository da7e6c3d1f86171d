"""Ends a run that no longer moves, and the processes that wait for one that failed.

A process that is stuck still sends JAX's heartbeats, and the others would sit in a collective for ever. So
each process counts the stages it enters (all enter the same ones in the same order), a thread publishes the
count in the key-value store of JAX's coordination service, and the process with the lowest count is the one
that is late.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn, Self

import jax

from common.config import require

STALLED = 4  # exit code
_GRACE = 3.0  # seconds a process has to end by itself after another failed or stalled
_FAILED, _BEATS = "triptych/failed", "triptych/beats"


class Watchdog:
    """Context manager of a run; `beat` names the stage that begins.

    Args: `timeout` is the longest time in seconds a stage may take (compilation, evaluation and restore are
    stages too); 0 is off. With several processes the failure of another one is looked for in any case.
    """

    def __init__(self, timeout: float):
        require(timeout >= 0, "run.stall_timeout", timeout, "must be 0 (off) or positive")
        self._timeout, self._store = timeout, _Store()
        self._count, self._stage, self._since = 0, "start", time.monotonic()
        self._main = threading.get_ident()
        self._end, self._stalled = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._timeout or self._store:
            self._store.clear_failure()
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        if self._stalled:
            self._thread.join()  # it ends the process; what failed here failed because another one ended
        if error is not None:
            self._store.report_failure(f"{type(error).__name__}: {error}")

    def beat(self, stage: str) -> None:
        """A new stage begins."""
        self._count, self._stage, self._since = self._count + 1, stage, time.monotonic()

    def _watch(self) -> None:
        pause = min(1.0, self._timeout / 4) if self._timeout else 1.0
        while not self._end.wait(pause):
            self._store.report_beat(self._count, self._stage)
            if self._store.failures():
                self._end_after_failure()
            waited = time.monotonic() - self._since
            if self._timeout and waited > self._timeout:
                self._end_after_stall(waited)

    def _end_after_failure(self) -> None:
        if self._end.wait(_GRACE):
            return  # this process failed too and says so itself
        for process, message in sorted(self._store.failures().items()):
            print(f"error: process {process} failed ({message}): the run cannot go on", file=sys.stderr)
            _end(1)

    def _end_after_stall(self, waited: float) -> None:
        self._stalled = True
        beats = self._store.beats()
        lines = [f"no progress for {waited:.0f} s (run.stall_timeout={self._timeout:g}) at: {self._stage}"]
        late = min((count for count, _ in beats.values()), default=0)
        if late < max((count for count, _ in beats.values()), default=0):
            for process, (count, stage) in sorted(beats.items()):
                lines += [f"process {process} is late: it is still at: {stage}"] if count == late else []
        elif beats:
            lines.append("all processes are at the same stage")
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame, limit=8)) if frame else ""
        print(
            "\n".join([f"error: {lines[0]}", *lines[1:], "the main thread is at", stack]),
            file=sys.stderr,
            flush=True,
        )
        # Everyone comes to the same conclusion within a poll or two; the store ends with process 0, so that
        # goes last.
        if self._store:
            time.sleep(_GRACE if jax.process_index() == 0 else _GRACE / 2)
        _end(STALLED)


class _Store:
    """The key-value store the processes share; falsy and without effect for a single process."""

    def __init__(self) -> None:
        # The one use of a private name: JAX has no public way to its coordination service.
        from jax._src import distributed

        self._client: Any = distributed.global_state.client if jax.process_count() > 1 else None
        self._me = jax.process_index()

    def __bool__(self) -> bool:
        return self._client is not None

    def report_beat(self, count: int, stage: str) -> None:
        self._set(f"{_BEATS}/{self._me}", f"{count} {stage}", overwrite=True)

    def report_failure(self, message: str) -> None:
        """The first failure stays: what follows are its consequences."""
        self._set(f"{_FAILED}/{self._me}", message.split("\n")[0], overwrite=False)

    def clear_failure(self) -> None:
        if self._client is not None:
            self._client.key_value_delete(f"{_FAILED}/{self._me}")

    def beats(self) -> dict[int, tuple[int, str]]:
        """Count and stage of each process."""
        values = {process: value.partition(" ") for process, value in self._read(_BEATS).items()}
        return {process: (int(count), stage) for process, (count, _, stage) in values.items()}

    def failures(self) -> dict[int, str]:
        """Messages of the other processes that failed."""
        return {process: text for process, text in self._read(_FAILED).items() if process != self._me}

    def _set(self, key: str, value: str, overwrite: bool) -> None:
        if self._client is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # there is one already, or the service is gone and JAX ends us
                self._client.key_value_set(key, value, allow_overwrite=overwrite)

    def _read(self, folder: str) -> dict[int, str]:
        if self._client is None:
            return {}
        try:
            pairs = self._client.key_value_dir_get(folder)
        except RuntimeError:
            return {}
        return {int(key.rsplit("/", 1)[1]): value for key, value in pairs}


def leave(code: int) -> NoReturn:
    """Ends this process; one of several that failed must not wait for the others, who cannot end."""
    if code == 0 or not jax.distributed.is_initialized():
        sys.exit(code)
    _Store().report_failure(f"exit code {code}")
    if jax.process_index() == 0:
        time.sleep(2.0)  # the others must still be able to read why
    _end(code)


def _end(code: int) -> NoReturn:
    """Without clean-up: JAX's would wait for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
