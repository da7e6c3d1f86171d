"""`make bench`: what the training step, the loop around it and the sampler of the first slice cost here.

python -m experiments.benchmarks.foundation writes results/benchmarks/foundation.json and prints the same
rows: the step's share of this machine's matrix-product rate; what data and logging add to the bare step; what
the guard and seeds side by side cost; training step and DDIM against the same network in PyTorch on the CPU.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from common import runtime

runtime.configure()

import jax  # noqa: E402 - after the environment is set
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from common import config as config_lib  # noqa: E402
from diffusion_mem import denoisers  # noqa: E402
from diffusion_mem.process import ddpm_process  # noqa: E402
from diffusion_mem.task import Predictor  # noqa: E402
from experiments.benchmarks.subjects import Subject, jax_sampler, matmul_seconds, seconds_of  # noqa: E402
from experiments.benchmarks.timing import Row, interleaved, row  # noqa: E402

_FIGURE = Path(__file__).parents[1] / "diffusion_mem" / "fig2_memorization_window.py"
_OUTPUT = Path("results/benchmarks/foundation.json")
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sizes:
    """What is timed; the defaults are those of the figure on a CPU."""

    width: int = 256
    blocks: int = 3
    batches: Sequence[int] = (64, 512)
    n: int = 1024
    log_every: int = 50
    seeds: int = 5
    small_width: int = 32
    small_batch: int = 16
    repeats: int = 9
    seconds: float = 1.0
    samples: int = 512
    sampler_steps: int = 50


def config_for(sizes: Sizes, batch_size: int, seeds: int = 1, **overrides: Any) -> ConfigDict:
    """The figure's config at a batch size; `overrides` name keys with __ for the dot."""
    config = config_lib.load(f"{_FIGURE}:scale=cpu,n={sizes.n}")
    config_lib.override(
        config,
        {
            "data.batch_size": batch_size,
            "model.width": sizes.width,
            "model.blocks": sizes.blocks,
            "run.num_seeds": seeds,
            "run.log_every": sizes.log_every,
            "run.save_every": 10**9,
            "evaluate.milestones": 1,  # none is run
            **{key.replace("__", "."): value for key, value in overrides.items()},
        },
    )
    return config.lock()


def share_of_rate(sizes: Sizes) -> list[Row]:
    """FLOP/s of the matrix products in the step against those of one product of size 2048."""
    subjects = {f"batch {size}": Subject(config_for(sizes, size)) for size in sizes.batches}
    name = f"{sizes.seeds} seeds x batch {sizes.batches[0]}"
    subjects[name] = Subject(config_for(sizes, sizes.batches[0], sizes.seeds))
    candidates = {name: partial(one.bare, _count(one, sizes)) for name, one in subjects.items()}
    times = interleaved({"matmul": matmul_seconds, **candidates}, sizes.repeats)
    rows = [row("matrix product, float32, 2048 x 2048", "GFLOP/s", 1 / times["matmul"])]
    for name, subject in subjects.items():
        gflop = subject.cost.flops / 1e9
        rows.append(row(f"training step, {name}", "ms", 1e3 * times[name], f"{gflop:.3g} GFLOP"))
        share = gflop / times[name] * times["matmul"]
        rows.append(row(f"  share of the matrix-product rate, {name}", "%", 100 * share))
    return rows


def loop_loss(sizes: Sizes) -> list[Row]:
    """What `fit` adds to the bare compiled step: batches, transfers, logging, the guard's host side."""
    rows = []
    for size, seeds in ((sizes.batches[-1], 1), (sizes.batches[0], sizes.seeds)):
        probe = Subject(config_for(sizes, size, seeds))
        steps = max(_count(probe, sizes), 2 * sizes.log_every)
        subject = Subject(config_for(sizes, size, seeds, run__steps=steps + sizes.log_every))
        times = interleaved({"bare": partial(subject.bare, steps), "fit": subject.looped}, sizes.repeats)
        name = f"step time lost to data and logging, {seeds} x batch {size}"
        lost = 100 * (times["fit"] / times["bare"] - 1)
        rows.append(row(name, "%", lost, f"log_every={sizes.log_every}; target 2 %"))
    return rows


def guard_cost(sizes: Sizes) -> list[Row]:
    """The compiled step with guard.nonfinite=skip against off."""
    rows = []
    for size in sizes.batches:
        subjects = {
            action: Subject(config_for(sizes, size, guard__nonfinite=action)) for action in ("off", "skip")
        }
        count = _count(subjects["off"], sizes)
        times = interleaved({name: partial(one.bare, count) for name, one in subjects.items()}, sizes.repeats)
        added = 100 * (times["skip"] / times["off"] - 1)
        rows.append(row(f"guard.nonfinite=skip against off, batch {size}", "%", added))
    return rows


