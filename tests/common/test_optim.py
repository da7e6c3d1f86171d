"""Schedules against their written formulas, optimizers against a loop in NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from common.config import ConfigError
from common.mesh import ParallelConfig, make_mesh
from common.optim import OPTIMIZERS, OptimConfig, decay_mask, learning_rate, make_optimizer, updates_done
from tests.common import toy

PARAMS = {"layer": {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.array([0.1, -0.4])}}


def rate(k: int, c: OptimConfig, n: int) -> float:
    """The formula of the docstring, in plain Python."""
    w, e = c.warmup_steps, c.end_factor
    if k < w:
        return c.lr * (k + 1) / w
    if c.schedule == "constant":
        return c.lr
    if c.schedule == "cosine":
        x = min((k - w) / (n - 1 - w), 1)
        return c.lr * (e + (1 - e) * (1 + math.cos(math.pi * x)) / 2)
    d = max(c.decay_fraction * n, 1)
    start = n - 1 - d
    return c.lr * (1 if k <= start else 1 - (1 - e) * min((k - start) / d, 1))


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "n"), [(0, 100), (1, 100), (10, 100), (7, 33)])
@pytest.mark.parametrize("end", [0.0, 0.1])
def test_schedule_formula(name, warmup, n, end):
    c = OptimConfig(lr=0.3, schedule=name, warmup_steps=warmup, end_factor=end)
    at = learning_rate(c, n)
    for k in sorted({0, 1, max(warmup - 1, 0), warmup, warmup + 1, n // 2, n - 2, n - 1, n, 2 * n}):
        np.testing.assert_allclose(at(k), rate(k, c, n), rtol=1e-5, atol=1e-7, err_msg=f"k={k}")


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_the_end_value_comes_at_the_last_update_and_not_before(name):
    at = learning_rate(OptimConfig(lr=1.0, schedule=name, end_factor=0.25), 50)
    np.testing.assert_allclose([at(49), at(50)], 0.25, rtol=1e-6)
    assert float(at(48)) > 0.2501


def test_warmup_lasts_its_number_of_updates_and_meets_the_peak():
    at = learning_rate(OptimConfig(lr=1.0, schedule="cosine", warmup_steps=4), 100)
    np.testing.assert_allclose([at(k) for k in range(5)], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)


def test_the_first_update_with_warmup_changes_parameters_by_lr_over_w():
    optimizer = make_optimizer(OptimConfig(name="sgd", lr=1.0, momentum=0.0, warmup_steps=10), 100)
    updates, _ = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["layer"]["kernel"], -0.1 * PARAMS["layer"]["kernel"], rtol=1e-6)


def run(c: OptimConfig, grads: list, n: int = 100):
    optimizer = make_optimizer(c, n)
    params, state = PARAMS, optimizer.init(PARAMS)
    for g in grads:
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def gradients(count: int) -> list:
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), PARAMS)
        for _ in range(count)
    ]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_rule(momentum):
    """torch.optim.SGD: b ← μ·b + g (b = g at first), p ← p − lr·b."""
    grads = gradients(4)
    p, b = np.asarray(PARAMS["layer"]["kernel"], np.float64), 0.0
    for g in grads:
        b = momentum * b + np.asarray(g["layer"]["kernel"], np.float64)
        p = p - 0.1 * b
    result = run(OptimConfig(name="sgd", lr=0.1, momentum=momentum), grads)
    np.testing.assert_allclose(result["layer"]["kernel"], p, rtol=1e-5)


@pytest.mark.parametrize(("name", "decay"), [("adam", 0.0), ("adamw", 0.0), ("adamw", 0.3)])
def test_adam_is_the_papers_rule_with_decoupled_decay_of_kernels_only(name, decay):
    grads, lr, b1, b2, eps = gradients(4), 0.05, 0.8, 0.95, 1e-3
    c = OptimConfig(name=name, lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=decay)
    result = run(c, grads)
    for leaf, own_decay in (("kernel", decay), ("bias", 0.0)):
        p, m, v = np.asarray(PARAMS["layer"][leaf], np.float64), 0.0, 0.0
        for t, g in enumerate((np.asarray(g["layer"][leaf], np.float64) for g in grads), start=1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            p = p - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + own_decay * p)
        np.testing.assert_allclose(result["layer"][leaf], p, rtol=1e-5)


def test_clipping_scales_to_the_global_norm_and_leaves_small_gradients():
    c = OptimConfig(name="sgd", lr=1.0, momentum=0.0, clip_norm=0.5)
    for scale in (10.0, 0.01):
        g = jax.tree.map(lambda p, scale=scale: scale * p, PARAMS)
        norm = float(np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(g))))
        step = jax.tree.map(jnp.subtract, PARAMS, run(c, [g]))
        expected = jax.tree.map(lambda x, norm=norm: x * min(1, 0.5 / norm), g)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), step, expected)


def test_decay_mask_finds_paths_and_refuses_a_pattern_that_finds_none():
    assert decay_mask("kernel$")(PARAMS) == {"layer": {"kernel": True, "bias": False}}
    assert decay_mask("^layer/")(PARAMS) == {"layer": {"kernel": True, "bias": True}}
    with pytest.raises(ConfigError, match=r"optim.decay_pattern='kernal\$'"):
        make_optimizer(OptimConfig(name="adamw", weight_decay=0.1, decay_pattern="kernal$"), 10).init(PARAMS)


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("name", "adamax", {}),
        ("schedule", "linear", {}),
        ("lr", 0.0, {}),
        ("lr", -1.0, {}),
        ("lr", math.nan, {}),
        ("lr", math.inf, {}),
        ("momentum", 1.0, {"name": "sgd"}),
        ("momentum", -0.1, {"name": "sgd"}),
        ("b1", 1.0, {}),
        ("b2", -0.1, {}),
        ("eps", 0.0, {}),
        ("weight_decay", 0.1, {"name": "adam"}),
        ("weight_decay", 0.1, {"name": "sgd"}),
        ("weight_decay", -0.1, {"name": "adamw"}),
        ("decay_pattern", "(", {}),
        ("clip_norm", -1.0, {}),
        ("clip_norm", math.nan, {}),
        ("warmup_steps", -1, {}),
        ("warmup_steps", 101, {}),
        ("warmup_steps", 81, {"schedule": "wsd"}),  # would still rise where the decay begins
        ("end_factor", -0.1, {}),
        ("end_factor", 1.1, {}),
        ("decay_fraction", 0.0, {}),
        ("decay_fraction", 1.1, {}),
        ("microbatches", 0, {}),
    ],
)
def test_impossible_fields_are_refused_by_name(field, value, others):
    with pytest.raises(ConfigError) as caught:
        make_optimizer(OptimConfig(**{field: value}, **others), 100)
    assert f"optim.{field}={value!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


CHANGED = {
    "name": ("sgd", {}),
    "lr": (0.5, {}),
    "momentum": (0.5, {"name": "sgd"}),
    "b1": (0.5, {}),
    "b2": (0.5, {}),
    "eps": (0.5, {}),
    "weight_decay": (0.5, {"name": "adamw"}),
    "decay_pattern": ("bias$", {"name": "adamw", "weight_decay": 0.5}),
    "clip_norm": (0.5, {"eps": 0.1}),
    "schedule": ("cosine", {}),
    "warmup_steps": (3, {}),
    "end_factor": (0.5, {"schedule": "cosine"}),
    "decay_fraction": (0.9, {"schedule": "wsd"}),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(OptimConfig)])
def test_every_field_has_an_effect(field):
    if field == "microbatches":  # changes memory, not numbers: the scan is in the program
        assert "scan" in str(toy_jaxpr(microbatches=2))
        assert "scan" not in str(toy_jaxpr(microbatches=1))
        return
    value, others = CHANGED[field]
    plain = run(OptimConfig(**others), gradients(6), n=6)
    changed = run(OptimConfig(**others | {field: value}), gradients(6), n=6)
    assert any(
        not np.allclose(a, b, rtol=1e-6) for a, b in zip(*map(jax.tree.leaves, (plain, changed)), strict=True)
    )


def toy_task(**overrides):
    return toy.build(toy.config(**overrides), make_mesh(ParallelConfig(), jax.devices()[:1]))


def toy_jaxpr(microbatches: int):
    task = toy_task(optim__microbatches=microbatches)
    return jax.make_jaxpr(task.step)(task.init(jax.random.key(0)), next(task.batches(0)))


def test_accumulation_counts_updates_not_microbatches():
    """4 microbatches, 8 updates: the step counter, the schedule and the warm-up all count 8."""
    overrides = {
        "run__steps": 8,
        "optim__schedule": "cosine",
        "optim__warmup_steps": 2,
        "optim__microbatches": 4,
    }
    task = toy_task(**overrides)
    state, step = task.init(jax.random.key(0)), jax.jit(task.step)
    rates = []
    at = learning_rate(OptimConfig(schedule="cosine", warmup_steps=2), 8)
    for batch, _ in zip(task.batches(0), range(8), strict=False):
        count = int(updates_done(state.opt_state))
        assert count == int(state.step)
        rates.append(float(at(count)))
        before, (state, _) = state, step(state, batch)
    assert int(state.step) == 8
    np.testing.assert_allclose(rates[:3], [5e-4, 1e-3, 1e-3], rtol=1e-6)
    assert rates[-1] == 0.0
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)  # the last update had rate 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_counted_whatever_the_optimizer(name):
    optimizer = make_optimizer(OptimConfig(name=name, clip_norm=1.0), 10)
    state = optimizer.init(PARAMS)
    for count in range(3):
        assert int(updates_done(state)) == count
        _, state = optimizer.update(PARAMS, state, PARAMS)


def test_accumulation_equals_the_full_batch():
    results = []
    for parts in (1, 2, 4):
        task = toy_task(optim__microbatches=parts, optim__name="sgd")
        state, step = task.init(jax.random.key(0)), jax.jit(task.step)
        for batch, _ in zip(task.batches(0), range(4), strict=False):
            state, metrics = step(state, batch)
        results.append((state.params, metrics["loss"]))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results[0], other)
