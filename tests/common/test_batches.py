"""The order of examples is a function of (seed, step)."""

import itertools

import jax
import numpy as np
import pytest

from common.batches import array_batches
from common.config import ConfigError


def ids(count: int) -> dict[str, np.ndarray]:
    return {"id": np.arange(count), "square": np.arange(count) ** 2}


def take(batches, start: int, count: int) -> np.ndarray:
    return np.stack([batch["id"] for batch in itertools.islice(batches(start), count)])


def test_rows_of_all_arrays_stay_together():
    batch = next(array_batches(ids(20), 8, 0)(3))
    np.testing.assert_array_equal(batch["square"], batch["id"] ** 2)


@pytest.mark.parametrize(("count", "size"), [(16, 4), (10, 4), (7, 3), (5, 12), (1, 2), (6, 6)])
@pytest.mark.parametrize("start", [1, 4, 7, 1000])
def test_starting_at_a_step_gives_the_batches_an_uninterrupted_run_has(count, size, start):
    batches = array_batches(ids(count), size, 0)
    whole = take(batches, 0, start + 3) if start < 100 else take(batches, start - 5, 8)
    np.testing.assert_array_equal(take(batches, start, 3), whole[-3:])


@pytest.mark.parametrize(("count", "size"), [(16, 4), (10, 4), (7, 3), (5, 12), (6, 6)])
def test_each_epoch_has_every_row_exactly_once(count, size):
    stream = take(array_batches(ids(count), size, 0), 0, 3 * count).ravel()
    epochs = stream.reshape(-1, count)
    assert len(epochs) == 3 * size  # no row was dropped at an epoch's end
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (len(epochs), 1)))


def test_stopping_at_an_epoch_boundary_goes_on_with_the_next_epoch():
    batches = array_batches(ids(16), 4, 0)
    first, second = take(batches, 0, 4), take(batches, 4, 4)
    assert sorted(second.ravel()) == list(range(16))
    assert not np.array_equal(first, second)


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [take(array_batches(ids(64), 64, seed), 0, 2) for seed in (0, 1, 2**32 - 1)]
    assert len({row.tobytes() for order in orders for row in order}) == 6


def test_same_seed_repeats():
    a, b = (take(array_batches(ids(10), 4, 3), 0, 9) for _ in range(2))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_split_the_same_global_batch(monkeypatch, processes):
    whole = take(array_batches(ids(30), 8, 0), 2, 5)
    parts = []
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for process in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        parts.append(take(array_batches(ids(30), 8, 0), 2, 5))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(
    ("arrays", "size", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, 2, "one length"),
        ({}, 2, "one length"),
        ({"a": np.zeros(0)}, 2, "no example"),
        (ids(3), 0, "data.batch_size=0: must be at least 1"),
    ],
)
def test_impossible_data_is_refused(arrays, size, message):
    with pytest.raises(ConfigError, match=message):
        array_batches(arrays, size, 0, "data.batch_size")