def seeds_cost(sizes: Sizes) -> list[Row]:
    """Seeds trained side by side against one seed alone, for a small network and for the figure's."""
    rows = []
    for width, size in ((sizes.small_width, sizes.small_batch), (sizes.width, sizes.batches[0])):
        counts = (1, sizes.seeds)
        subjects = {n: Subject(config_for(sizes, size, n, model__width=width)) for n in counts}
        candidates = {str(n): partial(one.bare, _count(one, sizes)) for n, one in subjects.items()}
        times = interleaved(candidates, sizes.repeats)
        ratio = times[str(sizes.seeds)] / times["1"]
        rows.append(row(f"one seed, width {width}, batch {size}", "ms", 1e3 * times["1"]))
        rows.append(row(f"{sizes.seeds} seeds against one, width {width}, batch {size}", "x one step", ratio))
    return rows


def against_torch(sizes: Sizes) -> list[Row]:
    """Training step and DDIM as a ratio to the same network in PyTorch, after checking that both agree."""
    try:
        import torch  # pyright: ignore[reportMissingImports]

        from experiments.benchmarks import torch_peer
    except ModuleNotFoundError:
        return [Row("against PyTorch", "", remark="peer not installed (pip install torch)")]
    torch.set_num_threads(_threads())
    process = ddpm_process()
    rows = []
    for size in sizes.batches:
        subject = Subject(config_for(sizes, size))
        network = torch_peer.ResidualMLP(subject.state.params)
        if torch_peer.parameter_count(network) != subject.cost.parameters:
            raise ValueError("the PyTorch peer has another number of parameters")
        peer = torch_peer.stepper(
            network, process, np.asarray(subject.batch["image"]), subject.config.optim.lr
        )
        count = _count(subject, sizes)
        times = interleaved(
            {"ours": partial(subject.bare, count), "peer": partial(peer, count)}, sizes.repeats
        )
        rows.append(row(f"training step, batch {size}: PyTorch", "ms", 1e3 * times["peer"]))
        rows.append(row(f"training step, batch {size}: time / PyTorch's", "x", times["ours"] / times["peer"]))
    return rows + _sampling_against_torch(sizes, process)


def _sampling_against_torch(sizes: Sizes, process: Any) -> list[Row]:
    from experiments.benchmarks import torch_peer

    predict = Predictor(denoisers.ResidualMLP(sizes.width, sizes.blocks))
    params = _random_params(predict, sizes)
    x_init = np.asarray(jax.random.normal(jax.random.key(1), (sizes.samples, 64)))
    ours = jax_sampler(predict, params, process, sizes.sampler_steps)
    network = torch_peer.ResidualMLP(params)
    peer = torch_peer.sampler(network, process, sizes.sampler_steps)
    difference = max(
        _difference(
            predict(params, jnp.asarray(x_init), jnp.full(len(x_init), t)),
            torch_peer.noise(network, x_init, t),
        )
        for t in (1, process.num_steps // 2, process.num_steps - 1)
    )
    if not difference <= _TOLERANCE:
        raise ValueError(f"the PyTorch peer's outputs differ by {difference:.3g}, more than {_TOLERANCE}")
    candidates = {"ours": partial(seconds_of, ours, x_init), "peer": partial(seconds_of, peer, x_init)}
    times = interleaved(candidates, sizes.repeats)
    name = f"DDIM, {sizes.sampler_steps} steps, {sizes.samples} samples"
    return [
        Row("largest difference of outputs for equal weights", "", difference, difference, difference),
        row(f"{name}: ours", "ms", 1e3 * times["ours"]),
        row(f"{name}: PyTorch", "ms", 1e3 * times["peer"]),
        row(f"{name}: time / PyTorch's", "x", times["ours"] / times["peer"]),
    ]


def _random_params(predict: Predictor, sizes: Sizes) -> Any:
    """Parameters with no zero output layer, so that agreement says something."""
    shapes = jax.eval_shape(
        predict.network.init, jax.random.key(0), np.zeros((1, 64), np.float32), np.zeros(1, np.int32)
    )["params"]
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: generator.normal(0, leaf.shape[0] ** -0.5, leaf.shape).astype(np.float32), shapes
    )


def _difference(a: Any, b: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(a) - b) / np.maximum(1, np.abs(b))))


def _count(subject: Subject, sizes: Sizes) -> int:
    """Steps that take about `sizes.seconds`."""
    return max(int(sizes.seconds / subject.bare(5)), 5)


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "threads": _threads(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "load_average": os.getloadavg()[0],
        "time": time.time(),
    }


def main(sizes: Sizes = Sizes(), output: Path = _OUTPUT) -> int:
    """Prints the rows as they come and writes them all; exit code 0."""
    about = machine()
    print(f"{about['device']}, {about['threads']} threads, jax {about['versions']['jax']}", flush=True)
    rows: list[Row] = []
    for part in (share_of_rate, loop_loss, guard_cost, seeds_cost, against_torch):
        for line in part(sizes):
            print(line, flush=True)
            rows.append(line)
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": about, "sizes": vars(sizes), "rows": [line.as_dict() for line in rows]}
    output.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
