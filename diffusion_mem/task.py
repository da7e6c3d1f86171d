"""The diffusion experiments as a `Task`: noise prediction on a training subset, with the paper's two curves as evals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from ml_collections import ConfigDict
from optax import apply_updates

from common import schedule, train_state
from common.batches import array_batches
from common.config import require, view
from common.gradients import check_microbatches, mean_value_and_grad
from common.mesh import batch_shards, check_batch
from common.metrics import global_norm
from common.optim import OptimConfig, make_optimizer
from common.parallel import reduce_axis, row_ids, row_keys
from common.task import Batch, Eval, Task
from common.train_state import TrainState
from diffusion_mem import data, denoisers, fid, loss, memorization, sampler
from diffusion_mem.process import NoisePredictor, Process, ddpm_process


@dataclass(frozen=True)
class DataConfig:
    """The training subset: `n` images of the set `name`.

    Attributes:
      index: which subset of size n (rows index·n … of the pool), as in the official code.
      per_seed: draw the pool's order from the seed, so that seeds differ in their images as well.
      batch_size: images per update; at most n are taken: 0 is the full batch, n.
    """

    name: str = "digits"
    n: int = 128
    index: int = 0
    per_seed: bool = True
    batch_size: int = 512


@dataclass(frozen=True)
class ProcessConfig:
    """The official DDPM schedule: `num_steps` betas from `beta_min` to `beta_max`."""

    num_steps: int = 1000
    beta_min: float = 1e-4
    beta_max: float = 2e-2


@dataclass(frozen=True)
class ModelConfig:
    """The residual MLP denoiser: hidden width and number of residual blocks."""

    width: int = 256
    blocks: int = 3


@dataclass(frozen=True)
class EvaluateConfig:
    """When and how samples and losses are measured.

    Attributes:
      milestones, first: so many log-spaced steps from `first` to `run.steps`, as in the paper's Fig. 2.
      samples: generated at every milestone.
      sampler_steps: DDIM steps.
      features: of the Fréchet distance to the held-out images: "pixels" or "random-conv".
      threshold: a sample is memorized when its gap ratio is below it (paper: 1/3).
      loss_time: the OU time at which train and test loss are compared (paper: 0.01).
      noise_draws: per image, for that loss (paper: 5).
      gallery: samples kept as an artifact at every milestone, with their nearest training images.
    """

    milestones: int = 20
    first: int = 100
    samples: int = 512
    sampler_steps: int = 50
    features: str = "pixels"
    threshold: float = 1 / 3
    loss_time: float = 0.01
    noise_draws: int = 5
    gallery: int = 8


@dataclass(frozen=True)
class Predictor:
    """A network as the function losses and samplers take; equal networks compare equal, so seeds share compiled code."""

    network: nn.Module

    def __call__(self, params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        """The noise in `x`."""
        return self.network.apply({"params": params}, x, t)  # type: ignore[return-value]


def build(config: ConfigDict, mesh: Mesh) -> Task:
    """The task of one seed. Raises ConfigError before any compute for a field that cannot be used."""
    settings, optim = view(config.data, DataConfig, "data"), view(config.optim, OptimConfig, "optim")
    model = view(config.model, ModelConfig, "model")
    for field in ("width", "blocks"):
        require(getattr(model, field) >= 1, f"model.{field}", getattr(model, field), "must be at least 1")
    images = data.load(settings.name)
    train = _subset(images, settings, config.run.seed)
    batch_size = min(settings.batch_size, settings.n) or settings.n
    require(settings.batch_size >= 0, "data.batch_size", settings.batch_size, "must be 0 (full batch) or positive")
    check_batch(mesh, batch_size, "data.batch_size")
    check_microbatches(batch_size, optim.microbatches, batch_shards(mesh))
    process = ddpm_process(**vars(view(config.process, ProcessConfig, "process")))
    network = denoisers.ResidualMLP(model.width, model.blocks)
    predict = Predictor(network)
    optimizer = make_optimizer(optim, max(config.run.steps, 1))

    def init(key: jax.Array) -> TrainState:
        x = jnp.zeros((1, *images.shape))
        params = network.init(train_state.named_key(key, "init"), x, jnp.zeros(1, jnp.int32))["params"]
        return train_state.create(params, optimizer.init(params), key)

    return Task(
        init=init,
        step=_step(predict, process, optimizer, optim.microbatches, reduce_axis(config.parallel.mode)),
        batches=array_batches({"image": train}, batch_size, config.run.seed, "data.batch_size"),
        evals=_evals(config, predict, process, train, images),
        examples_per_step=batch_size,
    )


def _subset(images: data.ImageData, settings: DataConfig, seed: int) -> np.ndarray:
    pool = images.train_pool
    if settings.per_seed:
        pool = pool[np.random.default_rng(seed).permutation(len(pool))]
    return data.subset(pool, settings.n, settings.index)


def _step(predict: NoisePredictor, process: Process, optimizer: Any, microbatches: int, axis: str | None) -> Any:
    def sum_loss(params: Any, batch: Batch) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        losses = loss.epsilon_loss(predict, params, process, batch["image"], batch["key"])
        return losses.sum(), (jnp.asarray(losses.size, jnp.float32), {})

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, jax.Array]]:
        keys = row_keys(train_state.step_key(state, "noise"), row_ids(batch["image"].shape[0], axis))
        batch = {"image": batch["image"], "key": keys}
        value, grads, _ = mean_value_and_grad(sum_loss, state.params, batch, microbatches, axis)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = apply_updates(state.params, updates)
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"loss": value, "gradient_norm": global_norm(grads)}

    return step


def _evals(
    config: ConfigDict, predict: NoisePredictor, process: Process, train: np.ndarray, images: data.ImageData
) -> dict[str, Eval]:
    settings = view(config.evaluate, EvaluateConfig, "evaluate")
    first = min(settings.first, config.run.steps)
    when = schedule.log_spaced(settings.milestones, first, config.run.steps)
    step = process.nearest_step(settings.loss_time)
    extract = fid.features(settings.features)
    real = fid.gaussian_stats(extract(images.test), settings.features)
    train_images, test_images = jnp.asarray(train), jnp.asarray(images.test)

    def losses(state: TrainState) -> Mapping[str, Any]:
        """Train and test loss at one noise level, with common noise draws at all times (Fig. 2, lower row)."""
        key = train_state.named_key(state.key, "fixed_time_loss")
        on = {"train": train_images, "test": test_images}
        return {
            name: loss.fixed_time_loss(predict, state.params, process, x, step, key, settings.noise_draws).mean
            for name, x in on.items()
        }

    def generated(state: TrainState) -> Mapping[str, Any]:
        """Fréchet distance and memorized fraction of fresh samples (Fig. 2, upper row)."""
        key = train_state.named_key(state.key, "samples")
        samples = sampler.sample(
            predict, state.params, process, key, settings.samples, images.shape, settings.sampler_steps, 512
        )
        ratios = memorization.gap_ratio(samples, train_images)
        memorized = np.asarray(ratios.ratio) < settings.threshold
        interval = memorization.bootstrap_interval(memorized, seed=config.run.seed)
        clipped = np.clip(np.asarray(samples), -1, 1)
        distance = fid.frechet_distance(fid.gaussian_stats(extract(clipped), settings.features), real)
        shown = slice(0, settings.gallery)
        return {
            "frechet": distance.value,
            "memorized": memorized.mean(),
            "memorized_low": interval.low,
            "memorized_high": interval.high,
            "samples": clipped[shown],
            "nearest": train[np.asarray(ratios.nearest)[shown]],
        }

    return {"loss": Eval(losses, when), "sample": Eval(generated, when)}
