import os
import signal
import sys
import threading
import time

import pytest

from common.config import ConfigError
from experiments import jobs, reproduce

FIGURE = "diffusion_mem/fig2_memorization_window"


@pytest.fixture
def configs():
    built = reproduce.configs(reproduce.load_figure(FIGURE), "tiny", 1)
    return {variant.name: config for variant, config in built}


def finish(folder, config, step=None):
    folder.mkdir(parents=True)
    content = '{"config": ' + jobs.to_json(config) + "}"
    (folder / "config.json").write_text(content)
    (folder / "DONE").write_text(f'{{"step": {config.run.steps if step is None else step}}}')


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_jobs_share_the_cores_without_overlap(width, monkeypatch):
    monkeypatch.setattr(jobs, "_cores", lambda: [0, 2, 4, 6, 7])
    shares = jobs._shares(width)
    assert len(shares) == width
    if width == 1:
        assert shares == [None]  # all of them
    else:
        assert sorted(core for share in shares for core in share) == [0, 2, 4, 6, 7]


def test_more_jobs_than_cores_take_turns_on_them(monkeypatch):
    monkeypatch.setattr(jobs, "_cores", lambda: [3, 5])
    assert jobs._shares(3) == [{3}, {5}, {3}]


def test_one_job_where_there_is_an_accelerator_unless_it_is_not_used(monkeypatch):
    monkeypatch.setattr(jobs, "_cores", lambda: [0, 1, 2])
    monkeypatch.setattr(jobs.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert jobs.default_jobs() == 3
    monkeypatch.delenv("JAX_PLATFORMS")
    assert jobs.default_jobs() == 1


def test_negative_number_of_jobs_is_refused(configs, tmp_path):
    with pytest.raises(ConfigError, match="--jobs=-1"):
        jobs.run_all(configs, tmp_path, -1)


def test_finished_runs_are_skipped_unless_more_steps_are_asked_for(configs, tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(jobs, "_run", lambda name, *_: started.append(name) or "")
    (first, config), (second, other) = configs.items()
    finish(tmp_path / first, config)
    assert jobs.run_all(configs, tmp_path) == {}
    assert started == [second]
    assert f"{first}: done, skipped" in capsys.readouterr().out
    longer = other.copy_and_resolve_references()
    longer.run.steps *= 2
    finish(tmp_path / second, other)
    jobs.run_all({second: longer}, tmp_path)
    assert started == [second, second]


def test_longest_run_starts_first_and_errors_are_returned_by_name(configs, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(jobs, "_run", lambda name, *_: started.append(name) or f"{name} broke")
    errors = jobs.run_all(configs, tmp_path, 1)
    assert started == sorted(configs, key=lambda name: -configs[name].run.steps)
    assert errors == {name: f"{name} broke" for name in configs}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_what_runs_and_starts_nothing_more(number, configs, tmp_path, monkeypatch):
    running = tmp_path / "running"

    def run(name, config, workdir, cores, children):
        script = f"open({str(running)!r}, 'a').write('x'); import time; time.sleep(60)"
        return str(children.run([sys.executable, "-c", script]))

    def send():
        while not (running.exists() and running.stat().st_size == 2):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(jobs, "_run", run)
    many = {f"{name}{i}": config for name, config in configs.items() for i in range(3)}
    before = signal.signal(number, signal.SIG_IGN)  # as a shell leaves SIGINT to its background jobs
    threading.Thread(target=send).start()
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            jobs.run_all(many, tmp_path, 2)  # returns when both processes have ended
    finally:
        left = signal.signal(number, before)
    assert left is signal.SIG_IGN
    assert time.monotonic() - begun < 20
    assert running.stat().st_size == 2


def test_last_line_of_a_failed_run_is_its_error(configs, tmp_path, monkeypatch):
    monkeypatch.chdir(reproduce._ROOT.parent)
    monkeypatch.setenv("XLA_FLAGS", "")
    name, config = next(iter(configs.items()))
    wrong = config.copy_and_resolve_references()
    wrong.data.n = 5000
    errors = jobs.run_all({name: wrong.lock()}, tmp_path)
    assert errors == {name: "error: data.n=5000: between 2 and the 1285 training images there are"}
    assert (tmp_path / f"{name}.log").read_text().strip() == errors[name]
