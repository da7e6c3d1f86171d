"""Rules on paths, the fsdp default, and what they say when they do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from common import train_state
from common.config import ConfigError
from common.mesh import ParallelConfig, make_mesh
from common.sharding import ShardingRules, describe, path_of, state_shardings


def mesh(**sizes):
    return make_mesh(
        ParallelConfig(**{"data": 1} | sizes), jax.devices()[: int(np.prod(list(sizes.values())))]
    )


def state() -> train_state.TrainState:
    def init():
        params = {
            "embed": jnp.zeros((64, 256)),
            "block": {"kernel": jnp.zeros((256, 512)), "bias": jnp.zeros(512)},
            "odd": jnp.zeros((255, 513)),
        }
        return train_state.create(params, optax.adam(1e-3).init(params), jax.random.key(0))

    return jax.eval_shape(init)


def specs(state, mesh, rules) -> dict[str, P]:
    shardings = state_shardings(state, mesh, rules)
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {path_of(path): sharding.spec for path, sharding in leaves}


def test_fsdp_splits_the_largest_dimension_that_divides():
    found = specs(state(), mesh(fsdp=4), ShardingRules())
    assert found["params/embed"] == P(None, "fsdp")
    assert found["params/block/kernel"] == P(None, "fsdp")
    assert found["params/block/bias"] == P()  # too small to be worth a gather
    assert found["params/odd"] == P()  # nothing divides by 4
    assert specs(state(), mesh(fsdp=3), ShardingRules())["params/odd"] == P(None, "fsdp")  # 513 = 3 · 171
    square = {"w": jax.ShapeDtypeStruct((128, 128), jnp.float32)}
    assert specs(square, mesh(fsdp=4), ShardingRules())["w"] == P("fsdp")
    small = specs(state(), mesh(fsdp=4), ShardingRules(fsdp_min_size=1))
    assert small["params/block/bias"] == P("fsdp")


def test_without_an_fsdp_axis_nothing_is_split():
    assert set(specs(state(), mesh(data=8), ShardingRules()).values()) == {P()}


def test_first_rule_wins_and_moments_follow_their_parameter():
    rules = ShardingRules(rules=(("block/kernel", ("tensor", None)), ("kernel|embed", (None, "tensor"))))
    found = specs(state(), mesh(tensor=2, fsdp=2), rules)
    assert found["params/block/kernel"] == P("tensor", None)
    assert found["params/embed"] == P(None, "tensor")
    for path, spec in found.items():
        for moment in ("mu", "nu"):
            if f"/{moment}/" in path:
                assert spec == found["params/" + path.split(f"/{moment}/")[1]], path
    assert sum("/mu/" in path for path in found) == 4


def test_keys_and_scalars_are_on_every_device_whatever_a_rule_says():
    seeds = {
        "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    found = specs(seeds, mesh(fsdp=4), ShardingRules(rules=((".", ("fsdp",)),)))
    assert set(found.values()) == {P()}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((None, None, "fsdp"), "has more entries than the shape (255, 513)"),
        (("fsdp",), "has size 4, which does not divide 255 of the shape (255, 513)"),
        (("model",), "must be one of ('data', 'fsdp', 'tensor', 'expert')"),
        (("tensor", "tensor"), "names an axis twice"),
    ],
)
def test_a_rule_that_does_not_fit_names_the_path(spec, message):
    with pytest.raises(ConfigError) as caught:
        state_shardings(state(), mesh(fsdp=4), ShardingRules(rules=(("odd$", spec),)))
    assert "sharding rule 'odd$' on params/odd" in str(caught.value)
    assert message in str(caught.value)


def test_describe_lists_every_leaf_with_its_bytes_on_one_device():
    shapes = state()
    rows = describe(shapes, state_shardings(shapes, mesh(fsdp=4), ShardingRules()))
    by_path = {path: rest for path, *rest in rows}
    assert by_path["params/block/kernel"] == ["(256, 512)", "(None, 'fsdp')", 256 * 512 * 4 // 4]
    assert by_path["params/block/bias"] == ["(512,)", "()", 512 * 4]
    assert by_path["step"] == ["()", "()", 4]
    assert len(rows) == len(jax.tree.leaves(shapes))


def test_shardings_place_real_arrays():
    m = mesh(fsdp=4)
    tree = {"w": jnp.arange(256 * 128, dtype=jnp.float32).reshape(256, 128)}
    placed = jax.device_put(tree, state_shardings(tree, m, ShardingRules()))
    assert {s.data.shape for s in placed["w"].addressable_shards} == {(64, 128)}
    np.testing.assert_array_equal(placed["w"], tree["w"])
