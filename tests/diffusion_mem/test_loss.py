import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import ConfigError
from diffusion_mem.data import normalise
from diffusion_mem.denoisers import ResidualMLP
from diffusion_mem.loss import epsilon_loss, fixed_time_loss
from diffusion_mem.process import ddpm_process, per_row

PROCESS = ddpm_process()


def zero(params, x, t):
    """Predicts no noise."""
    return jnp.zeros_like(x)


def gaussian_optimum(variance, x, t):
    """The best predictor for data of distribution N(0, variance)."""
    return per_row(PROCESS.sigma[t] / (PROCESS.alpha_bar[t] * variance + PROCESS.sigma[t] ** 2), x) * x


def scaled_by_time(params, x, t):
    """Reveals which steps were drawn."""
    return jnp.zeros_like(x) + per_row(1000.0 * t, x)


def keys(seed, count):
    return jax.random.split(jax.random.key(seed), count)


def test_loss_of_no_prediction_is_one_a_row():
    x0 = jax.random.normal(jax.random.key(0), (64, 8, 8, 1))
    losses = epsilon_loss(zero, None, PROCESS, x0, keys(1, 64))
    assert losses.shape == (64,)
    assert abs(float(losses.mean()) - 1) < 0.1


def test_a_row_depends_on_its_own_key_only():
    x0 = jax.random.normal(jax.random.key(0), (8, 5))
    row_keys = keys(1, 8)
    whole = epsilon_loss(gaussian_optimum, 1.0, PROCESS, x0, row_keys)
    parts = [
        epsilon_loss(gaussian_optimum, 1.0, PROCESS, x0[i : i + 2], row_keys[i : i + 2])
        for i in range(0, 8, 2)
    ]
    np.testing.assert_allclose(jnp.concatenate(parts), whole, rtol=1e-6)
    order = jnp.asarray([3, 1, 0, 2, 7, 6, 5, 4])
    np.testing.assert_allclose(
        epsilon_loss(gaussian_optimum, 1.0, PROCESS, x0[order], row_keys[order]), whole[order]
    )
    assert np.unique(np.asarray(whole)).size == 8


def test_steps_are_uniform_and_leave_out_step_zero():
    process = ddpm_process(5)
    losses = epsilon_loss(scaled_by_time, None, process, jnp.zeros((4000, 1)), keys(0, 4000))
    steps, counts = np.unique(np.round(np.sqrt(losses) / 1000).astype(int), return_counts=True)
    np.testing.assert_array_equal(steps, [1, 2, 3, 4])
    # Five standard deviations of a count of 4000 draws with probability 1/4.
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 3 / 16)


def test_process_of_one_step_cannot_be_trained():
    with pytest.raises(ConfigError, match="num_steps=1"):
        epsilon_loss(zero, None, ddpm_process(1), jnp.zeros((2, 3)), keys(0, 2))


def test_same_loss_under_jit_and_gradient_is_finite():
    model = ResidualMLP(width=16, blocks=1)
    x0 = jax.random.normal(jax.random.key(0), (6, 4, 4, 1))
    params = jax.jit(model.init)(jax.random.key(1), x0, jnp.zeros(6, jnp.int32))
    mean_loss = lambda p: epsilon_loss(model.apply, p, PROCESS, x0, keys(2, 6)).mean()  # noqa: E731
    np.testing.assert_allclose(jax.jit(mean_loss)(params), mean_loss(params), rtol=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.grad(mean_loss)(params)))


@pytest.mark.parametrize(
    "raw", [np.uint8([[[0, 255]]]), np.float64([[[0.0, 255.0]]]), np.float32([[[3.5, 200.0]]])]
)
def test_loss_starts_at_one_for_scaled_images(raw):
    model = ResidualMLP(width=16, blocks=1)
    x0 = jnp.asarray(np.repeat(normalise(raw, 255), 512, axis=0))
    params = jax.jit(model.init)(jax.random.key(0), x0, jnp.zeros(512, jnp.int32))
    losses = epsilon_loss(model.apply, params, PROCESS, x0, keys(1, 512))
    assert abs(float(losses.mean()) - 1) < 0.2


@pytest.mark.parametrize("step", [40, 300, 900])
def test_fixed_time_loss_is_the_analytic_one_for_gaussian_data(step):
    x = 2.0 * jax.random.normal(jax.random.key(0), (3000, 4))
    estimate = fixed_time_loss(gaussian_optimum, 4.0, PROCESS, x, step, jax.random.key(1))
    signal = float(PROCESS.alpha_bar[step]) * 4.0
    expected = signal / (signal + float(PROCESS.sigma[step]) ** 2)
    assert 0 < float(estimate.stderr) < 0.02
    assert abs(float(estimate.mean) - expected) < 4 * float(estimate.stderr)


@pytest.mark.parametrize("block_size", [1, 4, 10, 512])
def test_fixed_time_loss_does_not_depend_on_blocks(block_size):
    x = jax.random.normal(jax.random.key(0), (10, 3, 3, 1))
    whole = fixed_time_loss(gaussian_optimum, 1.0, PROCESS, x, 40, jax.random.key(1), block_size=10)
    blocked = fixed_time_loss(gaussian_optimum, 1.0, PROCESS, x, 40, jax.random.key(1), block_size=block_size)
    np.testing.assert_allclose(blocked.mean, whole.mean, rtol=1e-6)
    np.testing.assert_allclose(blocked.stderr, whole.stderr, rtol=1e-5)


def test_fixed_time_loss_shares_noise_between_sets_and_times():
    x = jax.random.normal(jax.random.key(0), (10, 6))
    args = (zero, None, PROCESS)
    one = fixed_time_loss(*args, x, 40, jax.random.key(1))
    other_images_and_time = fixed_time_loss(*args, x + 1, 700, jax.random.key(1))
    np.testing.assert_array_equal(one.mean, other_images_and_time.mean)
    assert float(one.mean) != float(fixed_time_loss(*args, x, 40, jax.random.key(2)).mean)


def test_fixed_time_loss_averages_draws():
    x = jnp.zeros((2000, 1))
    few = fixed_time_loss(zero, None, PROCESS, x, 40, jax.random.key(1), num_noise=1)
    many = fixed_time_loss(zero, None, PROCESS, x, 40, jax.random.key(1), num_noise=16)
    # The variance of eps^2 is 2: standard errors sqrt(2 / 2000) and a quarter of it.
    np.testing.assert_allclose(few.stderr, np.sqrt(2 / 2000), rtol=0.2)
    np.testing.assert_allclose(many.stderr, np.sqrt(2 / 2000) / 4, rtol=0.2)


def test_fixed_time_loss_refuses_an_empty_set():
    with pytest.raises(ConfigError, match="at least one row"):
        fixed_time_loss(zero, None, PROCESS, jnp.zeros((0, 3)), 40, jax.random.key(0))
