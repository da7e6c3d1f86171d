"""Modes and layouts change where the work is done, not what comes out."""

import time

import jax
import numpy as np
import pytest

from common import watchdog
from common.watchdog import STALLED, Watchdog
from common.writer import read_metrics
from tests.common import runs

STEPS = 5
USUAL = {"run__steps": STEPS, "batch_size": 16, "width": 8, "evals": {}}


def assert_close(a, b, rtol=1e-6):
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-6)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The run on one device: its final state and losses."""
    workdir = tmp_path_factory.mktemp("single")
    outcome = runs.run(workdir, devices=1, **USUAL)
    return outcome.state, [row["loss"] for row in read_metrics(workdir, kind="train")]


LAYOUTS = {
    "data": {},
    "fsdp": {"parallel__data": 1, "parallel__fsdp": 8},
    "data and fsdp": {"parallel__data": 2, "parallel__fsdp": -1},
    "shard_map": {"parallel__mode": "shard_map"},
    "pmap": {"parallel__mode": "pmap"},
    "two devices": {"devices": 2},
    "accumulation": {"optim__microbatches": 2},
    "accumulation on one device": {"optim__microbatches": 8, "devices": 1},
    "accumulation under shard_map": {"optim__microbatches": 2, "parallel__mode": "shard_map"},
    "accumulation under pmap": {"optim__microbatches": 2, "parallel__mode": "pmap"},
}


# Behaviours rows 39, 67, and the equivalences of the design.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(tmp_path, single, layout):
    state, losses = single
    outcome = runs.run(tmp_path, runs.sharded, **USUAL, **LAYOUTS[layout])
    assert_close(outcome.state, state)
    rows = read_metrics(tmp_path, kind="train")
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-6)
    kernel = outcome.state.params["hidden"]["kernel"]
    assert len(kernel.sharding.device_set) == LAYOUTS[layout].get("devices", 8)
    assert kernel.sharding.is_fully_replicated == ("parallel__fsdp" not in LAYOUTS[layout])


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_mode_can_be_changed_between_attempts(tmp_path, single, mode):
    runs.run(tmp_path, **{**USUAL, "run__steps": 3})
    outcome = runs.run(tmp_path, **USUAL, parallel__mode=mode)
    assert_close(outcome.state, single[0])


@pytest.mark.slow
def test_debug_runs_without_compiling(tmp_path, single):
    with jax.disable_jit():
        runs.run(tmp_path, **{**USUAL, "run__steps": 1}, run__debug=True, devices=1)
    (row,) = read_metrics(tmp_path, kind="train")
    assert row["loss"] == pytest.approx(single[1][0], rel=1e-6)
    assert runs.events(tmp_path, "compiled") == []


@pytest.mark.slow
def test_the_watchdog_ends_a_single_process(tmp_path):
    """Behaviours row 56, alone: it says where it is stuck, and the run goes on when it is started again."""
    with runs.process(tmp_path / "run", "--config.run.stall_timeout=6", "--fault=stuck_at:5") as started:
        assert started.wait(30) == STALLED, started.output
        assert "(run.stall_timeout=6) at: batch of step 5" in started.output
        assert "time.sleep(1000)" in started.output
    assert runs.checkpoints(tmp_path / "run")[-1] >= 2
    assert runs.run(tmp_path / "run").step == 6


def test_the_watchdog_says_where(monkeypatch, capfd):
    codes = []
    monkeypatch.setattr(watchdog, "_end", codes.append)
    with Watchdog(0.2) as dog:
        dog.beat("batch of step 5")
        time.sleep(0.6)
    message = capfd.readouterr().err
    assert codes[0] == STALLED
    assert "(run.stall_timeout=0.2) at: batch of step 5" in message
    assert "time.sleep(0.6)" in message
    assert "process" not in message


def test_the_watchdog_lets_a_run_be(monkeypatch):
    """Beats keep it quiet, and its thread ends with the block."""
    codes = []
    monkeypatch.setattr(watchdog, "_end", codes.append)
    with Watchdog(1.0) as dog:
        for i in range(8):
            dog.beat(f"stage {i}")
            time.sleep(0.2)
    time.sleep(1.5)
    assert codes == []
