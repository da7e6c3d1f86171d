"""What the compiled step costs: FLOPs, memory, model FLOP utilisation, traces."""

import os
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.config import ConfigError, require
from common.parallel import CompiledStep


@dataclass(frozen=True)
class ProfileConfig:
    """A trace for TensorBoard / Perfetto in `<workdir>/trace`, of `trace_steps` steps (0 is off) from
    `trace_start`."""

    trace_start: int = 10
    trace_steps: int = 0


@dataclass(frozen=True)
class Cost:
    """What one step needs.

    Attributes:
      parameters: number of parameters.
      flops: floating-point operations of one step's matrix products and convolutions, on all devices.
      memory: bytes of arguments, outputs and temporaries on one device.
      available: bytes one device has; 0 where the backend does not say.
    """

    parameters: int
    flops: float
    memory: int
    available: int


def count_parameters(params: Any) -> int:
    """Number of scalars in a tree of arrays or ShapeDtypeStructs."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def cost_of(compiled: CompiledStep, params: Any, device: Any) -> Cost:
    """The cost of a compiled step; memory is 0 where the backend does not report it."""
    stats = compiled.executable.memory_analysis()
    memory = 0
    if stats is not None:
        memory = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        memory -= stats.alias_size_in_bytes  # donated: counted as argument and as output
    return Cost(count_parameters(params), compiled.flops, int(memory), device_memory(device))


def device_memory(device: Any) -> int:
    """Bytes one device may use, for a CPU device its share of the machine's memory; 0 if unknown."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def check_fits(cost: Cost) -> None:
    """Raises ConfigError when one step cannot fit on a device."""
    if cost.available and cost.memory > cost.available:
        needed, available = cost.memory / 2**30, cost.available / 2**30
        raise ConfigError(
            f"one step needs {needed:.2f} GiB per device, but there are {available:.2f}: lower the batch, "
            "raise optim.microbatches, or shard parameters with parallel.fsdp"
        )


def describe(cost: Cost) -> str:
    """One line for the console."""
    room = f" of {cost.available / 2**30:.1f}" if cost.available else ""
    return (
        f"{cost.parameters:,} parameters, {cost.flops / 1e9:.3g} GFLOP per step, "
        f"{cost.memory / 2**30:.3g}{room} GiB per device"
    )


def matmul_rate(size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of a float32 matrix product on the default device, the best of `repeats`: what it can reach."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(x, x))
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / max(best, 1e-9)  # a coarse clock may see no time pass


class Tracer:
    """Starts and stops the JAX profiler at the configured steps."""

    def __init__(self, config: ProfileConfig, folder: str):
        steps, start = config.trace_steps, config.trace_start
        require(steps >= 0, "profile.trace_steps", steps, "must be 0 (off) or positive")
        require(start >= 0, "profile.trace_start", start, "must be at least 0")
        self._config, self._folder, self._on = config, folder, False

    def before(self, step: int) -> None:
        """Call before each step with its global number."""
        start, stop = self._config.trace_start, self._config.trace_start + self._config.trace_steps
        if not self._on and start <= step < stop:
            jax.profiler.start_trace(self._folder)
            self._on = True
        elif self._on and step >= stop:
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self._on:
            jax.profiler.stop_trace()
            self._on = False
