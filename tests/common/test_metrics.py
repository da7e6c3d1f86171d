import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import metrics
from common.metrics import Histogram, Max, Mean, Min, Moments, Sum

VALUES = np.random.default_rng(0).normal(3.0, 2.0, 257).astype(np.float32)


def _merged(kind, cuts=(1, 2, 100, 100, 256)):
    """Uneven parts, two of them empty, pooled by merge."""
    parts = [kind(jnp.asarray(part)) for part in np.split(VALUES, cuts)]
    total = parts[0]
    for part in parts[1:]:
        total = total.merge(part)
    return total


def test_mean_of_unequal_devices_is_the_pooled_mean():
    """Label counts 1 and 7: the mean of the two means would be 2.5."""
    losses = jnp.asarray([[4.0] + [99.0] * 7, [1.0] * 7 + [99.0]])
    mask = jnp.asarray([[1] + [0] * 7, [1] * 7 + [0]])

    def step(values, weights):
        return metrics.reduce({"loss": Mean.of(values, weights)}, "data")

    pooled = jax.pmap(step, axis_name="data", out_axes=None, devices=jax.devices()[:2])(losses, mask)
    assert metrics.to_host(pooled) == {"loss": pytest.approx(11 / 8)}
    assert metrics.to_host({"loss": Mean.of(losses, mask)}) == {"loss": pytest.approx(11 / 8)}


def test_merged_parts_equal_the_whole():
    host = metrics.to_host(
        {"mean": _merged(Mean.of), "sum": _merged(Sum.of), "max": _merged(Max.of), "min": _merged(Min.of)}
        | {"moments": _merged(Moments.of)}
    )
    wide = VALUES.astype(np.float64)
    expected = {
        "mean": wide.mean(),
        "sum": wide.sum(),
        "max": wide.max(),
        "min": wide.min(),
        "moments/mean": wide.mean(),
        "moments/std": wide.std(),
        "moments/count": 257,
    }
    assert host == pytest.approx(expected, rel=1e-5)


def test_moments_stay_exact_far_from_zero():
    """The textbook E[x²] − E[x]² has no digit left here."""
    values = jnp.asarray([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3])
    merged = Moments.of(values[:1]).merge(Moments.of(values[1:]))
    assert metrics.to_host({"x": merged})["x/std"] == pytest.approx(np.sqrt(1.25), rel=1e-5)


def test_four_episodes_that_finish_together_all_count():
    done = jnp.asarray([1, 1, 1, 1, 0])
    host = metrics.to_host({"return": Moments.of(jnp.asarray([1.0, 2.0, 3.0, 4.0, jnp.nan]), done)})
    assert (host["return/mean"], host["return/count"]) == (2.5, 4.0)


def test_device_reductions_equal_the_whole():
    parts = jnp.asarray(VALUES[:256].reshape(8, 32))

    def pool(x):
        made = {
            "mean": Mean.of(x),
            "sum": Sum.of(x),
            "max": Max.of(x),
            "min": Min.of(x),
            "moments": Moments.of(x),
            "histogram": Histogram.of(x, -3.0, 9.0, 7),
        }
        return metrics.reduce(made | {"plain": jnp.max(x)}, "data")

    on_device = jax.pmap(pool, axis_name="data", out_axes=None)(parts)
    assert on_device["mean"].count == 256  # so that it still merges with other batches
    pooled = metrics.to_host(on_device)
    whole = VALUES[:256].astype(np.float64)
    assert pooled.pop("histogram")["counts"] == np.histogram(whole, 7, (-3, 9))[0].tolist()
    expected = {"mean": whole.mean(), "sum": whole.sum(), "max": whole.max(), "min": whole.min()}
    moments = {"moments/mean": whole.mean(), "moments/std": whole.std(), "moments/count": 256}
    plain = {"plain": np.max(whole.reshape(8, 32), axis=1).mean()}
    assert pooled == pytest.approx(expected | moments | plain, rel=1e-5)


def test_reduce_without_an_axis_is_the_identity():
    given = {"a": Mean.of(jnp.ones(3)), "b": jnp.ones(())}
    assert metrics.reduce(given, None) is given


@pytest.mark.parametrize("kind", [Max, Min])
def test_extremes_keep_a_nan_and_start_from_nothing(kind):
    one = kind.of(jnp.asarray([1.0]))
    assert np.isnan(metrics.to_host({"x": one.merge(kind.of(jnp.asarray([jnp.nan])))})["x"])
    assert metrics.to_host({"x": one.merge(kind.of(jnp.zeros(0)))})["x"] == 1.0


