import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from common.checkpoint import CheckpointConfig, Checkpoints
from common.workdir import is_done
from common.writer import read_events
from experiments import jobs, reproduce

ROOT = pathlib.Path(__file__).parents[2]
NAME = "diffusion_mem/fig2_memorization_window"
FIGURE = """
from common.sweep import zipped
from experiments.diffusion_mem import fig2_memorization_window as fig2
from experiments.diffusion_mem.fig2_memorization_window import *

def get_config(scale="tiny", n=16):
    config = fig2.get_config("tiny", n)
    config.run.num_seeds, config.evaluate.milestones = 1, 2
    {more}
    return config

SWEEP = {{"tiny": zipped({sweep})}}
"""


SIZES = {"data.n": [16, 32], "run.steps": [16, 17]}
NAMES = ("data.n=16,run.steps=16", "data.n=32,run.steps=17")


def install(monkeypatch, folder, sweep, more="pass"):
    """Writes a figure `paper/fig0_test` with one seed into `folder`, and makes it the only one there is."""
    target = folder / "figures" / "paper"
    target.mkdir(parents=True, exist_ok=True)
    (target / "fig0_test.py").write_text(FIGURE.format(sweep=sweep, more=more))
    monkeypatch.setattr(reproduce, "_ROOT", target.parent)
    monkeypatch.setenv("XLA_FLAGS", "")  # the runs need no more than one device
    monkeypatch.chdir(ROOT)
    return folder / "out" / "paper" / "fig0_test" / "tiny"


def call(folder, *arguments):
    return reproduce.main(["paper/fig0_test", "--scale=tiny", f"--out={folder / 'out'}", *arguments])


