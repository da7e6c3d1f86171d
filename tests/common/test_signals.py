"""A signal at any moment: the process ends soon with exit code 0, and nothing is lost."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from common import checkpoint, schedule
from common.signals import StopSignal
from common.task import Eval
from common.workdir import is_done
from tests.common import runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    runs.run(workdir)
    return runs.curve(workdir)


# Behaviours row 34. What the process prints when it is time for the signal, what was made slow, the newest
# checkpoint.
MOMENTS = {
    "compile": ("tracing", "slow_compile:30", None),
    "first batch": ("compiled", "slow_step:30", 0),
    "step": ("batch 4", "slow_step:0.3", 3),
    "eval": ("slow eval", "slow_eval:30", 2),
    "restore": ("slow restore", "slow_restore:30", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_signal(tmp_path, whole, moment):
    text, fault, newest = MOMENTS[moment]
    if moment == "restore":
        runs.run(tmp_path / "run", run__steps=3)
    with runs.process(tmp_path / "run", f"--fault={fault}", "--config.run.save_every=100") as started:
        started.wait_for(text)
        time.sleep(0.1)
        sent = time.monotonic()
        started.send(signal.SIGTERM)
        assert started.wait(20) == 0, started.output
        assert time.monotonic() - sent < 5
    assert runs.checkpoints(tmp_path / "run")[-1:] == ([] if newest is None else [newest])
    runs.run(tmp_path / "run")
    rows = runs.curve(tmp_path / "run")
    if moment == "restore":  # the last step of the first run was evaluated
        rows = [row for row in rows if (row["step"], row["kind"]) != (3, "eval")]
    assert rows == whole


def test_a_signal_while_saving(tmp_path, whole, monkeypatch):
    """The signal comes when the writing in the background has begun: it is completed and sealed."""
    save = checkpoint.ocp.save_async

    def save_and_signal(folder, *args):
        response = save(folder, *args)
        if folder.name == "2":
            os.kill(os.getpid(), signal.SIGTERM)
        return response

    monkeypatch.setattr(checkpoint.ocp, "save_async", save_and_signal)
    outcome = runs.run(tmp_path)
    assert (outcome.reason, outcome.step) == ("preempted", 2)
    assert runs.checkpoints(tmp_path) == [2]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    runs.run(tmp_path)
    assert runs.curve(tmp_path) == whole


def test_a_signal_in_the_last_eval_leaves_the_run_unfinished(tmp_path, whole):
    """It is not DONE while the last row is missing."""
    real = runs.prepare()[0].evals["fit"].fn

    def signalled(state):
        if int(state.step) == 6 and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        return real(state)

    stopped = []
    outcome = runs.run(tmp_path, evals={"fit": Eval(signalled, schedule.every(2))})
    assert (outcome.reason, outcome.step, is_done(tmp_path)) == ("preempted", 6, False)
    assert runs.run(tmp_path).reason == "finished"
    assert is_done(tmp_path)
    assert runs.curve(tmp_path) == whole


def test_the_second_interrupt_kills():
    """When the first is not acted on, as in a long compiled program; SIGTERM does not count."""
    code = (
        "import os, signal, time\n"
        "from common.signals import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop.requested\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('not here')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=runs.ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (130, "")


def test_interruptible_gives_the_value_or_nothing():
    with StopSignal() as stop:
        assert stop.interruptible(lambda: 3) == 3
        assert not stop.requested
        assert stop.interruptible(lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(10)) is None
        assert stop.requested
        assert stop.interruptible(lambda: 3) is None


def test_an_eval_that_swallows_exceptions_is_cut_short():
    def stubborn():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except Exception:
            return 1

    with StopSignal() as stop:
        assert stop.interruptible(stubborn) is None


def test_outside_the_main_thread(tmp_path):
    """Python allows no handlers there; the run works all the same."""
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(runs.run(tmp_path)))
    thread.start()
    thread.join(60)
    assert [outcome.reason for outcome in outcomes] == ["finished"]


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    threads = threading.active_count()
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    time.sleep(0.2)
    assert threading.active_count() <= threads