def test_nothing_counted_is_nan_without_a_warning():
    host = metrics.to_host({"mean": Mean.of(jnp.ones(3), jnp.zeros(3)), "m": Moments.of(jnp.zeros(0))})
    assert np.isnan([host["mean"], host["m/mean"], host["m/std"]]).all()
    assert host["m/count"] == 0


def test_masked_nan_does_not_reach_the_mean():
    masked = Mean.of(jnp.asarray([1.0, jnp.nan, 3.0]), jnp.asarray([1, 0, 1]))
    assert metrics.to_host({"x": masked})["x"] == 2.0


def test_weights_of_another_rank_are_refused():
    with pytest.raises(ValueError, match="rank"):
        Mean.of(jnp.ones((3, 3)), jnp.ones(3))


def test_bfloat16_values_are_summed_in_float32():
    """512 ones: a bfloat16 running sum stops at 256."""
    summed = jax.lax.scan(
        lambda c, x: (c.merge(Sum.of(x)), None), Sum.of(jnp.bfloat16(0)), jnp.ones(512, jnp.bfloat16)
    )[0]
    assert metrics.to_host({"x": summed})["x"] == 512


def test_histogram_places_edges_and_outsiders():
    values = jnp.asarray([-0.1, 0.0, 0.5, 1.0, 1.1, jnp.inf, -jnp.inf, jnp.nan])
    host = metrics.to_host({"h": Histogram.of(values, 0.0, 1.0, 2)})["h"]
    assert host == {"counts": [1, 2], "lo": 0.0, "hi": 1.0, "under": 2, "over": 2, "nan": 1}


def test_histograms_of_other_bins_do_not_merge():
    with pytest.raises(ValueError, match="other bins"):
        Histogram.of(VALUES, 0, 1, 4).merge(Histogram.of(VALUES, 0, 2, 4))
    with pytest.raises(ValueError, match="lo < hi"):
        Histogram.of(VALUES, 1, 1)


def test_vmapped_seeds_give_one_entry_a_seed():
    rows = jnp.asarray(VALUES[:12].reshape(3, 4))
    host = metrics.to_host(jax.vmap(lambda x: {"m": Mean.of(x), "s": Moments.of(x), "last": x[-1]})(rows))
    assert host["m"] == pytest.approx(VALUES[:12].reshape(3, 4).mean(1).tolist(), rel=1e-6)
    assert len(host["s/std"]) == 3
    assert host["last"] == VALUES[3:12:4].tolist()


def test_to_host_makes_one_transfer(monkeypatch):
    calls = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(tree) or get(tree))
    given = {
        "a": Mean.of(jnp.ones(3)),
        "b": jnp.int32(3),
        "c": 0.5,
        "d": np.bool_(True),
        "e": Moments.of(1.0),
    }
    with jax.transfer_guard_host_to_device(
        "disallow"
    ):  # computing on the device again would send arrays back
        host = metrics.to_host(given)
    assert len(calls) == 1
    assert host == {"a": 1.0, "b": 3.0, "c": 0.5, "d": 1.0, "e/mean": 1.0, "e/std": 0.0, "e/count": 1.0}
    assert all(type(value) is float for value in host.values())


def test_norms_and_finiteness_look_at_floating_leaves_only(key):
    tree = {"a": {"w": jnp.full((2, 2), 2.0), "b": jnp.asarray([3.0], jnp.bfloat16)}, "z": jnp.asarray(12.0)}
    tree |= {"key": key, "n": jnp.arange(5)}
    assert metrics.global_norm(tree) == pytest.approx(13.0)
    norms = metrics.norms_by_prefix(tree, depth=2)
    assert {name: float(norm) for name, norm in norms.items()} == {
        "a/w": 4,
        "a/b": 3,
        "z": 12,
        "key": 0,
        "n": 0,
    }
    assert float(metrics.norms_by_prefix(tree)["a"]) == 5
    assert metrics.all_finite(tree)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not metrics.all_finite(tree | {"z": jnp.asarray([0.0, bad])})


def test_empty_trees():
    assert metrics.global_norm({}) == 0
    assert metrics.all_finite({})
    assert metrics.to_host({}) == {}
