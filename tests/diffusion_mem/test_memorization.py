import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import ConfigError
from diffusion_mem.data import load, subset
from diffusion_mem.memorization import gap_ratio, memorized_fraction

REFERENCE = np.load(pathlib.Path(__file__).parents[1] / "reference" / "diffusion.npz", allow_pickle=False)


def exact(samples, train):
    """Distances in NumPy float64: ratio, nearest row, distance."""
    samples, train = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (samples, train))
    distance = np.sqrt(np.square(samples[:, None] - train[None]).sum(-1))
    order = np.argsort(distance, axis=1)
    first, second = np.take_along_axis(distance, order[:, :2], axis=1).T
    return first / second, order[:, 0], first


def test_ratios_and_fraction_are_the_official_ones():
    result = gap_ratio(REFERENCE["gap_ratio/generated"], REFERENCE["gap_ratio/train"])
    np.testing.assert_allclose(result.ratio, REFERENCE["gap_ratio/ratio"], atol=1e-5)
    np.testing.assert_allclose(
        memorized_fraction(result.ratio), REFERENCE["gap_ratio/fraction_one_third"], rtol=1e-6
    )


@pytest.mark.parametrize(("sample_block", "train_block"), [(1, 1), (3, 7), (16, 50), (40, 49), (512, 2048)])
def test_blocks_change_nothing(sample_block, train_block):
    samples, train = REFERENCE["gap_ratio/generated"], REFERENCE["gap_ratio/train"]
    ratio, nearest, distance = exact(samples, train)
    result = gap_ratio(samples, train, sample_block, train_block)
    np.testing.assert_allclose(result.ratio, ratio, atol=1e-5)
    np.testing.assert_array_equal(result.nearest, nearest)
    np.testing.assert_allclose(result.distance, distance, rtol=1e-5, atol=1e-6)


def test_images_of_large_mean_lose_no_digits():
    rng = np.random.default_rng(0)
    train = (1000 + rng.normal(size=(60, 8, 8, 1))).astype(np.float32)
    samples = (train[:40] + 0.01 * rng.normal(size=(40, 8, 8, 1))).astype(np.float32)
    ratio, nearest, _ = exact(samples, train)
    result = gap_ratio(samples, train)
    np.testing.assert_allclose(result.ratio, ratio, rtol=1e-4)
    np.testing.assert_array_equal(result.nearest, nearest)


def test_exact_copies_have_ratio_zero_and_are_found():
    train = subset(load("digits").train_pool, 256)
    result = gap_ratio(train, train)
    np.testing.assert_array_equal(result.ratio, np.zeros(256))
    np.testing.assert_array_equal(result.nearest, np.arange(256))
    assert memorized_fraction(result.ratio) == 1


def test_held_out_images_are_hardly_ever_called_memorized():
    data = load("digits")
    ratios = gap_ratio(data.test, data.train_pool).ratio
    assert float(memorized_fraction(ratios)) < 0.01
    # Real scans may be a little off a mere pixel-wise copy; the median ratio is nevertheless close to 1.
    assert float(jnp.median(ratios)) > 0.8


def test_copy_of_an_exact_duplicate_has_ratio_zero_and_of_a_near_duplicate_is_missed():
    rng = np.random.default_rng(0)
    train = rng.normal(size=(20, 16)).astype(np.float32)
    doubled = np.concatenate([train, train])
    np.testing.assert_array_equal(gap_ratio(train, doubled).ratio, np.zeros(20))
    jittered = np.concatenate([train, train + 1e-3 * rng.normal(size=train.shape).astype(np.float32)])
    noisy_copies = train + 0.05 * rng.normal(size=train.shape).astype(np.float32)
    assert float(memorized_fraction(gap_ratio(noisy_copies, train).ratio)) == 1
    assert float(memorized_fraction(gap_ratio(noisy_copies, jittered).ratio)) == 0


def test_smallest_training_set():
    result = gap_ratio(np.asarray([[1.0], [0.0]]), np.asarray([[0.0], [4.0]]))
    np.testing.assert_allclose(result.ratio, [1 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(result.distance, [1, 0])


def test_ratio_is_between_zero_and_one():
    samples, train = (
        jax.random.normal(jax.random.key(0), (300, 3)),
        jax.random.normal(jax.random.key(1), (70, 3)),
    )
    ratio = np.asarray(gap_ratio(samples, train, 64, 32).ratio)
    assert np.all((ratio >= 0) & (ratio <= 1))


def test_samples_that_are_not_finite_make_the_fraction_nan_not_small():
    train = np.eye(4, dtype=np.float32)
    samples = np.stack([train[0], np.full(4, np.nan), np.full(4, np.inf)]).astype(np.float32)
    ratio = gap_ratio(samples, train).ratio
    assert ratio[0] == 0
    assert np.isnan(ratio[1:]).all()
    assert np.isnan(memorized_fraction(ratio))


@pytest.mark.parametrize(
    ("samples", "train", "message"),
    [
        (np.zeros((3, 4)), np.zeros((1, 4)), "train.shape"),
        (np.zeros((3, 4)), np.zeros((0, 4)), "train.shape"),
        (np.zeros((0, 4)), np.zeros((5, 4)), "samples.shape"),
        (np.zeros((3, 2, 2)), np.zeros((5, 4)), "samples.shape"),
    ],
)
def test_impossible_comparison_is_refused(samples, train, message):
    with pytest.raises(ConfigError, match=message):
        gap_ratio(samples, train)


def test_distances_are_float32_on_every_accelerator():
    """Behaviours row 61."""
    text = str(jax.make_jaxpr(gap_ratio)(np.zeros((4, 8), np.float32), np.zeros((5, 8), np.float32)))
    assert text.count("dot_general[") == text.count("Precision.HIGHEST, Precision.HIGHEST") == 1


def test_temporary_memory_does_not_grow_with_the_training_set():
    from diffusion_mem.memorization import _gap_ratio

    def temporary_bytes(n):
        shapes = (jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((n, 16), jnp.float32))
        return _gap_ratio.lower(*shapes, 32, 128).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16_384) <= 1.1 * temporary_bytes(1024)


def test_thresholds_order_the_fraction():
    ratios = np.asarray([0.1, 0.3, 0.4, 0.6])
    fractions = [float(memorized_fraction(ratios, k)) for k in (1 / 4, 1 / 3, 1 / 2)]
    np.testing.assert_allclose(fractions, [0.25, 0.5, 0.75])
    assert float(memorized_fraction(np.asarray([1 / 3], np.float32), 1 / 3)) == 0
