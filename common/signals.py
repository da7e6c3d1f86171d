"""SIGTERM and SIGINT: stop soon, lose nothing.

A preempted machine gives seconds. Between steps a flag is enough. An evaluation can be long and changes no
state, so the signal cuts it short. While XLA compiles, Python handlers do not run at all and nothing is
unsaved yet, so a thread woken by the kernel ends the process at once.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import jax

T = TypeVar("T")


class Interrupted(BaseException):
    """Raised inside an interruptible block; a BaseException so that no `except Exception` swallows it."""


class StopSignal:
    """Context manager that turns SIGTERM and SIGINT into `requested`; the second SIGINT kills.

    With several processes SIGTERM is left to JAX's preemption service, through which they agree on the step
    to stop at (`agreed`), and SIGINT is passed on to it; nothing is cut short, since the others would wait
    for this process. Outside the main thread Python allows no handlers: nothing is installed and `requested`
    stays False.
    """

    def __init__(self) -> None:
        self.requested = False
        self._alone = jax.process_count() == 1
        self._interruptible = False
        self._die_at_once = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._reader, self._waker = socket.socketpair()
            self._waker.setblocking(False)
            self._old_fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
            numbers = (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,)
            self._previous = {number: signal.signal(number, self._handle) for number in numbers}
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_fd)
            self._waker.close()
            self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested and number == signal.SIGINT:
            os._exit(130)
        self.requested = True
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._interruptible:
            self._interruptible = False
            raise Interrupted

    def _watch(self) -> None:
        """Runs even while the main thread is inside XLA; ends when the other end of the socket closes."""
        with self._reader:
            while self._reader.recv(1):
                if self._die_at_once:
                    print(
                        "stopped by a signal before a step was made: nothing is lost",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(0)

    def interruptible(self, function: Callable[[], T]) -> T | None:
        """`function()`, or None if a signal came before or during it; it may not change the run's state.

        What Python waits for is cut short at once, a compiled program only when it returns.
        """
        if not self._alone:
            return function()
        if self.requested:
            return None
        self._interruptible = True
        try:
            return function()
        except Interrupted:
            return None
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def nothing_unsaved(self) -> Iterator[None]:
        """A signal in this block (start-up, compilation) ends a single process at once, with exit code 0."""
        if self.requested and self._alone:
            os._exit(0)
        self._die_at_once = self._alone
        try:
            yield
        finally:
            self._die_at_once = False

    def agreed(self, step: int) -> bool:
        """Whether to stop before this step: the same answer in every process, whichever got the signal."""
        if self._alone:
            return self.requested
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)
