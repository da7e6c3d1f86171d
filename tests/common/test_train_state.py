"""Named random streams: independent, repeatable, never threaded."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import train_state

NAMES = ("noise", "dropout", "init", "data", "")


def bits(key: jax.Array) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def state(step: int, seed: int = 0) -> train_state.TrainState:
    return train_state.create({}, {}, jax.random.key(seed)).replace(step=jnp.int32(step))


def test_a_new_state_is_at_step_0_with_nothing_extra(key):
    new = train_state.create({"w": jnp.ones(2)}, (), key)
    assert (new.step.dtype, int(new.step), new.extra, new.guard) == (jnp.int32, 0, {}, {})
    assert train_state.create({}, (), key, extra={"ema": 1}).extra == {"ema": 1}


def test_names_steps_and_seeds_never_share_a_key():
    keys = {
        bits(train_state.step_key(state(step, seed), name))
        for name in NAMES
        for step in range(20)
        for seed in range(3)
    }
    assert len(keys) == len(NAMES) * 20 * 3


def test_streams_are_uncorrelated():
    draws = np.stack([jax.random.normal(train_state.step_key(state(3), name), (2000,)) for name in NAMES])
    correlation = np.corrcoef(draws) - np.eye(len(NAMES))
    assert np.abs(correlation).max() < 5 / 2000**0.5


def test_the_key_is_a_function_of_the_state_alone():
    first = train_state.step_key(state(7), "noise")
    assert bits(first) == bits(jax.jit(lambda s: train_state.step_key(s, "noise"))(state(7)))
    train_state.step_key(state(7), "dropout")  # drawing from one stream does not move another
    assert bits(first) == bits(train_state.step_key(state(7), "noise"))
    assert bits(first) == bits(jax.random.fold_in(train_state.named_key(jax.random.key(0), "noise"), 7))


@pytest.mark.parametrize("hash_seed", ["1"])
def test_streams_are_the_same_in_another_process(hash_seed):
    code = (
        "import jax; from common.train_state import named_key;"
        "print(jax.random.key_data(named_key(jax.random.key(0), 'noise')).tolist())"
    )
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    root = pathlib.Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=True,
        timeout=60,
        cwd=root,
    )
    assert out.stdout.strip() == str(list(bits(train_state.named_key(jax.random.key(0), "noise"))))
