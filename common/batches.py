"""Batches of in-memory arrays whose order is a function of (seed, step): nothing to save, nothing to lose."""

import itertools
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from common.config import require

Arrays = Mapping[str, np.ndarray]


def array_batches(
    arrays: Arrays, batch_size: int, seed: int, name: str = "batch"
) -> Callable[[int], Iterator[Arrays]]:
    """A `Task.batches` over equal-length arrays: `batches(step)` starts at that global step.

    Example j of the endless stream is row perm_e[j mod n], e = j div n, with perm_e a permutation drawn from
    (seed, e): every row is seen once per epoch, no partial batch is dropped (a batch may span two epochs),
    and a resumed run goes on exactly where it stopped. With several processes each yields its own slice of
    the same global batch.

    Raises: ConfigError when the arrays are empty, of unequal length, or batch_size < 1.
    """
    lengths = {key: len(value) for key, value in arrays.items()}
    require(len(set(lengths.values())) == 1, name, lengths, "arrays must have one length")
    count = next(iter(lengths.values()))
    require(count >= 1, name, lengths, "there is no example")
    require(batch_size >= 1, f"{name}_size", batch_size, "must be at least 1")
    local = slice(
        batch_size * jax.process_index() // jax.process_count(),
        batch_size * (jax.process_index() + 1) // jax.process_count(),
    )

    def batches(start_step: int) -> Iterator[Arrays]:
        order = _Order(count, seed)
        for step in itertools.count(start_step):
            rows = order.rows(step * batch_size, batch_size)[local]
            yield {key: value[rows] for key, value in arrays.items()}

    return batches


class _Order:
    """Rows of the endless shuffled stream; keeps the one or two permutations in use."""

    def __init__(self, count: int, seed: int):
        self._count, self._seed = count, seed
        self._permutations: dict[int, np.ndarray] = {}

    def rows(self, start: int, size: int) -> np.ndarray:
        epochs = range(start // self._count, (start + size - 1) // self._count + 1)
        kept = self._permutations
        self._permutations = {e: kept[e] if e in kept else self._draw(e) for e in epochs}
        stream = np.concatenate([self._permutations[e] for e in epochs])
        offset = start - epochs[0] * self._count
        return stream[offset : offset + size]

    def _draw(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)
