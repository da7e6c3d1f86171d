"""The config sections every run has, with their defaults: those of the dataclasses that read them."""

from ml_collections import ConfigDict

from common.checkpoint import CheckpointConfig
from common.config import from_dataclass
from common.guard import GuardConfig
from common.mesh import ParallelConfig
from common.optim import OptimConfig
from common.profile import ProfileConfig
from common.start import RunConfig


def base_config(task: str) -> ConfigDict:
    """A config for the package `task`: sections run, optim, parallel, checkpoint, guard and profile.

    A figure's `get_config` starts from it and adds the sections of its paper.
    """
    config = ConfigDict({"task": task})
    config.run = from_dataclass(RunConfig())
    config.optim = from_dataclass(OptimConfig())
    config.parallel = from_dataclass(ParallelConfig())
    config.checkpoint = from_dataclass(CheckpointConfig())
    config.guard = from_dataclass(GuardConfig())
    config.profile = from_dataclass(ProfileConfig())
    return config
