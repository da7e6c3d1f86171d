"""The diffusion experiments as a `Task`: noise prediction on a training subset."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from ml_collections import ConfigDict
from optax import GradientTransformation, apply_updates

from common import train_state
from common.batches import array_batches
from common.config import require, view
from common.gradients import check_microbatches, mean_value_and_grad
from common.mesh import batch_shards, check_batch
from common.metrics import global_norm
from common.optim import OptimConfig, learning_rate, make_optimizer, updates_done
from common.parallel import reduce_axis, row_ids, row_keys
from common.task import Batch, Step, Task
from common.train_state import TrainState
from diffusion_mem import data, denoisers, loss
from diffusion_mem.evaluate import make_evals
from diffusion_mem.process import NoisePredictor, Process, ddpm_process


@dataclass(frozen=True)
class DataConfig:
    """The training subset: `n` images of the set `name`.

    Attributes:
      index: which subset of size n (rows index·n … of the pool), as in the official code.
      per_seed: draw the pool's order from the seed, so that seeds differ in their images as well.
      batch_size: images per update, min(batch_size, n) as in the paper; 0 is the full batch, n.
      fill_batch: take batch_size even where n is smaller, each image several times with its own noise: every
        n then has the same number of noise draws in an update.
    """

    name: str = "digits"
    n: int = 128
    index: int = 0
    per_seed: bool = True
    batch_size: int = 512
    fill_batch: bool = False


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
class Predictor:
    """A network as losses and samplers take it; equal networks are equal, so seeds share compiled code."""

    network: nn.Module

    def __call__(self, params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        """The noise in `x`."""
        return self.network.apply({"params": params}, x, t)  # type: ignore[return-value]


def build(config: ConfigDict, mesh: Mesh) -> Task:
    """The task of one seed. Raises ConfigError before any compute for a field that cannot be used."""
    settings, optim = view(config, DataConfig, "data"), view(config, OptimConfig, "optim")
    images = data.load(settings.name)
    train = _subset(images, settings, config.run.seed)
    batch_size = _batch_size(settings, mesh)
    check_microbatches(batch_size, optim.microbatches, batch_shards(mesh))
    process = ddpm_process(**vars(view(config, ProcessConfig, "process")))
    network = _network(view(config, ModelConfig, "model"))
    predict = Predictor(network)
    total_steps = max(config.run.steps, 1)
    optimizer, rate = make_optimizer(optim, total_steps), learning_rate(optim, total_steps)

    def init(key: jax.Array) -> TrainState:
        x = jnp.zeros((1, *images.shape))
        params = network.init(train_state.named_key(key, "init"), x, jnp.zeros(1, jnp.int32))["params"]
        return train_state.create(params, optimizer.init(params), key)

    return Task(
        init=init,
        step=_step(predict, process, optimizer, rate, optim.microbatches, reduce_axis(config.parallel.mode)),
        batches=array_batches({"image": train}, batch_size, config.run.seed, "data.batch_size"),
        evals=make_evals(config, predict, process, train, images),
        examples_per_step=batch_size,
    )


def _network(model: ModelConfig) -> nn.Module:
    require(model.width >= 1, "model.width", model.width, "must be at least 1")
    require(model.blocks >= 1, "model.blocks", model.blocks, "must be at least 1")
    return denoisers.ResidualMLP(model.width, model.blocks)


def _batch_size(settings: DataConfig, mesh: Mesh) -> int:
    size = settings.batch_size
    require(size >= 0, "data.batch_size", size, "must be positive, or 0 for the full batch")
    batch_size = (size if settings.fill_batch else min(size, settings.n)) or settings.n
    check_batch(mesh, batch_size, "data.batch_size")
    return batch_size


def _subset(images: data.ImageData, settings: DataConfig, seed: int) -> np.ndarray:
    pool = images.train_pool
    if settings.per_seed:
        pool = pool[np.random.default_rng(seed).permutation(len(pool))]
    return data.subset(pool, settings.n, settings.index)


def _step(
    predict: NoisePredictor,
    process: Process,
    optimizer: GradientTransformation,
    rate: Callable[[jax.Array], jax.Array],
    microbatches: int,
    axis: str | None,
) -> Step:
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
        metrics = {"loss": value, "gradient_norm": global_norm(grads)}
        return new, {**metrics, "learning_rate": rate(updates_done(state.opt_state))}

    return step
