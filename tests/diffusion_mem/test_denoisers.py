import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_mem.denoisers import ResidualMLP, time_features


def perturbed(model, x, t, seed=0):
    """Parameters of `model` with noise added, so that the zero output layer hides nothing."""
    params = jax.jit(model.init)(jax.random.key(seed), x, t)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def dense(params, name, x):
    return (
        x @ np.asarray(params[name]["kernel"], np.float64)
        + np.asarray(params[name]["bias"], np.float64)[None]
    )


def layer_norm(params, name, x):
    centred = x - x.mean(1, keepdims=True)
    x = centred / np.sqrt(centred.var(1, keepdims=True) + 1e-5)
    return x * np.asarray(params[name]["scale"])[None] + np.asarray(params[name]["bias"])[None]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def time_embedding(params, t):
    angles = np.asarray(t)[:, None] * (10_000.0 ** -(np.arange(32) / 32))[None]
    hidden = dense(params, "time_in", np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    return dense(params, "time_out", hidden / (1 + np.exp(-hidden)))


def numpy_mlp(params, x, t, blocks):
    """The network written out in NumPy float64."""
    temb = time_embedding(params, t)
    h = dense(params, "stem", x)
    for i in range(blocks):
        update = layer_norm(params, f"block{i}_norm", h) + dense(params, f"block{i}_time", temb)
        h = h + dense(params, f"block{i}_down", gelu(dense(params, f"block{i}_up", update)))
    return dense(params, "head", layer_norm(params, "head_norm", h)) + dense(params, "input_gain", temb) * x


def test_equals_the_written_out_network():
    model = ResidualMLP(width=16, blocks=2)
    x, t = jax.random.normal(jax.random.key(1), (4, 6)), jnp.asarray([0, 3, 400, 999])
    params = perturbed(model, x, t)
    expected = numpy_mlp(params["params"], np.asarray(x, np.float64), t, blocks=2)
    np.testing.assert_allclose(model.apply(params, x, t), expected, atol=1e-4)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 2, 1), (1, 2, 3)])
def test_flattens_and_restores_any_image_shape(shape):
    model = ResidualMLP(width=16, blocks=2)
    flat, t = jax.random.normal(jax.random.key(1), (4, 6)), jnp.arange(4)
    params = perturbed(model, flat, t)
    out = model.apply(params, flat.reshape(4, *shape), t)
    assert out.shape == (4, *shape)
    np.testing.assert_array_equal(out.reshape(4, 6), model.apply(params, flat, t))


def test_rows_are_independent_and_depend_on_their_step():
    model = ResidualMLP(width=16, blocks=1)
    x, t = jax.random.normal(jax.random.key(1), (3, 6)), jnp.asarray([5, 5, 5])
    params = perturbed(model, x, t)
    before = model.apply(params, x, t)
    after = model.apply(params, x.at[1].add(1.0), t.at[2].set(900))
    np.testing.assert_allclose(after[0], before[0], atol=1e-6)
    assert np.abs(after[1] - before[1]).max() > 1e-3
    assert np.abs(after[2] - before[2]).max() > 1e-3


def test_untrained_network_predicts_no_noise_but_learns():
    model = ResidualMLP(width=16, blocks=1)
    x, t = jax.random.normal(jax.random.key(1), (3, 6)), jnp.arange(3)
    params = jax.jit(model.init)(jax.random.key(0), x, t)
    np.testing.assert_array_equal(model.apply(params, x, t), jnp.zeros_like(x))
    grads = jax.grad(lambda p: jnp.square(model.apply(p, x, t) - 1).mean())(params)
    for name in ("head", "input_gain"):
        assert jnp.abs(grads["params"][name]["kernel"]).max() > 0


def test_magnitude_of_the_input_reaches_the_output():
    model = ResidualMLP(width=16, blocks=1)
    x, t = 100 * jax.random.normal(jax.random.key(1), (3, 6)), jnp.full(3, 999)
    params = perturbed(model, x, t)
    gain = dense(params["params"], "input_gain", time_embedding(params["params"], t))
    once, twice = model.apply(params, x, t), model.apply(params, 2 * x, t)
    # All but the input gain sees x through a layer norm, which hides its scale.
    np.testing.assert_allclose(twice - once, gain * np.asarray(x), rtol=0.01, atol=0.5)


def test_bfloat16_computes_low_and_keeps_float32_parameters_and_output():
    x, t = jax.random.normal(jax.random.key(1), (8, 6)), jnp.arange(8) * 100
    full, low = ResidualMLP(width=32, blocks=2), ResidualMLP(width=32, blocks=2, dtype=jnp.bfloat16)
    params = perturbed(full, x, t)
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.jit(low.init)(jax.random.key(0), x, t))} == {
        jnp.dtype("float32")
    }
    out_full, out_low = full.apply(params, x, t), low.apply(params, x, t)
    assert out_low.dtype == jnp.float32
    assert np.abs(out_low - out_full).max() > 0
    np.testing.assert_allclose(out_low, out_full, atol=0.05 * float(jnp.abs(out_full).max()))


def test_time_features_tell_all_steps_apart():
    features = np.asarray(time_features(jnp.arange(1000), 64))
    assert features.shape == (1000, 64)
    distances = np.sqrt(np.square(features[1:] - features[:-1]).sum(axis=1))
    assert distances.min() > 0.1
    np.testing.assert_allclose(np.square(features).sum(axis=1), 32, rtol=1e-5)
