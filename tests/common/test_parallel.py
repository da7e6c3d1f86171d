"""One step on 1, 2, 4 and 8 devices, in the global view and per device: the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import parallel
from common.gradients import mean_value_and_grad
from common.mesh import MODES, ParallelConfig, make_mesh, replicated, to_global
from common.sharding import ShardingRules, state_shardings
from tests.common import toy

LAYOUTS = [(mode, devices) for mode in MODES for devices in (1, 2, 4, 8)]


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def compiled(step, state, batch, mode="jit", devices=8, rules=ShardingRules(), batch_axis=0, **sizes):  # noqa: B008
    """(compiled step, placed state, placed batch)."""
    mesh = make_mesh(ParallelConfig(mode=mode, **sizes), jax.devices()[:devices])
    shardings = state_shardings(state, mesh, rules)
    function = parallel.compile_step(
        step, mesh, mode, abstract(state), shardings, abstract(batch), batch_axis
    )
    copy = jax.tree.map(jnp.copy, state)
    return function, jax.device_put(copy, shardings), to_global(batch, mesh, batch_axis)


def contrastive(axis, state, batch):
    """Gradient descent on InfoNCE over the global batch: row i of `a` belongs to row i of `b`."""

    def loss(w, batch):
        a, b = jnp.tanh(batch["a"] @ w), parallel.all_gather(jnp.tanh(batch["b"] @ w), axis)
        rows = parallel.row_ids(len(a), axis)
        logits = -jnp.sum(jnp.square(a[:, None] - b[None]), axis=-1)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, None], axis=1)
        right = (jnp.argmax(logits, axis=1) == rows).sum().astype(jnp.float32)
        return -picked.sum(), (jnp.float32(len(a)), {"accuracy": right})

    value, grads, aux = mean_value_and_grad(loss, state["w"], batch, axis=axis)
    return {"w": state["w"] - 0.5 * grads}, {"loss": value, "gradient": grads, **aux}


def pairs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(16, 5)).astype(np.float32)
    return {"a": a, "b": a + 0.1 * rng.normal(size=a.shape).astype(np.float32)}


WEIGHTS = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)), jnp.float32)}


@functools.cache
def one_device_contrastive():
    return jax.device_get(jax.jit(functools.partial(contrastive, None))(WEIGHTS, pairs()))


@pytest.mark.parametrize(("mode", "devices"), LAYOUTS)
def test_contrastive_loss_sees_the_negatives_of_all_devices(mode, devices):
    """The gradient is neither that of local negatives nor as many times too large as there are devices."""
    step = functools.partial(contrastive, parallel.reduce_axis(mode))
    function, state, batch = compiled(step, WEIGHTS, pairs(), mode, devices)
    new, metrics = function(state, batch)
    expected_state, expected = one_device_contrastive()
    for name in ("loss", "gradient", "accuracy"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(new["w"], expected_state["w"], rtol=1e-5, atol=1e-6)


def test_the_reference_is_the_definition_of_infonce():
    batch, w = pairs(), np.asarray(WEIGHTS["w"], np.float64)
    a, b = np.tanh(batch["a"] @ w), np.tanh(batch["b"] @ w)
    logits = -np.square(a[:, None] - b[None]).sum(-1)
    loss = np.mean(np.log(np.exp(logits).sum(1)) - np.diag(logits))
    np.testing.assert_allclose(one_device_contrastive()[1]["loss"], loss, rtol=1e-5)


def draw(axis, state, batch):
    ids = parallel.row_ids(len(batch), axis)
    noise = jax.vmap(jax.random.normal)(parallel.row_keys(state["key"], ids))
    return state, {name: parallel.all_gather(x, axis) for name, x in (("ids", ids), ("noise", noise))}


@pytest.mark.parametrize(("mode", "devices"), LAYOUTS)
def test_row_ids_and_keys_do_not_depend_on_the_layout(mode, devices):
    state = {"key": jax.random.key(3)}
    function, placed, batch = compiled(
        functools.partial(draw, parallel.reduce_axis(mode)),
        state,
        np.zeros((16, 2), np.float32),
        mode,
        devices,
    )
    metrics = function(placed, batch)[1]
    np.testing.assert_array_equal(metrics["ids"], np.arange(16))
    expected = [jax.random.normal(jax.random.fold_in(jax.random.key(3), i)) for i in range(16)]
    np.testing.assert_array_equal(metrics["noise"], np.stack(expected))
    assert metrics["ids"].dtype == jnp.int32


def reduced(axis, state, batch):
    tree = {"x": batch.mean() if axis else jnp.mean(batch)}
    return state, {"mean": parallel.pmean(tree, axis)["x"], "sum": parallel.psum(batch.sum(), axis)}


@pytest.mark.parametrize("mode", MODES)
def test_reductions_give_the_value_of_the_global_batch(mode):
    x = np.arange(16, dtype=np.float32)
    step = functools.partial(reduced, parallel.reduce_axis(mode))
    function, state, batch = compiled(step, {"w": jnp.zeros(2)}, x, mode)
    metrics = function(state, batch)[1]
    assert (float(metrics["mean"]), float(metrics["sum"])) == (7.5, 120.0)


def train_toy(mode="jit", devices=8, steps=3, rules=ShardingRules(), **sizes):  # noqa: B008
    overrides = {"parallel__mode": mode, "optim__microbatches": 2, "optim__clip_norm": 0.5, "batch_size": 16}
    config = toy.config(**overrides)
    task = toy.build(config, make_mesh(ParallelConfig(mode=mode, **sizes), jax.devices()[:devices]))
    batches = task.batches(0)
    function, state, batch = compiled(
        task.step, task.init(jax.random.key(0)), next(batches), mode, devices, rules, **sizes
    )
    losses = []
    for _ in range(steps):
        state, metrics = function(state, batch)
        losses.append(float(metrics["loss"]))
        batch = to_global(
            next(batches), make_mesh(ParallelConfig(mode=mode, **sizes), jax.devices()[:devices])
        )
    return jax.device_get(state.params), losses


@functools.cache
def toy_on_one_device():
    return train_toy(devices=1)


TENSOR = ShardingRules(rules=(("hidden/kernel", (None, "tensor")), ("out/kernel", ("tensor",))))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"mode": "shard_map"},
        {"mode": "pmap"},
        {"mode": "shard_map", "devices": 2},
        {"mode": "pmap", "devices": 1},
        {"fsdp": 4, "rules": ShardingRules(fsdp_min_size=1)},
        {"data": 2, "fsdp": 2, "tensor": 2, "rules": TENSOR},
        {"data": 1, "expert": 8},
    ],
    ids=str,
)
def test_training_agrees_on_every_layout(layout):
    params, losses = train_toy(**layout)
    expected_params, expected_losses = toy_on_one_device()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected_params)


@pytest.mark.parametrize("mode", MODES)
def test_the_batch_may_be_cut_along_its_second_dimension(mode):
    """As vmapped seeds are: (seeds, batch, …)."""

    def step(state, batch):
        return state, {"sum": parallel.psum(batch.sum(axis=1), parallel.reduce_axis(mode))}

    x = np.arange(48, dtype=np.float32).reshape(3, 16)
    function, state, batch = compiled(step, {"w": jnp.zeros(2)}, x, mode, batch_axis=1)
    np.testing.assert_allclose(function(state, batch)[1]["sum"], x.sum(axis=1))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_batches_gets_none(mode):
    def step(state, batch):
        assert batch is None
        return {"w": state["w"] + 1}, {"loss": state["w"].sum()}

    mesh = make_mesh(ParallelConfig(mode=mode))
    state = {"w": jnp.zeros(2)}
    function = parallel.compile_step(step, mesh, mode, abstract(state), {"w": replicated(mesh)}, None)
    new, _ = function(jax.device_put(state, replicated(mesh)), None)
    np.testing.assert_array_equal(new["w"], [1.0, 1.0])


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_step_cannot_recompile(mode):
    traces = []

    def step(state, batch):
        traces.append(1)
        return state, {"sum": parallel.psum(batch.sum(), parallel.reduce_axis(mode))}

    function, state, batch = compiled(step, {"w": jnp.zeros(2)}, np.zeros(16, np.float32), mode)
    count = len(traces)
    for _ in range(3):
        state, _ = function(state, batch)
    with pytest.raises((TypeError, ValueError)):
        function(state, jnp.zeros(32))
    assert len(traces) == count


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_the_state_is_donated(mode):
    function, state, batch = compiled(
        lambda s, b: ({"w": s["w"] + 1}, {}), {"w": jnp.zeros(64)}, np.zeros(16, np.float32), mode
    )
    function(state, batch)
    assert state["w"].is_deleted()
