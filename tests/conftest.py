"""Tests run on 8 virtual CPU devices, with strict ranks, warnings as errors (pyproject.toml) and a compile
cache."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from common import runtime

runtime.configure()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
# One execution at a time: with more in flight than XLA's thread pool holds, collectives of 8 virtual devices
# deadlock.
jax.config.update("jax_cpu_enable_async_dispatch", False)


@pytest.fixture
def key() -> jax.Array:
    """A typed PRNG key."""
    return jax.random.key(0)
