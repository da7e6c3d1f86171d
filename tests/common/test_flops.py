"""FLOPs of known products, through every kind of nesting."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from common import flops
from common.mesh import ParallelConfig, make_mesh

A, B = jnp.zeros((3, 5)), jnp.zeros((5, 7))
PRODUCT = 2 * 3 * 5 * 7


def count_flops(function, *arguments):
    return flops.count_flops(jax.make_jaxpr(function)(*arguments))


def scanned(x, w):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=11)[0]


def test_a_product_is_two_operations_a_multiply_add():
    assert count_flops(jnp.matmul, A, B) == PRODUCT


def test_batched_products_count_every_batch():
    assert count_flops(jax.vmap(jnp.matmul), jnp.zeros((4, 3, 5)), jnp.zeros((4, 5, 7))) == 4 * PRODUCT


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))])
def test_calls_are_looked_into(wrap):
    assert count_flops(wrap(jnp.matmul), A, B) == PRODUCT


def test_a_scan_counts_as_often_as_it_runs():
    assert count_flops(scanned, jnp.zeros((3, 5)), jnp.zeros((5, 5))) == 11 * 2 * 3 * 5 * 5


def test_a_cond_counts_its_dearest_branch():
    def either(x, w):
        return lax.cond(x.sum() > 0, lambda: x @ w, lambda: x @ w @ w.T @ w)

    assert count_flops(either, A, B) == 3 * PRODUCT


def test_a_convolution_counts_kernel_times_output():
    x, kernel = jnp.zeros((2, 8, 8, 3)), jnp.zeros((3, 3, 3, 5))

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert count_flops(convolve, x, kernel) == 2 * (2 * 8 * 8 * 5) * 27


def test_gradients_count_forward_and_backward_products():
    loss = jax.grad(lambda w, x: jnp.square(x @ w).sum(), argnums=(0, 1))
    assert count_flops(loss, B, A) == 3 * PRODUCT


def test_a_shard_map_counts_all_its_devices():
    mesh = make_mesh(ParallelConfig(), jax.devices()[:4])
    rows = jax.sharding.PartitionSpec("data")
    specs = (rows, jax.sharding.PartitionSpec())
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    assert count_flops(mapped, jnp.zeros((8, 5)), B) == 2 * 8 * 5 * 7


def test_element_wise_work_is_left_out():
    assert count_flops(jnp.tanh, A) == 0
