"""Gradients of a weighted mean do not depend on how the batch is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from common.config import ConfigError
from common.gradients import check_microbatches, mean_value_and_grad
from common.mesh import ParallelConfig, batch_sharding, make_mesh, replicated
from common.optim import OptimConfig, make_optimizer

LENGTH = 40


def token_loss(params, batch):
    """Squared errors of the unmasked tokens, with their number."""
    errors = jnp.square(jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) * batch["mask"]
    return errors.sum(), (batch["mask"].sum(), {"error": jnp.sqrt(errors + 1e-12).sum()})


def tokens(counts: tuple[int, ...]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH)[None] < np.array(counts)[:, None]
    return {
        "x": jnp.asarray(rng.normal(size=(len(counts), LENGTH, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(len(counts), LENGTH)), jnp.float32),
        "mask": jnp.asarray(mask, jnp.float32),
    }


PARAMS = {"w": jnp.array([0.3, -0.2, 0.5])}


def pooled(batch):
    """The definition: one mean over all unmasked tokens."""
    return jax.value_and_grad(lambda p: token_loss(p, batch)[0] / batch["mask"].sum())(PARAMS)


def assert_equal(result, batch) -> None:
    value, grads = pooled(batch)
    np.testing.assert_allclose(result[0], value, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(result[1]["w"], grads["w"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        result[2]["error"], token_loss(PARAMS, batch)[1][1]["error"] / batch["mask"].sum(), rtol=1e-5
    )


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_unequal_token_counts_in_microbatches(microbatches):
    batch = tokens((3, 30, 11, 1))
    assert_equal(
        jax.jit(functools.partial(mean_value_and_grad, token_loss, microbatches=microbatches))(PARAMS, batch),
        batch,
    )


@pytest.mark.parametrize(("counts", "microbatches"), [((3, 30), 1), ((1, 7), 1), ((3, 30, 0, 9), 2)])
def test_unequal_token_counts_on_two_devices(counts, microbatches):
    batch, mesh = tokens(counts), make_mesh(ParallelConfig(mode="shard_map"), jax.devices()[:2])
    step = functools.partial(mean_value_and_grad, token_loss, microbatches=microbatches, axis="data")
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    assert_equal(jax.jit(mapped)(PARAMS, batch), batch)


def test_global_view_on_two_devices():
    batch, mesh = tokens((3, 30, 8, 2)), make_mesh(ParallelConfig(), jax.devices()[:2])
    step = jax.jit(
        functools.partial(mean_value_and_grad, token_loss, microbatches=2),
        in_shardings=(replicated(mesh), batch_sharding(mesh)),
    )
    assert_equal(step(PARAMS, batch), batch)


def test_a_batch_without_tokens_gives_zeros():
    value, grads, _ = mean_value_and_grad(token_loss, PARAMS, tokens((0, 0)))
    assert float(value) == 0.0
    np.testing.assert_array_equal(grads["w"], np.zeros(3))


def test_gradients_keep_the_dtype_of_the_parameters():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    for microbatches in (1, 2):
        _, grads, _ = mean_value_and_grad(token_loss, params, tokens((3, 4)), microbatches)
        assert grads["w"].dtype == jnp.bfloat16


def test_typed_keys_may_be_part_of_the_batch():
    def loss(params, batch):
        noise = jax.vmap(jax.random.normal)(batch["key"])
        return (params * noise).sum(), (jnp.float32(len(noise)), {})

    batch = {"key": jax.random.split(jax.random.key(0), 4)}
    one, four = (mean_value_and_grad(loss, jnp.ones(()), batch, k)[0] for k in (1, 4))
    np.testing.assert_allclose(one, four, rtol=1e-6)


@pytest.mark.parametrize(
    ("batch", "parts", "shards"), [(8, 3, 1), (8, 2, 8), (8, 0, 1), (8, -1, 1), (12, 8, 1), (8, 16, 1)]
)
def test_microbatches_that_do_not_divide_are_refused(batch, parts, shards):
    with pytest.raises(ConfigError, match=f"optim.microbatches={parts}"):
        check_microbatches(batch, parts, shards)


def test_microbatches_that_divide_pass():
    check_microbatches(16, 2, 8)
    check_microbatches(16, 1, 1)


def test_an_unchecked_step_is_refused_while_it_is_traced():
    with pytest.raises(ConfigError, match=r"optim.microbatches=3: must divide the batch of 4"):
        jax.eval_shape(
            functools.partial(mean_value_and_grad, token_loss, microbatches=3), PARAMS, tokens((1, 2, 3, 4))
        )


def test_accumulation_costs_at_most_one_more_copy_of_the_parameters():
    """At the same microbatch, so that the activations are equal."""
    params = {"w": jnp.zeros((64, 512)), "v": jnp.zeros((512, 1))}
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    optimizer = make_optimizer(OptimConfig(), 10)

    def memory(microbatches: int) -> int:
        def loss(p, batch):
            return jnp.square(jnp.tanh(batch @ p["w"]) @ p["v"]).sum(), (jnp.float32(len(batch)), {})

        def step(p, opt_state, batch):
            _, grads, _ = mean_value_and_grad(loss, p, batch, microbatches)
            updates, opt_state = optimizer.update(grads, opt_state, p)
            return jax.tree.map(jnp.add, p, updates), opt_state

        batch = jax.ShapeDtypeStruct((4 * microbatches, 64), jnp.float32)
        jitted = jax.jit(step, donate_argnums=(0, 1))
        stats = jitted.lower(params, optimizer.init(params), batch).compile().memory_analysis()
        return stats.temp_size_in_bytes + stats.argument_size_in_bytes - batch.size * 4

    grown = memory(4) - memory(1)
    assert grown <= 1.25 * size, (grown / size, size)
