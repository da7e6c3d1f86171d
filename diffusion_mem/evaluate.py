"""The two curves of the paper's Fig. 2 as evals: what samples look like, and train against test loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common import schedule, train_state
from common.config import require, view
from common.statistics import bootstrap_interval
from common.task import Eval
from common.train_state import TrainState
from diffusion_mem import fid, loss, memorization, sampler
from diffusion_mem.data import ImageData
from diffusion_mem.process import NoisePredictor, Process

_SAMPLE_BATCH = 1024


@dataclass(frozen=True)
class EvaluateConfig:
    """When and how samples and losses are measured.

    Attributes:
      milestones, first: so many log-spaced steps from `first` to `run.steps`, as in the paper's Fig. 2.
      samples: generated at every milestone, from the same starting noise.
      sampler_steps: DDIM steps.
      features: of the Fréchet distance to the held-out images: "random-conv", or "pixels", which cannot tell
        images from a Gaussian with their mean and covariance.
      threshold: a sample is memorized when its gap ratio is below it (paper: 1/3).
      loss_time: the Ornstein-Uhlenbeck time at which train and test loss are compared (paper: 0.01).
      noise_draws: per image, for that loss (paper: 5).
      gallery: samples kept as an artifact at every milestone, with their nearest training images.
    """

    milestones: int = 20
    first: int = 100
    samples: int = 512
    sampler_steps: int = 50
    features: str = "random-conv"
    threshold: float = 1 / 3
    loss_time: float = 0.01
    noise_draws: int = 5
    gallery: int = 8


def make_evals(
    config: ConfigDict, predict: NoisePredictor, process: Process, train: np.ndarray, images: ImageData
) -> dict[str, Eval]:
    """The evals `loss` (train, test) and `sample` (frechet, memorized with its 95 % interval, a gallery).

    Args:
      train: the training subset, (n, H, W, C) in [-1, 1]; `images` holds the held-out set.
    Raises: ConfigError for a field of `config.evaluate` that cannot be used.
    """
    settings = view(config, EvaluateConfig, "evaluate")
    when = _milestones(settings, config.run.steps)
    _check(settings, process)
    return {
        "loss": Eval(_losses(settings, predict, process, train, images.test), when),
        "sample": Eval(_samples(settings, config.run.seed, predict, process, train, images.test), when),
    }


def _milestones(settings: EvaluateConfig, steps: int) -> schedule.When:
    require(steps >= 1, "run.steps", steps, "must be at least 1")
    require(settings.first >= 1, "evaluate.first", settings.first, "must be at least 1")
    first = min(settings.first, steps)
    room = steps - first + 1
    allowed = f"must be between 1 and {room}, the steps from {first} to run.steps={steps}"
    require(1 <= settings.milestones <= room, "evaluate.milestones", settings.milestones, allowed)
    return schedule.log_spaced(settings.milestones, first, steps)


def _check(settings: EvaluateConfig, process: Process) -> None:
    for field, least in (("samples", 2), ("noise_draws", 1), ("gallery", 1)):
        value = getattr(settings, field)
        require(value >= least, f"evaluate.{field}", value, f"must be at least {least}")
    within = f"must be between 1 and process.num_steps={process.num_steps}"
    steps = settings.sampler_steps
    require(1 <= steps <= process.num_steps, "evaluate.sampler_steps", steps, within)
    require(0 < settings.threshold < 1, "evaluate.threshold", settings.threshold, "must be between 0 and 1")
    require(settings.loss_time > 0, "evaluate.loss_time", settings.loss_time, "must be positive")
    fid.features(settings.features)


def _losses(
    settings: EvaluateConfig, predict: NoisePredictor, process: Process, train: np.ndarray, test: np.ndarray
) -> Callable[[TrainState], Mapping[str, Any]]:
    step = process.nearest_step(settings.loss_time)
    sets = {"train": jnp.asarray(train), "test": jnp.asarray(test)}

    def losses(state: TrainState) -> Mapping[str, Any]:
        """Loss at one noise level, with the same noise draws for both sets and at all times."""
        key = train_state.named_key(state.key, "fixed_time_loss")
        return {
            name: loss.fixed_time_loss(
                predict, state.params, process, x, step, key, settings.noise_draws
            ).mean
            for name, x in sets.items()
        }

    return losses


def _samples(
    settings: EvaluateConfig,
    seed: int,
    predict: NoisePredictor,
    process: Process,
    train: np.ndarray,
    test: np.ndarray,
) -> Callable[[TrainState], Mapping[str, Any]]:
    extract = fid.features(settings.features)
    real = fid.gaussian_stats(extract(test), settings.features)
    train_images = jnp.asarray(train)

    def measure(samples: np.ndarray, ratios: np.ndarray) -> dict[str, float]:
        if not np.isfinite(samples).all():  # a diverged model has no memorized fraction, rather than one of 0
            return dict.fromkeys(("frechet", "memorized", "memorized_low", "memorized_high"), np.nan)
        fake = fid.gaussian_stats(extract(samples), settings.features)
        memorized = ratios < settings.threshold
        low, high = bootstrap_interval(memorized, seed=seed)
        return {
            "frechet": fid.frechet_distance(fake, real).value,
            "memorized": float(memorized.mean()),
            "memorized_low": float(low),
            "memorized_high": float(high),
        }

    def generate(state: TrainState) -> Mapping[str, Any]:
        """Fréchet distance and memorized fraction of samples clipped to the range of images."""
        key = train_state.named_key(state.key, "samples")
        shape, steps = train.shape[1:], settings.sampler_steps
        drawn = sampler.sample(
            predict, state.params, process, key, settings.samples, shape, steps, _SAMPLE_BATCH
        )
        samples = jnp.clip(drawn, -1, 1)
        ratios = memorization.gap_ratio(samples, train_images)
        shown = slice(0, settings.gallery)
        return {
            **measure(np.asarray(samples), np.asarray(ratios.ratio)),
            "samples": np.asarray(samples[shown]),
            "nearest": train[np.asarray(ratios.nearest)[shown]],
        }

    return generate
