import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import ConfigError
from diffusion_mem.process import ddpm_process, from_betas

REFERENCE = np.load(pathlib.Path(__file__).parents[1] / "reference" / "diffusion.npz", allow_pickle=False)


def test_schedule_is_the_official_one():
    process = ddpm_process()
    np.testing.assert_allclose(process.alpha_bar, REFERENCE["schedule/alpha_cumulative"], atol=1e-6)
    ratio = np.asarray(process.alpha_bar, np.float64)[1:] / np.asarray(process.alpha_bar, np.float64)[:-1]
    np.testing.assert_allclose(1 - ratio, REFERENCE["schedule/beta"][1:], atol=1e-6)


def test_noise_level_of_the_first_step_keeps_float32_precision():
    # sqrt(1 - 0.9999) from a float32 alpha_bar is off by 1e-4.
    np.testing.assert_allclose(ddpm_process().sigma[0], np.sqrt(1e-4), rtol=1e-6)


def test_tables_agree_with_each_other():
    process = ddpm_process()
    np.testing.assert_allclose(process.signal**2 + process.sigma**2, 1.0, atol=1e-6)
    np.testing.assert_allclose(jnp.exp(-process.ou_time), process.signal, rtol=1e-6)
    assert process.num_steps == 1000


def test_paper_times():
    process = ddpm_process()
    assert process.nearest_step(0.01) == 40
    np.testing.assert_allclose(process.time(jnp.asarray(40)), 0.0102, atol=5e-5)
    np.testing.assert_allclose(process.time(jnp.asarray([999])), [5.06], atol=5e-3)
    assert process.nearest_step(1e9) == 999
    assert process.nearest_step(0.0) == 0


@pytest.mark.parametrize("num_steps", [1, 2, 10, 250, 1000])
def test_alpha_bar_falls_strictly_between_one_and_zero(num_steps):
    alpha_bar = np.asarray(ddpm_process(num_steps).alpha_bar)
    assert alpha_bar.shape == (num_steps,)
    assert np.all((alpha_bar > 0) & (alpha_bar < 1))
    assert np.all(np.diff(alpha_bar) < 0)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 2, 2, 1), (3, 2, 4, 4, 1)])
def test_noisy_weights_each_row_by_its_own_step(shape):
    process = ddpm_process()
    x0, noise = jax.random.normal(jax.random.key(0), (2, *shape))
    t = jnp.asarray([0, 40, 999])
    expected = [process.signal[s] * x0[i] + process.sigma[s] * noise[i] for i, s in enumerate(t)]
    np.testing.assert_allclose(process.noisy(x0, noise, t), jnp.stack(expected), rtol=1e-6)
    shared = process.noisy(x0, noise, t[1])
    np.testing.assert_allclose(shared, process.noisy(x0, noise, jnp.full(3, 40)), rtol=1e-6)


def test_noisy_takes_two_batch_axes():
    process = ddpm_process()
    x0, noise = jax.random.normal(jax.random.key(0), (2, 2, 3, 4))
    t = jnp.asarray([[0, 1, 2], [997, 998, 999]])
    flat = process.noisy(x0.reshape(6, 4), noise.reshape(6, 4), t.reshape(6))
    np.testing.assert_array_equal(process.noisy(x0, noise, t).reshape(6, 4), flat)


def test_noisy_keeps_unit_variance():
    process = ddpm_process()
    x0, noise = jax.random.normal(jax.random.key(0), (2, 20_000))
    for step in (0, 40, 500, 999):
        assert abs(float(process.noisy(x0, noise, jnp.asarray(step)).std()) - 1) < 0.02


def test_process_passes_through_jit():
    process = ddpm_process()
    np.testing.assert_array_equal(
        jax.jit(lambda p, t: p.time(t))(process, jnp.arange(3)), process.time(jnp.arange(3))
    )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0,), "num_steps=0"),
        ((10, 0.0, 0.1), "beta_min"),
        ((10, 0.2, 0.1), "beta_min"),
        ((10, 0.1, 1.0), "beta_min"),
    ],
)
def test_bad_schedule_is_refused(arguments, field):
    with pytest.raises(ConfigError, match=field):
        ddpm_process(*arguments)


@pytest.mark.parametrize("beta", [[], [0.0, 0.1], [0.1, 1.0], [1e-9], [0.5] * 300, [[0.1]]])
def test_bad_betas_are_refused(beta):
    with pytest.raises(ConfigError, match=r"^beta(\.shape| range)=[^\n]*$"):
        from_betas(np.asarray(beta))
