"""What may be in a run's folder, and who may use it."""

import json
import os
import subprocess
import sys

import pytest

from common import config as config_lib
from common.config import ConfigError
from common.workdir import is_done, open_workdir, saved_config
from tests.common import runs, toy


def begin(workdir, **overrides):
    """Opens a folder, leaves a row in it, and lets go of it."""
    folder = open_workdir(str(workdir), toy.config(**overrides))
    (workdir / "metrics.jsonl").write_text("{}\n")
    folder.record_config()
    folder.close()


def test_another_config_is_refused_with_the_differences(tmp_path):
    begin(tmp_path)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError) as error:
        open_workdir(str(tmp_path), toy.config(width=8, optim__lr=0.5, run__steps=100))
    message = str(error.value)
    assert "\n" not in message
    assert f"--workdir={tmp_path}" in message
    assert "width: 4 → 8" in message
    assert "optim.lr: 0.001 → 0.5" in message
    assert "run.steps" not in message
    assert (tmp_path / "config.json").read_text() == before


def test_length_cadence_logging_and_devices_may_change(tmp_path):
    begin(tmp_path)
    changes = {
        "run__steps": 12,
        "run__log_every": 3,
        "run__save_every": 5,
        "run__trackers": ("tensorboard",),
        "run__stall_timeout": 60.0,
        "checkpoint__keep": 5,
        "parallel__fsdp": 8,
        "parallel__data": 1,
        "profile__trace_steps": 2,
    }
    begin(tmp_path, **changes)
    saved = saved_config(tmp_path)
    assert (saved.run.steps, saved.checkpoint.keep) == (12, 5)
    assert config_lib.diff(saved, toy.config(**changes)) == []


def test_a_begun_run_without_its_config_is_refused(tmp_path):
    begin(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json: not a run's config"):
        open_workdir(str(tmp_path), toy.config(optim__lr=0.5))


def test_a_refused_attempt_leaves_the_config(tmp_path):
    runs.run(tmp_path)
    with pytest.raises(ConfigError, match=r"run.steps=3: the checkpoint is already at step 6"):
        runs.run(tmp_path, run__steps=3)
    assert saved_config(tmp_path).run.steps == 6
    assert is_done(tmp_path)


def test_a_refused_start_does_not_bind_the_folder(tmp_path):
    """The batch cannot be cut over 8 devices; with another size the same command works in the same folder."""
    with pytest.raises(ConfigError, match="batch size=12: must be a multiple of 8"):
        runs.run(tmp_path, batch_size=12)
    assert runs.run(tmp_path, batch_size=16).step == 6


def test_what_config_json_holds(tmp_path):
    begin(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    environment = content["environment"]
    assert environment["device_count"] == 8
    assert set(environment["versions"]) >= {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint"}
    assert environment["command"] == sys.argv
    assert not list(tmp_path.glob("*.tmp"))


def test_one_run_at_a_time(tmp_path):
    """By another process, which is named; when it is gone the folder is free."""
    hold = (
        "import sys; from tests.common import toy; from common.workdir import open_workdir\n"
        f"folder = open_workdir({str(tmp_path)!r}, toy.config()); print('open', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    other = subprocess.Popen(
        [sys.executable, "-c", hold],
        cwd=runs.ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match=rf"--workdir={tmp_path}: in use by process {other.pid}"):
            open_workdir(str(tmp_path), toy.config())
        other.kill()
    open_workdir(str(tmp_path), toy.config()).close()


def test_one_run_at_a_time_in_one_process(tmp_path):
    first = open_workdir(str(tmp_path), toy.config())
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        open_workdir(str(tmp_path), toy.config())
    first.close()
    open_workdir(str(tmp_path), toy.config()).close()


def test_a_failed_run_lets_go_of_its_folder(tmp_path):
    with pytest.raises(ConfigError, match="multiple of 8"):
        runs.run(tmp_path, batch_size=12)
    open_workdir(str(tmp_path), toy.config()).close()


def test_a_folder_that_cannot_be_made(tmp_path):
    """A file, a folder below a file, and a place where nothing can be written: one line each."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/below", "/proc/nowhere"):
        with pytest.raises(ConfigError, match=f"--workdir={path}: cannot be written") as error:
            open_workdir(str(path), toy.config())
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}', '{"config": 3}'])
def test_an_unreadable_config_is_refused(tmp_path, text):
    begin(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json: not a run's config"):
        open_workdir(str(tmp_path), toy.config())


def test_attempts_and_done(tmp_path):
    runs.run(tmp_path, run__steps=2)
    assert is_done(tmp_path)
    assert json.loads((tmp_path / "DONE").read_text()) == {"step": 2}
    folder = open_workdir(str(tmp_path), toy.config(run__steps=2))
    assert folder.attempt == 2
    assert is_done(tmp_path)
    folder.close()
    folder = open_workdir(str(tmp_path), toy.config(run__steps=4))
    assert not is_done(tmp_path)
    folder.close()


def test_a_shorter_run_is_refused(tmp_path):
    runs.run(tmp_path, run__steps=4)
    with pytest.raises(ConfigError, match=r"run.steps=2: the checkpoint is already at step 4"):
        runs.run(tmp_path, run__steps=2)


def test_an_unreadable_done_is_no_obstacle(tmp_path):
    """A machine that lost power may leave it empty."""
    runs.run(tmp_path, run__steps=2)
    (tmp_path / "DONE").write_text("")
    assert runs.run(tmp_path, run__steps=2).reason == "finished"
    assert json.loads((tmp_path / "DONE").read_text()) == {"step": 2}
