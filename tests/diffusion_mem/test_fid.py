import jax
import numpy as np
import pytest

from common.config import ConfigError
from diffusion_mem import fid
from diffusion_mem.data import load
from diffusion_mem.fid import FrechetResult, features, frechet_distance, gaussian_stats


def distance(a, b):
    return frechet_distance(gaussian_stats(a, "test"), gaussian_stats(b, "test"))


def whitened(rng, n, d):
    """Rows whose sample mean is exactly 0 and sample covariance exactly the identity."""
    x = rng.normal(size=(n, d))
    x -= x.mean(axis=0)[None]
    return np.linalg.qr(x)[0] * np.sqrt(n - 1)


def test_shifted_gaussian_is_the_squared_shift():
    x = whitened(np.random.default_rng(0), 500, 8)
    shift = np.arange(8.0)[None]
    np.testing.assert_allclose(distance(x, x + shift).value, np.square(shift).sum(), rtol=1e-10)


def test_commuting_covariances_have_the_closed_form():
    x = whitened(np.random.default_rng(0), 500, 5)
    a, b = np.asarray([[1.0, 2.0, 3.0, 0.5, 0.0]]), np.asarray([[2.0, 2.0, 1.0, 0.5, 4.0]])
    np.testing.assert_allclose(distance(x * a, x * b).value, np.square(a - b).sum(), rtol=1e-10)


def test_general_covariances_agree_with_the_matrix_square_root():
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(0)
    a, b = (gaussian_stats(rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6)) + i, "test") for i in range(2))
    cross = sqrtm(a.covariance @ b.covariance).real
    expected = np.square(a.mean - b.mean).sum() + np.trace(a.covariance + b.covariance - 2 * cross)
    np.testing.assert_allclose(frechet_distance(a, b).value, expected, rtol=1e-8)


def test_statistics_are_those_of_numpy():
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    stats = gaussian_stats(x, "test")
    np.testing.assert_allclose(stats.mean, x.astype(np.float64).mean(axis=0))
    np.testing.assert_allclose(stats.covariance, np.cov(x.astype(np.float64), rowvar=False))
    assert stats.mean.dtype == stats.covariance.dtype == np.float64
    assert stats.count == 50


@pytest.mark.parametrize("n", [2, 10, 63, 64, 65, 200])
def test_any_number_of_samples_gives_a_real_distance_with_a_warning_when_too_few(n):
    rng = np.random.default_rng(0)
    result = distance(rng.normal(size=(n, 64)), rng.normal(size=(500, 64)))
    assert isinstance(result.value, float)
    assert np.isfinite(result.value)
    assert result.value > 0
    assert (result.n_fake, result.n_real, result.features) == (n, 500, "test")
    assert bool(result.warning) == (n <= 64)


def test_few_samples_bias_the_distance_upwards_as_the_warning_says():
    rng = np.random.default_rng(0)
    values = [distance(rng.normal(size=(n, 64)), rng.normal(size=(2000, 64))).value for n in (10, 65, 2000)]
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize("n", [10, 300])
def test_constant_features(n):
    flat = np.full((n, 64), 3.0)
    assert distance(flat, flat).value == 0
    np.testing.assert_allclose(distance(flat, flat + 1).value, 64)
    x = whitened(np.random.default_rng(0), 300, 64)
    np.testing.assert_allclose(distance(flat, x).value, 64 * 9 + 64, rtol=1e-10)


@pytest.mark.parametrize("n", [10, 64, 1000])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_distance_to_itself_is_zero_in_any_order(n, mean):
    rng = np.random.default_rng(0)
    x = (mean + rng.normal(size=(n, 64)) * np.logspace(-6, 2, 64)[None]).astype(np.float32)
    trace = np.trace(gaussian_stats(x, "test").covariance)
    for other in (x, rng.permutation(x)):
        value = distance(x, other).value
        assert 0 <= value <= 1e-6 * trace


def test_distance_is_symmetric():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 8)), 1 + rng.normal(size=(90, 8))
    np.testing.assert_allclose(distance(a, b).value, distance(b, a).value, rtol=1e-10)


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (5,), (5, 0), (5, 2, 2)])
def test_too_few_or_misshapen_features_are_refused(shape):
    with pytest.raises(ValueError, match="needs"):
        gaussian_stats(np.zeros(shape), "test")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_features_that_are_not_finite_are_refused_with_their_number(bad):
    x = np.zeros((5, 3))
    x[1:3, 1] = bad
    with pytest.raises(ValueError, match="2 of 5 rows"):
        gaussian_stats(x, "test")


