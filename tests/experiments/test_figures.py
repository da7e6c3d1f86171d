"""What every figure file must do, found by its name: fig*.py or table*.py under experiments/<paper>."""

import dataclasses
import pathlib
import sys

import jax
import pytest
from ml_collections import ConfigDict

from common import config as config_lib
from common.mesh import ParallelConfig, make_mesh
from common.start import run_key
from common.verdict import Claim, Verdict
from common.writer import read_metrics
from experiments import reproduce, train
from experiments.runs import load_run
from experiments.tasks import build

ROOT = pathlib.Path(__file__).parents[2] / "experiments"
FIGURES = sorted(
    f"{path.parent.name}/{path.stem}"
    for pattern in ("fig*.py", "table*.py")
    for path in ROOT.glob(f"*/{pattern}")
)
MODULES = {name: reproduce.load_figure(name) for name in FIGURES}
SCALES = [(name, scale) for name, module in MODULES.items() for scale in module.SWEEP]

# Keys that no run on a CPU reads, with the reason.
NEVER_READ: dict[str, str] = {}
# Settings under which a key is read that means nothing otherwise.
WAYS = ({}, {"optim.name": "sgd", "optim.clip_norm": 1.0}, {"optim.name": "adamw", "optim.weight_decay": 0.1})


def tiny(name, index=0, **overrides):
    """The locked config of one run at scale tiny, with two steps."""
    _, config = reproduce.configs(MODULES[name], "tiny", None)[index]
    config = config.copy_and_resolve_references().unlock()
    config_lib.override(config, {"run.steps": 2, "run.log_every": 1, **two_steps(config), **overrides})
    return config.lock()


def two_steps(config):
    """Measurements that fit into two steps."""
    wanted = {"evaluate.milestones": 2, "evaluate.first": 1}
    known = dict(config_lib.leaves(config))
    return {key: value for key, value in wanted.items() if key in known}


def test_there_are_figures_and_all_are_known_to_the_program():
    assert "diffusion_mem/fig2_memorization_window" in FIGURES
    with pytest.raises(config_lib.ConfigError) as error:
        reproduce.load_figure("zzz/zzz")
    assert all(name in str(error.value) for name in FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_figure_says_what_it_shows_and_how_it_judges(name):
    module = MODULES[name]
    assert module.__doc__
    assert module.TITLE
    assert len(module.CLAIM.__doc__.split()) > 20  # the verdict rule
    assert "tiny" in module.SWEEP
    assert "tiny" not in module.CLAIMED_SCALES
    assert set(module.CLAIMED_SCALES) <= set(module.SWEEP)


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_configs_are_locked_distinct_and_survive_json(name, scale):
    built = reproduce.configs(MODULES[name], scale, None)
    names = [variant.name.lower() for variant, _ in built]
    assert len(set(names)) == len(names) > 0
    texts = set()
    for _, config in built:
        assert config.is_locked
        text = config_lib.to_json(config)
        again = config_lib.from_json(text)
        assert config_lib.diff(config, again) == []
        assert config_lib.fingerprint(config) == config_lib.fingerprint(again)
        texts.add(text)
    assert len(texts) == len(built)


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_first_and_last_run_have_a_task_whose_state_can_be_shaped(name, scale):
    built = reproduce.configs(MODULES[name], scale, 2)
    for _, config in {variant.name: (variant, config) for variant, config in (built[0], built[-1])}.values():
        task = build(config, make_mesh(config_lib.view(config, ParallelConfig, "parallel")))
        state = jax.eval_shape(task.init, run_key(config.run))
        assert state.step.shape == ()
        assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(state.params))
        if task.batches is not None:
            batch = next(task.batches(0))
            assert {leaf.shape[task.batch_axis] for leaf in jax.tree.leaves(batch)} == {
                task.examples_per_step // 2
            }


@pytest.mark.parametrize("name", FIGURES)
def test_tiny_runs_two_steps_and_feeds_plot_and_claim(name, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "run_report", lambda _: None)
    runs = []
    for index in range(len(MODULES[name].SWEEP["tiny"])):
        workdir = tmp_path / str(index)
        config = tiny(name, index)
        assert train.run(config, str(workdir)).step == 2
        assert [row["step"] for row in read_metrics(workdir, kind="train")] == [1, 2]
        runs.append(load_run(workdir, str(index)))
    claims = MODULES[name].CLAIM(runs)
    assert claims
    assert all(isinstance(claim, Claim) and claim.verdict != Verdict.NOT_RUN for claim in claims)
    for image, caption in MODULES[name].plot(runs, tmp_path / "figures"):
        assert image.stat().st_size > 0
        assert image.with_suffix(".csv").exists()
        assert caption


@pytest.mark.parametrize("name", FIGURES)
def test_no_key_is_dead(name, tmp_path, monkeypatch):
    """Every key is read in two steps of some run: through a section's dataclass, or as config.section.key.

    Taking a section apart into its dataclass is no reading.
    """
    monkeypatch.setattr(train, "run_report", lambda _: None)
    read = record_reads(monkeypatch)
    for i, way in enumerate(WAYS):
        config = tiny(name, **way)
        train.run(config, str(tmp_path / str(i)))
    keys = {key for key, _ in config_lib.leaves(config)}
    assert sorted(keys - read - NEVER_READ.keys()) == []
    assert sorted(NEVER_READ.keys() & read) == []
    assert all(len(reason.split()) > 3 for reason in NEVER_READ.values())


def record_reads(monkeypatch):
    """The set of dotted keys that are read from now on."""
    read = set()
    view, get = config_lib.view, ConfigDict.__getattr__

    def recording_view(config, cls, field):
        names = {f.name for f in dataclasses.fields(cls)}

        def getattribute(instance, name):
            if name in names:
                read.add(f"{field}.{name}")
            if name == "__dict__":  # the whole section, as arguments of a function that must take them
                read.update(f"{field}.{name}" for name in names)
            return object.__getattribute__(instance, name)

        return view(config, type(cls.__name__, (cls,), {"__getattribute__": getattribute}), field)

    def recording_get(section, name):
        value = get(section, name)
        if not isinstance(value, ConfigDict):
            read.update(
                path for path in paths.get(frozenset(section.keys()), ()) if path.endswith(f".{name}")
            )
            if "task" in section:
                read.add(name)
        return value

    paths = {}
    for module in MODULES.values():
        whole = module.get_config(scale="tiny")
        for key, _ in config_lib.leaves(whole):
            section = whole
            for part in key.split(".")[:-1]:
                section = section[part]
            paths.setdefault(frozenset(section.keys()), set()).add(key)
    for module in list(sys.modules.values()):
        if getattr(module, "view", None) is view:
            monkeypatch.setattr(module, "view", recording_view)
    monkeypatch.setattr(ConfigDict, "__getattr__", recording_get)
    return read


def test_a_dead_key_would_be_found(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Section:
        used: int = 1
        dead: int = 2

    read = record_reads(monkeypatch)
    assert (
        config_lib.view(
            ConfigDict({"section": config_lib.from_dataclass(Section())}), Section, "section"
        ).used
        == 1
    )
    assert read == {"section.used"}
