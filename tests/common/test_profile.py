"""Costs of a compiled step against known ones, and traces."""

import jax
import jax.numpy as jnp
import pytest

from common.config import ConfigError
from common.flops import count_flops
from common.parallel import CompiledStep
from common.profile import (
    Cost,
    ProfileConfig,
    Tracer,
    check_fits,
    cost_of,
    count_parameters,
    describe,
    device_memory,
    matmul_rate,
)


def test_parameters_are_counted_in_arrays_and_shapes():
    tree = {"a": jnp.zeros((3, 4)), "b": {"c": jax.ShapeDtypeStruct((5,), jnp.float32), "d": jnp.zeros(())}}
    assert count_parameters(tree) == 18
    assert count_parameters({}) == 0


def product(m: int, k: int, n: int):
    shapes = (jax.ShapeDtypeStruct((m, k), jnp.float32), jax.ShapeDtypeStruct((k, n), jnp.float32))
    traced = jax.jit(jnp.matmul).trace(*shapes)
    return CompiledStep(traced.lower().compile(), count_flops(traced.jaxpr))


def test_flops_and_memory_of_a_matrix_product():
    """2·m·k·n operations; two arguments and one result in memory."""
    m, k, n = 128, 256, 64
    cost = cost_of(product(m, k, n), {"w": jnp.zeros((k, n))}, jax.devices()[0])
    assert cost.parameters == k * n
    assert cost.flops == 2 * m * k * n
    least = 4 * (m * k + k * n + m * n)
    assert least <= cost.memory <= 2 * least


def test_donated_arguments_are_counted_once():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    once, twice = (jax.jit(lambda x: x + 1, donate_argnums=d).lower(x).compile() for d in ((0,), ()))
    costs = [cost_of(CompiledStep(c, 0.0), {}, jax.devices()[0]).memory for c in (once, twice)]
    assert costs[1] - costs[0] == 1024 * 1024 * 4


def test_a_device_knows_its_memory():
    assert device_memory(jax.devices()[0]) > 2**20


def test_a_step_that_does_not_fit_is_refused_with_both_numbers():
    check_fits(Cost(1, 1.0, memory=2**30, available=2**30))
    check_fits(Cost(1, 1.0, memory=2**60, available=0))  # the backend does not say
    with pytest.raises(
        ConfigError, match=r"needs 3\.00 GiB per device, but there are 2\.00: lower the batch"
    ) as caught:
        check_fits(Cost(1, 1.0, memory=3 * 2**30, available=2 * 2**30))
    assert "\n" not in str(caught.value)


def test_description_is_one_line_with_the_numbers():
    line = describe(Cost(12345, 2.5e9, 3 * 2**30, 4 * 2**30))
    assert line == "12,345 parameters, 2.5 GFLOP per step, 3 of 4.0 GiB per device"
    assert describe(Cost(1, 0.0, 2**30, 0)).endswith("1 GiB per device")


def test_the_matrix_product_rate_is_positive_also_for_a_stopped_clock(monkeypatch):
    assert matmul_rate(size=64, repeats=2) > 1e6
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    assert matmul_rate(size=64, repeats=1) > 0


def test_a_tracer_records_its_steps_once(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    for first, config, expected in [
        (0, ProfileConfig(trace_start=2, trace_steps=3), ["start 2", "stop 5"]),
        (3, ProfileConfig(trace_start=2, trace_steps=3), ["start 3", "stop 5"]),  # resumed in between
        (9, ProfileConfig(trace_start=2, trace_steps=3), []),
        (0, ProfileConfig(trace_start=2, trace_steps=0), []),
        (0, ProfileConfig(trace_start=6, trace_steps=9), ["start 6", "stop at the end"]),
    ]:
        tracer, seen = Tracer(config, str(tmp_path)), []
        for step in range(first, 8):
            tracer.before(step)
            seen += [f"{call} {step}" for call in calls]
            calls.clear()
        tracer.close()
        tracer.close()
        seen += [f"{call} at the end" for call in calls]
        calls.clear()
        assert seen == expected


def test_a_real_trace_leaves_files(tmp_path):
    tracer = Tracer(ProfileConfig(trace_start=0, trace_steps=1), str(tmp_path / "trace"))
    tracer.before(0)
    jax.block_until_ready(jnp.ones(8) + 1)
    tracer.before(1)
    assert [file for file in (tmp_path / "trace").rglob("*") if file.is_file()]


@pytest.mark.parametrize(("field", "value"), [("trace_steps", -1), ("trace_start", -1)])
def test_impossible_fields_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"profile.{field}=-1"):
        Tracer(ProfileConfig(**{field: value}), "")
