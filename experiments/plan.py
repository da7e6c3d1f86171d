"""`--dry_run`: what a reproduction would run, and what it would cost, before anything is trained."""

from collections.abc import Sequence

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from common import profile
from common.config import view
from common.mesh import ParallelConfig, make_mesh
from common.parallel import compile_step
from common.sharding import state_shardings
from common.start import batch_shapes, run_key
from experiments.tasks import build

# Of the machine's matrix-product rate; small networks reach less.
_EFFICIENCY = 0.5
_HEADINGS = (
    "run",
    "seeds",
    "steps",
    "parameters",
    "FLOP / step",
    "FLOP",
    "GiB / device",
    "minutes of updates",
)


def cost_of(config: ConfigDict) -> profile.Cost:
    """Compiles one step of a config without initialising a state."""
    parallel = view(config, ParallelConfig, "parallel")
    mesh = make_mesh(parallel)
    task = build(config, mesh)
    state = jax.eval_shape(task.init, run_key(config.run))
    shardings = state_shardings(state, mesh, task.rules)
    batch = batch_shapes(task, mesh, 0)
    compiled = compile_step(task.step, mesh, parallel.mode, state, shardings, batch, task.batch_axis)
    return profile.cost_of(compiled, state.params, mesh.devices.flat[0])


def show(configs: Sequence[tuple[str, ConfigDict]]) -> None:
    """Prints one row a run: parameters, steps, FLOPs, memory, and time for the updates at half the measured
    matrix-product rate."""
    rate = profile.matmul_rate() * jax.device_count()
    table = Table()
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold", justify="left" if heading == "run" else "right")
    minutes = 0.0
    for name, config in configs:
        cost = cost_of(config)
        total = cost.flops * config.run.steps
        expected = total / (_EFFICIENCY * rate) / 60
        minutes += expected
        numbers = (cost.flops, total, cost.memory / 2**30, expected)
        table.add_row(
            name,
            str(config.run.num_seeds),
            f"{config.run.steps:,}",
            f"{cost.parameters // config.run.num_seeds:,}",
            *(f"{number:.3g}" for number in numbers),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)
    console.print(
        f"This machine multiplies float32 matrices at {rate / 1e9:.0f} GFLOP/s. At half of that the updates "
        f"take {minutes:.1f} minutes; evaluation comes on top."
    )