def times_of(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """A folder in which both runs of the figure were trained, with what was printed."""
    folder, printed = tmp_path_factory.mktemp("reproduced"), io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(printed):
        install(monkeypatch, folder, SIZES)
        assert call(folder) == 0
    return folder, printed.getvalue()


@pytest.fixture
def figure(tmp_path, monkeypatch):
    return lambda *args, **kwargs: install(monkeypatch, tmp_path, *args, **kwargs)


@pytest.fixture
def copied(reproduced, tmp_path):
    """Puts the trained runs where this test's figure has its own."""
    shutil.copytree(reproduced[0] / "out", tmp_path / "out")
    return tmp_path


def test_figure_from_runs_to_report(reproduced):
    folder, printed = reproduced
    folder = folder / "out" / "paper" / "fig0_test" / "tiny"
    assert all(is_done(folder / "runs" / name) for name in NAMES)
    for panel in ("curves", "times", "gallery"):
        for suffix in ("png", "svg", "csv"):
            assert (folder / "figures" / f"{panel}.{suffix}").stat().st_size > 0
    page = (folder / "report.html").read_text()
    for text in ("Not run at this scale", "2 of 2 runs", "data:image/png;base64", "curves.csv", *NAMES):
        assert text in page, text
    assert printed.count("NOT RUN AT THIS SCALE") == 5  # four claims and the whole
    assert f"report: {folder / 'report.html'}" in printed


def test_second_call_trains_nothing_and_writes_the_report_again(figure, copied, capfd):
    folder = figure(SIZES)
    before = times_of(folder / "runs")
    (folder / "report.html").unlink()
    assert call(copied) == 0
    out = capfd.readouterr().out
    assert all(f"{name}: done, skipped" in out for name in NAMES)
    assert times_of(folder / "runs") == before
    assert "2 of 2 runs" in (folder / "report.html").read_text()


def test_folder_of_another_config_is_refused_and_left_as_it_is(figure, copied, capfd):
    folder = figure(SIZES, more="config.optim.lr = 0.5")
    before = times_of(folder)
    assert call(copied) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "another config" in err
    assert "optim.lr: 0.001 → 0.5" in err
    assert times_of(folder) == before


def test_a_done_run_of_another_config_is_not_reused(figure, copied, capfd):
    folder = figure(SIZES)
    for name in NAMES:
        shutil.rmtree(folder / "runs" / name / "checkpoints")
    assert call(copied, "--seeds=2") == 2
    assert "run.num_seeds: 1 → 2" in capfd.readouterr().err
    saved = folder / "runs" / NAMES[0] / "config.json"
    content = json.loads(saved.read_text())
    content["config"]["run"]["steps"] = 20
    saved.write_text(json.dumps(content))
    assert call(copied) == 2
    assert re.search(r"run.steps=16: .* was run for 20$", capfd.readouterr().err.strip())


def test_claims_are_printed_before_anything_is_drawn(figure, copied, capfd):
    figure(SIZES, more="global plot; plot = lambda *_: 1 / 0")
    with pytest.raises(ZeroDivisionError):
        call(copied)
    assert capfd.readouterr().out.count("NOT RUN AT THIS SCALE") == 4


def test_output_that_cannot_be_written_is_one_line(figure, tmp_path, capfd):
    figure(SIZES)
    (tmp_path / "out").write_text("")
    assert call(tmp_path) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_failed_run_is_reported_and_the_others_are_kept(figure, copied, capfd):
    folder = figure({"data.n": [16, 5000], "run.steps": [16, 17]})
    assert call(copied) == 1
    error = "data.n=5000: between 2 and the 1285 training images there are"
    assert f"FAILED  data.n=5000,run.steps=17: error: {error}" in capfd.readouterr().out
    page = (folder / "report.html").read_text()
    assert "1 of 2 runs" in page
    assert f"failed: error: {error}" in page
    assert "curves.csv" in page


@pytest.mark.parametrize("failed", [0, 1])
def test_a_claiming_scale_has_no_verdict_while_a_run_is_missing(failed, figure, copied, monkeypatch, capfd):
    figure(SIZES, more="global CLAIMED_SCALES; CLAIMED_SCALES = ('tiny',)")
    monkeypatch.setattr(jobs, "run_all", lambda *_: dict.fromkeys(NAMES[:failed], "out of memory"))
    assert call(copied) == failed
    assert capfd.readouterr().out.count("NOT RUN AT THIS SCALE") == 5 * failed


def test_all_runs_failed(figure, tmp_path, monkeypatch):
    folder = figure({"data.n": [16, 32], "run.steps": [16, 17]})
    monkeypatch.setattr(jobs, "run_all", lambda configs, *_: dict.fromkeys(configs, "no disk"))
    assert call(tmp_path) == 1
    page = (folder / "report.html").read_text()
    assert "0 of 2 runs" in page
    assert page.count("failed: no disk") == 2


def test_dry_run_prints_the_runs_and_trains_nothing(figure, tmp_path, monkeypatch, capfd):
    figure({"data.n": [16, 32], "run.steps": [16, 17]})
    monkeypatch.setattr(jobs, "run_all", lambda *_: pytest.fail("something was run"))
    assert call(tmp_path, "--dry_run", "--seeds=3") == 0
    out = capfd.readouterr().out
    for name in ("data.n=16,run.steps=16", "data.n=32,run.steps=17"):
        assert name in out
    assert not (tmp_path / "out").exists()


def test_seeds_are_those_asked_for(figure):
    figure({"data.n": [16, 32]})
    module = reproduce.load_figure("paper/fig0_test")
    assert [config.run.num_seeds for _, config in reproduce.configs(module, "tiny", 3)] == [3, 3]
    assert [config.run.num_seeds for _, config in reproduce.configs(module, "tiny", None)] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diffusion_mem/fig2_memorization_windw"], ["no such figure", f"did you mean '{NAME}'"]),
        (["fig2_memorization_window"], ["no such figure", f"did you mean '{NAME}'"]),
        (["diffusion_mem/__init__"], ["no such figure"]),
        ([NAME, "--scale=huge"], ["--scale='huge'", "tiny, cpu, gpu"]),
        ([NAME, "--seeds=0"], ["--seeds=0", "at least 1"]),
        ([NAME, "--seeds=many"], ["--seeds", "'many'"]),
        ([NAME, "--scale=tiny", "--jobs=-1"], ["--jobs=-1"]),
        ([NAME, "--seed=3"], ["--seed=3"]),
        ([NAME, "--config.optim.lr=1"], ["--config.optim.lr=1"]),
        ([NAME, "--scale=tiny", "--out="], ["--out=''", "must be a folder"]),
        ([], ["figure"]),
    ],
)
def test_wrong_input_is_one_line(arguments, words, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_resumable_runs_and_no_process(number, figure, tmp_path):
    folder = figure({"data.n": [16, 32], "run.steps": [10**6, 10**6 + 1]})
    program = (
        "import pathlib, sys; from experiments import reproduce; "
        f"reproduce._ROOT = pathlib.Path({str(tmp_path / 'figures')!r}); "
        "sys.exit(reproduce.main(sys.argv[1:]))"
    )
    arguments = ["paper/fig0_test", "--scale=tiny", "--jobs=2", f"--out={tmp_path / 'out'}"]
    command = [sys.executable, "-c", program, *arguments]
    parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        runs = [
            folder / "runs" / f"data.n={n},run.steps={steps}" for n, steps in ((16, 10**6), (32, 10**6 + 1))
        ]
        end = time.monotonic() + 90
        while not all(
            (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size for run in runs
        ):
            assert parent.poll() is None, parent.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)
        assert len(processes(tmp_path)) == 3
        parent.send_signal(number)
        _, err = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert parent.returncode == 130
    assert err == "interrupted; the runs are saved, the same command goes on with them\n"
    assert processes(tmp_path) == []
    for run in runs:
        assert not is_done(run)
        last = [event for event in read_events(run) if event["event"] == "end"][-1]
        assert last["message"] == "preempted"
        assert Checkpoints(run / "checkpoints", CheckpointConfig()).steps()[-1] == last["step"] > 0
        assert json.loads((run / "config.json").read_text())["config"]["run"]["num_seeds"] == 1


def processes(folder):
    """Command lines, of processes that are alive, which name `folder`."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            line, status = (entry / "cmdline").read_text(), (entry / "status").read_text()
        except OSError:
            continue
        if str(folder) in line and "State:\tZ" not in status and int(entry.name) != os.getpid():
            found.append(line)
    return found
