"""Batches of in-memory arrays whose order is a function of (seed, step): nothing to save, nothing to lose."""

import itertools
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from common.config import require

Arrays = Mapping[str, np.ndarray]


def array_batches(
    arrays: Arrays, batch_size: int, seed: int, field: str = "batch_size"
) -> Callable[[int], Iterator[Arrays]]:
    """A `Task.batches` over equal-length arrays: `batches(step)` starts at that global step.

    Example j of the endless stream is row perm_e[j mod n], e = j div n, with perm_e a permutation drawn from
    (seed, e): every row is seen once per epoch, no partial batch is dropped (a batch may span two epochs),
    and a resumed run goes on exactly where it stopped. With several processes each yields its own slice of
    the same global batch.

    Args: `field` is the config field of the batch size, for messages.
    Raises: ConfigError when the arrays are empty, of unequal length, or batch_size < 1.
    """
    lengths = {key: len(value) for key, value in arrays.items()}
    require(len(set(lengths.values())) == 1, "rows of the data", lengths, "arrays must have one length")
    count = next(iter(lengths.values()))
    require(count >= 1, "rows of the data", lengths, "there is no example")
    require(batch_size >= 1, field, batch_size, "must be at least 1")
    process, processes = jax.process_index(), jax.process_count()
    local = slice(batch_size * process // processes, batch_size * (process + 1) // processes)

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
        """Rows of the examples start … start + size − 1."""
        count, stop = self._count, start + size
        epochs = range(start // count, (stop - 1) // count + 1)
        kept = self._permutations
        self._permutations = {e: kept[e] if e in kept else self._draw(e) for e in epochs}
        parts = [self._permutations[e][max(start - e * count, 0) : stop - e * count] for e in epochs]
        return np.concatenate(parts)

    def _draw(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)
