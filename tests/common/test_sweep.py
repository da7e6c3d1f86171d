import re

import numpy as np
import pytest

from common import sweep
from common.config import ConfigError


def _overrides(variants):
    return [dict(variant.overrides) for variant in variants]


def test_product_varies_the_last_axis_fastest():
    variants = sweep.product({"optim.lr": [1e-5, 4e-5], "data.n": [32, 64]})
    assert [v.name for v in variants] == [
        "optim.lr=1e-05,data.n=32",
        "optim.lr=1e-05,data.n=64",
        "optim.lr=4e-05,data.n=32",
        "optim.lr=4e-05,data.n=64",
    ]
    assert _overrides(variants)[2] == {"optim.lr": 4e-5, "data.n": 32}


def test_close_values_never_share_a_name():
    rates = [1e-5, 4e-5, 1e-5 + 1e-20, 0.1, 0.1 + 2**-56, 1e-300]
    names = [v.name for v in sweep.product({"lr": rates})]
    assert len(set(names)) == len(rates)


def test_names_are_safe_folder_names_whatever_the_values():
    values = [
        "a/b",
        "a b",
        "../x",
        "é",
        "a:b",
        "",
        "x" * 300,
        "x" * 301,
        "-",
        None,
        True,
        (3, 4),
        [],
        float("nan"),
    ]
    variants = sweep.product({"model.kind": values})
    assert len({v.name.lower() for v in variants}) == len(values)
    for variant in variants:
        assert re.fullmatch(r"[A-Za-z0-9._+=,~-]{1,120}", variant.name), variant.name
        assert not variant.name.startswith(".")


def test_a_name_does_not_depend_on_the_rest_of_the_sweep():
    small = sweep.product({"a": ["x/y"], "b": [1]})[0]
    large = sweep.product({"a": ["x/y", "x:y", "x y"], "b": [1, 2]})
    assert small in large


def test_zipped_takes_axes_in_step():
    assert _overrides(sweep.zipped({"w": [8, 16], "d": [1, 2]})) == [{"w": 8, "d": 1}, {"w": 16, "d": 2}]
    with pytest.raises(ConfigError, match="unequal lengths"):
        sweep.zipped({"w": [8, 16], "d": [1]})


def test_sweeps_are_factors_of_products_and_links_of_chains():
    base = sweep.fixed({"optim.name": "sgd"}, name="paper")
    grid = sweep.product(base, sweep.zipped({"w": [8, 16], "d": [1, 2]}), {"seed": [0, 1]})
    both = sweep.chain(grid, sweep.fixed({"optim.name": "adam"}))
    assert [v.name for v in both] == [
        "paper,w=8,d=1,seed=0",
        "paper,w=8,d=1,seed=1",
        "paper,w=16,d=2,seed=0",
        "paper,w=16,d=2,seed=1",
        "optim.name=adam",
    ]
    assert both[0].overrides == {"optim.name": "sgd", "w": 8, "d": 1, "seed": 0}


def test_nothing_to_vary_is_one_base_run():
    assert sweep.product() == sweep.fixed({}) == [sweep.Variant("base", {})]


def test_numpy_axes_become_python_values():
    variants = sweep.product({"n": np.array([32, 64]), "lr": np.logspace(-3, -2, 2)})
    assert [type(value) for value in variants[0].overrides.values()] == [int, float]
    assert variants[0].name == "n=32,lr=0.001"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: sweep.product({"n": []}), "n: has no values"),
        (lambda: sweep.product({"n": "32"}), "n='32': must be a list"),
        (lambda: sweep.product({"n": 32}), "n=32: must be a list"),
        (lambda: sweep.product({"n": [1]}, {"n": [2]}), "n: set by two factors"),
        (lambda: sweep.product({"n": [1, 1]}), "'n=1': given to"),
        (lambda: sweep.product({"n": ["A", "a"]}), "'n=a': given to"),
        (lambda: sweep.chain(sweep.fixed({"n": 1}), sweep.fixed({"n": 1})), "'n=1': given to"),
        (lambda: sweep.fixed({}, name="a/b"), "sweep name 'a/b'"),
        (lambda: sweep.fixed({}, name=".."), "sweep name '..'"),
    ],
)
def test_ambiguous_sweeps_are_refused(make, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        make()
