"""Meshes: what fits the devices, what is refused, and where a batch goes."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from common.config import ConfigError
from common.mesh import (
    ParallelConfig,
    batch_sharding,
    batch_shards,
    check_batch,
    from_lead,
    initialize_distributed,
    is_lead,
    make_mesh,
    replicated,
    to_global,
)


@pytest.mark.parametrize(
    ("config", "devices", "shape"),
    [
        (ParallelConfig(), 8, (8, 1, 1, 1)),
        (ParallelConfig(), 1, (1, 1, 1, 1)),
        (ParallelConfig(fsdp=2, tensor=2), 8, (2, 2, 2, 1)),
        (ParallelConfig(data=2, fsdp=-1), 8, (2, 4, 1, 1)),
        (ParallelConfig(data=1, fsdp=1, expert=4), 4, (1, 1, 1, 4)),
        (ParallelConfig(mode="pmap"), 4, (4, 1, 1, 1)),
    ],
)
def test_sizes_multiply_to_the_devices_and_one_is_inferred(config, devices, shape):
    mesh = make_mesh(config, jax.devices()[:devices])
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == ("data", "fsdp", "tensor", "expert")
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (ParallelConfig(data=2, fsdp=4), 4, "multiplies to 8, but there are 4 devices"),
        (ParallelConfig(data=1), 8, "multiplies to 1, but there are 8 devices"),
        (ParallelConfig(fsdp=3), 8, "3 does not divide 8 devices"),
        (ParallelConfig(fsdp=-1), 8, "only one axis may be -1"),
        (ParallelConfig(fsdp=0), 8, "parallel.fsdp=0: must be at least 1, or -1"),
        (ParallelConfig(tensor=-2), 8, "parallel.tensor=-2"),
        (ParallelConfig(mode="xmap"), 8, "parallel.mode='xmap': must be one of jit, shard_map, pmap"),
        (ParallelConfig(mode="shard_map", fsdp=2), 8, "replicates parameters"),
        (ParallelConfig(mode="pmap", tensor=2), 8, "replicates parameters"),
    ],
)
def test_an_impossible_mesh_is_refused_in_one_line(config, devices, message):
    with pytest.raises(ConfigError) as caught:
        make_mesh(config, jax.devices()[:devices])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [12, 9, 19, 4, 0])
def test_a_batch_that_does_not_divide_is_refused_with_its_size_and_axes(size):
    mesh = make_mesh(ParallelConfig(fsdp=2))
    assert batch_shards(mesh) == 8
    with pytest.raises(ConfigError, match=f"data.batch_size={size}: must be"):
        check_batch(mesh, size, "data.batch_size")
    if size:
        with pytest.raises(ConfigError, match=r"multiple of 8 \(mesh axes data=4 × fsdp=2\)"):
            to_global({"x": np.zeros((size, 2))}, mesh)


@pytest.mark.parametrize(
    ("config", "devices"), [(ParallelConfig(), 8), (ParallelConfig(fsdp=2), 8), (ParallelConfig(), 1)]
)
def test_a_global_batch_is_whole_and_cut_over_the_batch_axes(config, devices):
    mesh = make_mesh(config, jax.devices()[:devices])
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    placed = to_global({"x": x}, mesh)["x"]
    np.testing.assert_array_equal(placed, x)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(16 // devices, 2)}
    assert placed.sharding.is_equivalent_to(batch_sharding(mesh), 2)


def test_the_batch_axis_may_be_the_second():
    mesh = make_mesh(ParallelConfig())
    placed = to_global({"x": np.zeros((3, 16, 2))}, mesh, batch_axis=1)["x"]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 2, 2)}
    with pytest.raises(ConfigError, match="global batch size=3"):
        to_global({"x": np.zeros((3, 16, 2))}, mesh, batch_axis=0)


def test_the_tensor_axis_does_not_cut_the_batch():
    mesh = make_mesh(ParallelConfig(tensor=4))
    assert batch_shards(mesh) == 2
    check_batch(mesh, 2, "batch_size")
    assert replicated(mesh).is_fully_replicated


@pytest.mark.parametrize("tasks", ["1", "4"])  # 4: the shell of an allocation, without srun
def test_a_single_process_joins_nobody_and_leads(monkeypatch, tasks):
    def refuse(*args, **kwargs):
        raise AssertionError("a single process must not look for others")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    initialize_distributed()
    assert is_lead()
    assert from_lead(7) == 7


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "a,b"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
    ],
)
def test_clusters_are_joined(monkeypatch, env):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    initialize_distributed()
    assert calls == [()]


def test_processes_named_by_hand_are_joined_or_refused(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="JAX_COORDINATOR_ADDRESS"):
        initialize_distributed()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID"):
        initialize_distributed()
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    initialize_distributed()
    assert calls == [("localhost:1", 2, 1)]
