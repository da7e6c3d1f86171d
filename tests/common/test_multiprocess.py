"""Two processes with four devices each, joined by jax.distributed, do what one process with eight does."""

import contextlib
import signal
import socket
import time

import pytest

from tests.common import runs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def pair(workdir, *arguments, second=(), other_workdir=None):
    """Processes 0 and 1 of one run; `second` holds arguments of process 1 alone."""
    common = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                runs.process(folder, *arguments, *extra, devices=4, env={**common, "JAX_PROCESS_ID": str(i)})
            )
            for i, (folder, extra) in enumerate([(workdir, ()), (other_workdir or workdir, second)])
        ]


def codes(processes, timeout=60):
    end = time.monotonic() + timeout
    return [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]


def log(processes):
    return "\n".join(f"--- {i}\n{process.output}" for i, process in enumerate(processes))


def test_two_processes_equal_one(tmp_path):
    with pair(tmp_path / "two", "--config.parallel.data=2", "--config.parallel.fsdp=4") as processes:
        assert codes(processes) == [0, 0], log(processes)
        assert "start: new run" in processes[0].output
        assert "start: new run" not in processes[1].output
        results = {process.output.split("outcome ")[1].split("\n")[0] for process in processes}
        assert len(results) == 1
    runs.run(tmp_path / "one")
    rows, expected = runs.curve(tmp_path / "two"), runs.curve(tmp_path / "one")
    assert [(row.pop("step"), row.pop("kind")) for row in rows] == [
        (row.pop("step"), row.pop("kind")) for row in expected
    ]
    for row, like in zip(rows, expected, strict=True):
        assert row == pytest.approx(like, rel=1e-6)
    assert runs.checkpoints(tmp_path / "two") == [4, 6]
    # And on: what two processes saved, one can read.
    assert runs.run(tmp_path / "two", run__steps=7).step == 7


@pytest.mark.slow
def test_a_signal_to_one_stops_both(tmp_path):
    """Behaviours row 35."""
    with pair(tmp_path / "run", "--fault=slow_step:0.1", "--config.run.steps=60") as processes:
        processes[1].wait_for("batch 5")
        processes[1].send(signal.SIGTERM)
        assert codes(processes, 30) == [0, 0], log(processes)
        outcomes = {process.output.split("outcome ")[1].split("\n")[0] for process in processes}
    assert len(outcomes) == 1, outcomes
    reason, step, _ = outcomes.pop().split()
    assert reason == "preempted"
    assert runs.checkpoints(tmp_path / "run")[-1] == int(step)
    with pair(tmp_path / "run", "--config.run.steps=60") as processes:
        assert codes(processes) == [0, 0], log(processes)
    runs.run(tmp_path / "whole", run__steps=60)
    rows, expected = runs.curve(tmp_path / "run"), runs.curve(tmp_path / "whole")
    assert [(row["step"], row["kind"]) for row in rows] == [(row["step"], row["kind"]) for row in expected]


@pytest.mark.slow
def test_an_interrupt_to_one_stops_both(tmp_path):
    with pair(tmp_path / "run", "--fault=slow_step:0.1", "--config.run.steps=60") as processes:
        processes[0].wait_for("batch 5")
        processes[0].send(signal.SIGINT)
        assert codes(processes, 30) == [0, 0], log(processes)
        assert all("outcome preempted" in process.output for process in processes)


@pytest.mark.slow
def test_a_signal_while_one_compiles(tmp_path):
    with pair(tmp_path / "run", second=["--fault=slow_compile:2"]) as processes:
        processes[1].wait_for("tracing")
        processes[1].send(signal.SIGTERM)
        assert codes(processes, 30) == [0, 0], log(processes)
    with pair(tmp_path / "run") as processes:
        assert codes(processes) == [0, 0], log(processes)
        assert all("outcome finished 6" in process.output for process in processes)


@pytest.mark.slow
def test_two_workdirs_are_refused(tmp_path):
    """Behaviours row 37."""
    (tmp_path / "other").mkdir()
    with pair(tmp_path / "run", other_workdir=tmp_path / "other/run") as processes:
        assert codes(processes, 30) == [2, 2], log(processes)
        for process in processes:
            assert "process 1 does not see the folder of process 0" in process.output


@pytest.mark.slow
def test_a_broken_process_ends_the_other(tmp_path):
    """Behaviours row 58: soon, with an exit code, and saying which it was."""
    for broken in (0, 1):
        fault = "--fault=raise_at:3"
        first, second = ([fault], []) if broken == 0 else ([], [fault])
        with pair(tmp_path / str(broken), *first, second=second or ["--fault=raise_at:-1"]) as processes:
            processes[broken].wait_for("batch 3")
            sent = time.monotonic()
            ended = codes(processes, 40)
            assert all(code != 0 for code in ended), log(processes)
            assert time.monotonic() - sent < 20
            assert "a broken batch" in processes[broken].output


@pytest.mark.slow
def test_a_refused_config_ends_both(tmp_path):
    with pair(tmp_path / "run", "--config.batch_size=12") as processes:
        assert codes(processes, 30) == [2, 2], log(processes)
        assert "batch size=12" in processes[0].output


@pytest.mark.slow
def test_a_slow_end(tmp_path):
    """Behaviours row 58: process 1 needs 5 s more than process 0."""
    with pair(tmp_path / "run", second=["--fault=sleep_at_end:5"]) as processes:
        assert codes(processes) == [0, 0], log(processes)


@pytest.mark.slow
def test_a_stuck_process_is_named(tmp_path):
    """Behaviours row 56."""
    with pair(tmp_path / "run", "--config.run.stall_timeout=8", second=["--fault=stuck_at:3"]) as processes:
        processes[1].wait_for("batch 3")
        stuck = time.monotonic()
        assert codes(processes, 40) == [4, 4], log(processes)
        assert 6 < time.monotonic() - stuck < 20
        for process in processes:
            assert "process 1 is late: it is still at: batch of step 3" in process.output
        assert "time.sleep(1000)" in processes[1].output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_dead_process_is_named(tmp_path, number):
    """One that does not even run its own watchdog; started again, the run goes on."""
    with pair(tmp_path / "run", "--config.run.stall_timeout=8", "--fault=slow_step:0.1") as processes:
        processes[1].wait_for("batch 4")
        processes[1].send(number)
        assert processes[0].wait(40) == 4, log(processes)
        assert "process 1 is late" in processes[0].output
    with pair(tmp_path / "run") as processes:
        assert codes(processes) == [0, 0], log(processes)
        assert all("outcome finished 6" in process.output for process in processes)


@pytest.mark.slow
def test_a_slow_restore_is_named(tmp_path):
    """Behaviours row 59."""
    runs.run(tmp_path / "run", run__steps=3)
    slow = ["--fault=slow_restore:1000"]
    with pair(tmp_path / "run", "--config.run.stall_timeout=8", second=slow) as processes:
        assert codes(processes, 40) == [4, 4], log(processes)
        assert "process 1 is late: it is still at: restore" in processes[0].output
