import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import ConfigError
from diffusion_mem import sampler
from diffusion_mem.denoisers import ResidualMLP
from diffusion_mem.process import ddpm_process, per_row
from diffusion_mem.sampler import ddim, ddim_timesteps, sample

PROCESS = ddpm_process()


def gaussian_optimum(variance, x, t):
    """The best predictor for data of distribution N(0, variance)."""
    return per_row(PROCESS.sigma[t] / (PROCESS.alpha_bar[t] * variance + PROCESS.sigma[t] ** 2), x) * x


def one_image(x0, x, t):
    """The true noise when x0 is the only image there is."""
    return (x - per_row(PROCESS.signal[t], x) * x0[None]) / per_row(PROCESS.sigma[t], x)


def true_noise(noise, x, t):
    """Knows the noise that made x."""
    return noise


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 9, 27, 53, 100, 500, 501, 998, 999, 1000])
def test_timesteps_are_exactly_as_many_as_asked_for(num_steps):
    steps = ddim_timesteps(1000, num_steps)
    assert steps.shape == (num_steps,)
    assert steps[0] == 999
    assert np.all(np.diff(steps) < 0)
    assert steps[-1] == {1: 999, 1000: 0}.get(num_steps, 1)
    if num_steps > 1:
        assert np.ptp(np.diff(steps)) <= 1


@pytest.mark.parametrize("num_train_steps", [1, 2, 3, 10])
def test_timesteps_of_short_schedules(num_train_steps):
    for num_steps in range(1, num_train_steps + 1):
        steps = ddim_timesteps(num_train_steps, num_steps)
        assert len(set(steps.tolist())) == num_steps
        assert steps[0] == num_train_steps - 1
        assert steps[-1] >= 0


@pytest.mark.parametrize("num_steps", [0, -1, 1001])
def test_impossible_number_of_steps_is_refused(num_steps):
    with pytest.raises(ConfigError, match=f"num_steps={num_steps}"):
        ddim_timesteps(1000, num_steps)
    with pytest.raises(ConfigError, match=f"num_steps={num_steps}"):
        sample(gaussian_optimum, 1.0, PROCESS, jax.random.key(0), 4, (2,), num_steps, 4)


@pytest.mark.parametrize("num_steps", [1, 2, 20, 1000])
def test_perfect_noise_predictor_gives_back_the_image(num_steps):
    x0, noise = jax.random.normal(jax.random.key(0), (2, 3, 4, 4, 1))
    x_init = PROCESS.noisy(x0, noise, jnp.full(3, 999))
    np.testing.assert_allclose(ddim(true_noise, noise, PROCESS, x_init, num_steps), x0, atol=1e-4)


@pytest.mark.parametrize("num_steps", [1, 7, 50])
def test_a_single_image_is_sampled_from_any_start(num_steps):
    x0, *starts = jax.random.normal(jax.random.key(0), (5, 4, 4, 1))
    out = ddim(one_image, x0, PROCESS, jnp.stack(starts), num_steps)
    np.testing.assert_allclose(out, jnp.broadcast_to(x0[None], out.shape), atol=1e-4)


def test_gaussian_data_are_sampled_with_their_variance():
    # The probability-flow map of N(0, v) is linear: x_0 = x_T sqrt(v / (alpha_bar v + 1 - alpha_bar)).
    x_init = jax.random.normal(jax.random.key(0), (16, 4))
    out = ddim(gaussian_optimum, 0.25, PROCESS, x_init, 500)
    np.testing.assert_allclose(out, 0.5 * x_init, rtol=0.02, atol=1e-5)


def test_each_step_asks_the_network_at_its_own_time():
    asked = []

    def record(params, x, t):
        jax.debug.callback(lambda steps: asked.append(np.asarray(steps)), t, ordered=True)
        return x

    jax.block_until_ready(ddim(record, None, PROCESS, jnp.ones((2, 3)), 9))
    jax.effects_barrier()
    np.testing.assert_array_equal([steps[0] for steps in asked], ddim_timesteps(1000, 9))
    assert all(steps.shape == (2,) for steps in asked)


@pytest.mark.parametrize("num_steps", [1, 2, 10])
def test_sampler_is_finite_on_short_schedules(num_steps):
    out = ddim(lambda p, x, t: 0.5 * x, None, ddpm_process(10), jnp.ones((2, 3)), num_steps)
    assert np.isfinite(out).all()


@pytest.fixture(scope="module")
def network():
    model = ResidualMLP(width=16, blocks=1)
    x, t = jnp.zeros((1, 4, 4, 1)), jnp.zeros(1, jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), x, t)
    head = params["params"]["head"]
    head["kernel"] = 0.1 * jax.random.normal(jax.random.key(1), head["kernel"].shape)
    return model.apply, params


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 64])
def test_samples_do_not_depend_on_the_batch_size(network, batch_size):
    draw = lambda size, count=10: sample(*network, PROCESS, jax.random.key(2), count, (4, 4, 1), 5, size)  # noqa: E731
    whole = draw(10)
    assert whole.shape == (10, 4, 4, 1)
    np.testing.assert_allclose(draw(batch_size), whole, rtol=1e-4, atol=1e-4 * float(jnp.abs(whole).max()))
    np.testing.assert_allclose(
        draw(batch_size, 7), whole[:7], rtol=1e-4, atol=1e-4 * float(jnp.abs(whole).max())
    )


def test_samples_are_deterministic_and_differ_by_key_and_row(network):
    draw = lambda seed: sample(*network, PROCESS, jax.random.key(seed), 4, (4, 4, 1), 5, 2)  # noqa: E731
    first = draw(0)
    np.testing.assert_array_equal(first, draw(0))
    assert np.abs(first - draw(1)).max() > 1e-3
    assert np.abs(first[:2] - first[2:]).max() > 1e-3


def test_ragged_last_block_and_new_parameters_do_not_recompile(network):
    apply_fn, params = network
    sampler._sample_rows.clear_cache()
    for scale in (1.0, 2.0):
        scaled = jax.tree.map(lambda p, s=scale: p * s, params)
        sample(apply_fn, scaled, PROCESS, jax.random.key(0), 11, (4, 4, 1), 5, 4)
    assert sampler._sample_rows._cache_size() == 1


@pytest.mark.parametrize(("count", "batch", "field"), [(0, 4, "num_samples=0"), (4, 0, "batch_size=0")])
def test_bad_counts_are_refused(count, batch, field):
    with pytest.raises(ConfigError, match=field):
        sample(gaussian_optimum, 1.0, PROCESS, jax.random.key(0), count, (2,), 5, batch)
