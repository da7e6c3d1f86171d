"""Every section of a config is the dataclass that reads it, and every key of it is read."""

import dataclasses

import pytest

from common import config as config_lib
from common.checkpoint import CheckpointConfig
from common.config import ConfigError, view
from common.defaults import base_config
from common.guard import GuardConfig
from common.mesh import ParallelConfig
from common.optim import OptimConfig
from common.profile import ProfileConfig
from common.start import RunConfig

SECTIONS = {
    "run": RunConfig,
    "optim": OptimConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "guard": GuardConfig,
    "profile": ProfileConfig,
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_is_its_dataclass_before_and_after_json(name):
    for config in (base_config("toy"), config_lib.from_json(config_lib.to_json(base_config("toy")))):
        assert view(config, SECTIONS[name], name) == SECTIONS[name]()


def test_there_are_no_other_sections():
    config = base_config("toy")
    assert set(config) == {"task", *SECTIONS}
    assert config.task == "toy"


def test_configs_do_not_share_sections():
    first, second = base_config("toy"), base_config("toy")
    first.run.steps = 7
    assert second.run.steps == RunConfig().steps


@pytest.mark.parametrize("key", [key for key, _ in config_lib.leaves(base_config("toy"))])
def test_every_key_can_be_set_from_the_command_line_to_its_own_value(key):
    config = base_config("toy").lock()
    value = dict(config_lib.leaves(config))[key]
    config_lib.override(config, {key: str(value)})
    assert config_lib.diff(base_config("toy"), config) == []


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_from_a_newer_version_is_refused_by_key(name):
    config = base_config("toy")
    config[name].from_the_future = 1
    with pytest.raises(ConfigError, match=f"{name}.from_the_future=1: unknown key"):
        view(config, SECTIONS[name], name)


def test_sections_are_frozen():
    for cls in SECTIONS.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            cls().steps = 1
