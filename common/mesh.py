"""Processes, devices and the mesh: the only file that asks JAX where it runs.

The mesh has four axes. `data` and `fsdp` split the batch, `fsdp` and `tensor` split parameters, `expert`
splits experts; an axis of size 1 costs nothing.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from common.config import require

AXES = ("data", "fsdp", "tensor", "expert")
BATCH_AXES = ("data", "fsdp")
MODES = ("jit", "shard_map", "pmap")


@dataclass(frozen=True)
class ParallelConfig:
    """How a run is laid out. Sizes multiply to the device count; one of them may be -1, which is inferred."""

    mode: str = "jit"
    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1


def initialize_distributed() -> None:
    """Joins the other processes of a multi-process run; call before any device is touched.

    On SLURM, Open MPI and TPU pods JAX finds them; elsewhere, as on Kubernetes, `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` name the processes. Does nothing for a single process.
    """
    count = os.environ.get("JAX_NUM_PROCESSES")
    if count is not None:
        address, process = os.environ.get("JAX_COORDINATOR_ADDRESS"), os.environ.get("JAX_PROCESS_ID")
        require(address is not None, "JAX_COORDINATOR_ADDRESS", address, "set it to host:port of process 0")
        require(process is not None, "JAX_PROCESS_ID", process, f"set it to 0 … {count}-1")
        for name, value in (("JAX_NUM_PROCESSES", count), ("JAX_PROCESS_ID", process)):
            require(str(value).isdigit(), name, value, "must be an integer")
        jax.distributed.initialize(address, int(count), int(process or 0))
    elif (
        # Without srun, as in the shell of salloc, the variables of an allocation do not make a step of it.
        (int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in os.environ)
        or int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
        or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    ):
        jax.distributed.initialize()


def is_lead() -> bool:
    """True in the one process that writes files and prints."""
    return jax.process_index() == 0


def from_lead(value: int) -> int:
    """The lead process's `value`, in every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def make_mesh(config: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `config` over all devices, with Auto axes (linen needs them; Explicit is JAX's default).

    Raises: ConfigError when the product is not the device count, or a per-device mode shards parameters.
    """
    devices = jax.devices() if devices is None else list(devices)
    require(config.mode in MODES, "parallel.mode", config.mode, f"must be one of {', '.join(MODES)}")
    sizes = {axis: getattr(config, axis) for axis in AXES}
    inferred = [axis for axis, size in sizes.items() if size == -1]
    require(len(inferred) <= 1, "parallel", sizes, "only one axis may be -1")
    for axis, size in sizes.items():
        require(size == -1 or size >= 1, f"parallel.{axis}", size, "must be at least 1, or -1 to infer it")
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    if inferred:
        require(
            len(devices) % known == 0, "parallel", sizes, f"{known} does not divide {len(devices)} devices"
        )
        sizes[inferred[0]] = len(devices) // known
    product = int(np.prod(list(sizes.values())))
    require(
        product == len(devices),
        "parallel",
        sizes,
        f"multiplies to {product}, but there are {len(devices)} devices",
    )
    if config.mode == "pmap":
        require(jax.process_count() == 1, "parallel.mode", config.mode, "runs in one process: use shard_map")
    if config.mode != "jit":
        require(
            sizes["data"] == product,
            "parallel.mode",
            config.mode,
            "replicates parameters: use it with the data axis only, or mode=jit",
        )
    shape = tuple(sizes[axis] for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_shards(mesh: Mesh) -> int:
    """Number of equal parts a global batch is cut into."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def check_batch(mesh: Mesh, batch_size: int, field: str) -> None:
    """Raises ConfigError unless the global batch divides evenly over the mesh's batch axes."""
    shards = batch_shards(mesh)
    require(batch_size >= 1, field, batch_size, "must be at least 1")
    require(
        batch_size % shards == 0,
        field,
        batch_size,
        f"must be a multiple of {shards} (mesh axes data={mesh.shape['data']} × fsdp={mesh.shape['fsdp']})",
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, batch_axis: int = 0) -> NamedSharding:
    """Dimension `batch_axis` of every batch leaf is cut over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(*[None] * batch_axis, BATCH_AXES))


def to_global(batch: Any, mesh: Mesh, batch_axis: int = 0) -> Any:
    """Places this process's slice of a batch on the mesh as part of one global array per leaf.

    Raises: ConfigError when the global size does not divide evenly over the mesh.
    """
    for size in {leaf.shape[batch_axis] for leaf in jax.tree.leaves(batch)}:
        check_batch(mesh, size * jax.process_count(), "global batch size")
    sharding = batch_sharding(mesh, batch_axis)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch)