def test_different_features_are_not_compared():
    x = np.random.default_rng(0).normal(size=(5, 3))
    with pytest.raises(ValueError, match=r"dimension 3 against .* dimension 2"):
        frechet_distance(gaussian_stats(x, "a"), gaussian_stats(x[:, :2], "a"))
    with pytest.raises(ValueError, match=r"'a'.*'b'"):
        frechet_distance(gaussian_stats(x, "a"), gaussian_stats(x, "b"))


def test_unknown_features_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"features='pixel': .*'pixels'"):
        features("pixel")


@pytest.mark.parametrize("name", ["pixels", "random-conv"])
@pytest.mark.parametrize("shape", [(300, 8, 8), (3, 28, 28, 1), (2, 32, 32, 3), (2, 9, 7, 1)])
def test_features_are_finite_and_one_vector_an_image(name, shape):
    images = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    values = features(name)(images)
    assert values.shape == (shape[0], np.prod(shape[1:]) if name == "pixels" else 128)
    assert values.dtype == np.float64
    assert np.isfinite(values).all()
    np.testing.assert_allclose(features(name)(images[-1:])[0], values[-1], atol=1e-5)


def test_grey_images_count_as_rgb_with_equal_channels():
    grey = np.random.default_rng(0).uniform(-1, 1, (4, 8, 8)).astype(np.float32)
    of_grey, of_channel, of_rgb = (
        features("random-conv")(x) for x in (grey, grey[..., None], np.repeat(grey[..., None], 3, axis=-1))
    )
    np.testing.assert_array_equal(of_grey, of_channel)
    np.testing.assert_allclose(of_grey, of_rgb, atol=1e-6)


@pytest.mark.parametrize("name", ["pixels", "random-conv"])
@pytest.mark.parametrize(
    "images",
    [np.zeros((0, 8, 8, 1)), np.zeros((4, 64)), np.zeros((4, 8, 8, 2)), np.zeros((4, 8, 8, 1), np.uint8)],
)
def test_what_is_not_a_batch_of_scaled_images_is_refused(name, images):
    with pytest.raises(ValueError, match="images of"):
        features(name)(images)


def test_images_too_small_for_the_grid_are_refused():
    with pytest.raises(ValueError, match="at least 4"):
        features("random-conv")(np.zeros((4, 3, 8, 1)))


def test_random_features_are_pinned():
    # The name stands for these weights: a change of generator or architecture must change the name.
    ramp = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 8, 8)
    cells = features("random-conv")(ramp)[0].reshape(4, 32).sum(axis=1)
    np.testing.assert_allclose(cells, [8.68031, 7.42823, 10.31705, 10.01255], rtol=1e-5)


def test_random_features_are_float32_on_every_accelerator():
    """Behaviours row 61: a GPU or TPU would otherwise multiply in fewer bits than the pinned values have."""
    text = str(jax.make_jaxpr(fid._random_conv)(np.zeros((1, 8, 8, 1), np.float32)))
    assert text.count("conv_general_dilated[") == text.count("Precision.HIGHEST, Precision.HIGHEST") == 2


@pytest.fixture(scope="module")
def halves():
    images = load("digits").train_pool
    return images[:640], images[640:1280]


def digits_distance(name, a, b) -> FrechetResult:
    return frechet_distance(*(gaussian_stats(features(name)(x), name) for x in (a, b)))


@pytest.mark.parametrize("name", ["pixels", "random-conv"])
def test_distance_grows_with_corruption(halves, name):
    real, other = halves
    rng = np.random.default_rng(0)
    noise = rng.normal(size=other.shape).astype(np.float32)
    floor, slight, strong, pure, copies = (
        digits_distance(name, x, real).value
        for x in (other, other + 0.2 * noise, other + 0.4 * noise, noise, other[rng.integers(0, 16, 640)])
    )
    assert floor < slight < strong < pure
    assert pure > 50 * floor
    assert copies > 5 * floor


def test_only_the_random_network_tells_images_from_their_gaussian(halves):
    real, _ = halves
    flat = real.reshape(len(real), -1).astype(np.float64)
    draws = np.random.default_rng(0).multivariate_normal(
        flat.mean(0), np.cov(flat, rowvar=False), 640, method="eigh"
    )
    gaussian = draws.reshape(real.shape).astype(np.float32)
    floors = {name: digits_distance(name, halves[1], real).value for name in ("pixels", "random-conv")}
    assert digits_distance("pixels", gaussian, real).value < floors["pixels"]
    assert digits_distance("random-conv", gaussian, real).value > 3 * floors["random-conv"]
