"""Fig. 2 of arXiv 2505.17638: quality arrives at a time that does not depend on n, memorization at one that
grows with n.

The paper trains U-Nets on CelebA at 32x32 for millions of steps (width 32: τ_gen ≈ 100K for every n,
τ_mem ≈ 300 n; FID and memorized fraction from 10,000 samples). Here the same quantities are measured for a
residual MLP denoiser on real images of digits:

  tiny  8x8 digits, two sizes, seconds: checks the path, claims nothing
  cpu   8x8 digits, n = 32 … 256, 5 seeds: minutes on two cores (`make reproduce`)
  gpu   28x28 MNIST, n = 128 … 1024, 5 seeds, width 1024 (not run yet)

At cpu scale every update sees the whole training set, and the same 256 draws of noise whatever n. Batches of
n instead average more noise for a larger n, and τ_mem grows more slowly than n; batches that are a small part
of n make it grow faster, at this constant learning rate (slope 0.65 in a one-seed pilot with batches of n,
n = 32 … 256; 1.3 over five seeds with batches of 64, n = 64 … 256).

  python -m experiments.reproduce diffusion_mem/fig2_memorization_window --scale=cpu
  python -m experiments.train --config=experiments/diffusion_mem/fig2_memorization_window.py:n=128 \
    --workdir=results/one
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from common import plotting, statistics
from common.config import from_dataclass, nearest, require
from common.defaults import base_config
from common.sweep import Sweep, zipped
from common.verdict import Claim, Verdict
from diffusion_mem.evaluate import EvaluateConfig
from diffusion_mem.task import DataConfig, ModelConfig, ProcessConfig
from experiments.runs import Run

TITLE = "Why Diffusion Models Don't Memorize, Fig. 2: the memorization window"
CLAIMED_SCALES = ("cpu", "gpu")

# The verdict rule and its numbers, fixed before the run; CLAIM says what they are for.
MEMORIZED, PLATEAU, LOSS_GAP = 0.05, 0.1, 0.1
LINEAR, FLAT, OPEN = (0.8, 1.2), 0.2, 3.0

_SIZES = {"tiny": (16, 32), "cpu": (32, 64, 128, 256), "gpu": (128, 256, 512, 1024)}
# Updates per training image: about 1.5 times τ_mem / n at cpu scale.
_STEPS_PER_IMAGE = {"tiny": 2, "cpu": 12, "gpu": 100}


def get_config(scale: str = "cpu", n: int = 128) -> ConfigDict:
    """The config of one data-set size at one scale."""
    require(scale in _SIZES, "scale", scale, f"not available for this figure{nearest(scale, _SIZES)}")
    config = base_config("diffusion_mem")
    config.data = from_dataclass(DataConfig(n=n, batch_size=256, fill_batch=True))
    config.process = from_dataclass(ProcessConfig())
    config.model = from_dataclass(ModelConfig(width=256, blocks=3))
    config.evaluate = from_dataclass(EvaluateConfig(milestones=20, first=1, samples=512, sampler_steps=25))
    config.optim.lr = 1e-3
    config.run.num_seeds = 5
    config.run.steps = _STEPS_PER_IMAGE[scale] * n
    config.run.save_every = 2000
    if scale == "tiny":
        config.data.batch_size, config.model.width, config.model.blocks = 16, 32, 1
        config.evaluate = from_dataclass(EvaluateConfig(milestones=4, first=1, samples=32, sampler_steps=5))
        config.run.num_seeds, config.run.log_every = 2, 10
    if scale == "gpu":
        config.data.name, config.data.batch_size = "mnist", 512
        config.model.width, config.optim.lr = 1024, 3e-4
        config.evaluate = from_dataclass(EvaluateConfig(milestones=36, first=1, samples=4096))
    return config


def _sweep(scale: str) -> Sweep:
    sizes = _SIZES[scale]
    return zipped({"data.n": sizes, "run.steps": [_STEPS_PER_IMAGE[scale] * n for n in sizes]})


SWEEP = {scale: _sweep(scale) for scale in _SIZES}


def memorization_time(run: Run) -> np.ndarray:
    """τ_mem of each seed: the step at which the memorized fraction crosses 5 %; NaN if it never does."""
    steps, fractions = run.series("sample/memorized")
    return np.array([statistics.crossing(steps, values, MEMORIZED) for values in fractions])


def generalisation_time(run: Run) -> np.ndarray:
    """τ_gen of each seed: the step from which the Fréchet distance stays within 10 % of its whole fall.

    The fall is from the untrained network to the lowest value. Of the curve the running median of three
    milestones is taken: at a constant learning rate single milestones jump. NaN where it never settles.
    """
    steps, distances = run.series("sample/frechet")
    return np.array([_settling_time(steps, values) for values in distances])


def _settling_time(steps: np.ndarray, values: np.ndarray) -> float:
    padded = np.pad(values, 1, mode="edge")
    smooth = np.median([padded[:-2], padded[1:-1], padded[2:]], axis=0)
    above = np.flatnonzero(~(smooth <= smooth.min() + PLATEAU * (values[0] - smooth.min())))
    last = above[-1] if len(above) else 0
    return float("nan") if last == len(steps) - 1 else float(np.sqrt(steps[last] * steps[last + 1]))


def loss_gap_time(run: Run) -> np.ndarray:
    """The step of each seed at which the test loss at t = 0.01 is 0.1 above the train loss; NaN if never."""
    steps, test = run.series("loss/test")
    _, train = run.series("loss/train")
    return np.array([statistics.crossing(steps, gap, LOSS_GAP) for gap in test - train])


def _points(runs: Sequence[Run], time: Callable[[Run], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(n, time) of every seed of every run."""
    times = [time(run) for run in runs]
    sizes = [np.full(len(t), run.config.data.n) for run, t in zip(runs, times, strict=True)]
    return np.concatenate(sizes).astype(float), np.concatenate(times)


def CLAIM(runs: Sequence[Run]) -> list[Claim]:
    """The verdict rule, fixed before the run.

    A time grows linearly with n: reproduced if its log-log slope against n lies in [0.8, 1.2] and the event
    came in every seed at every n; trend only if the slope's 95 % interval is above 0; else not reproduced.

    A time does not depend on n: reproduced if its log-log slope lies in [-0.2, 0.2]; trend only if it is less
    than half the slope of τ_mem; else not reproduced.

    There is a window without memorization: reproduced if τ_mem > 3 τ_gen in every seed at the largest n;
    trend only if τ_mem > τ_gen in every seed; else not reproduced.
    """
    seeds = min(run.num_seeds for run in runs)
    n, tau_mem = _points(runs, memorization_time)
    tau_gen, gap = _points(runs, generalisation_time)[1], _points(runs, loss_gap_time)[1]
    slope = statistics.loglog_slope(n, tau_mem)
    return [
        _linear("τ_mem, when 5 % of samples are memorized, is proportional to n", slope, seeds),
        _flat(statistics.loglog_slope(n, tau_gen), slope, seeds),
        _linear(
            "The test loss leaves the train loss at a time proportional to n",
            statistics.loglog_slope(n, gap),
            seeds,
        ),
        _window(n, tau_gen, tau_mem, seeds),
    ]


def _linear(statement: str, slope: statistics.Slope, seeds: int) -> Claim:
    if LINEAR[0] <= slope.value <= LINEAR[1] and not slope.censored:
        verdict = Verdict.REPRODUCED
    else:
        verdict = Verdict.TREND_ONLY if slope.low > 0 else Verdict.NOT_REPRODUCED
    statement += ": log-log slope"
    if slope.censored:
        statement += f" ({slope.censored} of {slope.used + slope.censored} seeds never got there)"
    return Claim(statement, "1", slope.value, (slope.low, slope.high), seeds, verdict)


def _flat(slope: statistics.Slope, memorization: statistics.Slope, seeds: int) -> Claim:
    if abs(slope.value) <= FLAT and not slope.censored:
        verdict = Verdict.REPRODUCED
    else:
        below = abs(slope.value) < memorization.value / 2
        verdict = Verdict.TREND_ONLY if below else Verdict.NOT_REPRODUCED
    statement = "τ_gen, when the Fréchet distance levels off, does not depend on n: log-log slope"
    return Claim(statement, "0", slope.value, (slope.low, slope.high), seeds, verdict)


def _window(n: np.ndarray, tau_gen: np.ndarray, tau_mem: np.ndarray, seeds: int) -> Claim:
    largest = n == n.max()
    # A seed that never memorized has a window longer than its run: open, but without a number.
    ratio = np.where(np.isnan(tau_mem), np.inf, tau_mem)[largest] / tau_gen[largest]
    verdict = Verdict.TREND_ONLY if np.all(ratio > 1) else Verdict.NOT_REPRODUCED
    if np.all(ratio > OPEN):
        verdict = Verdict.REPRODUCED
    finite = ratio[np.isfinite(ratio)]
    measured = float(finite.mean()) if len(finite) else "never memorized"
    interval = statistics.bootstrap_interval(finite) if len(finite) else None
    statement = f"At the largest n ({n.max():.0f}) there is a window without memorization: τ_mem / τ_gen"
    bounds = None if interval is None else (float(interval[0]), float(interval[1]))
    return Claim(statement, "≈ 98 at n = 32768", measured, bounds, seeds, verdict)


def plot(runs: Sequence[Run], folder: Path) -> list[tuple[Path, str]]:
    """Draws the figure's panels into `folder`; (image, caption) of each."""
    return [_curves(runs, folder), _times(runs, folder), _gallery(runs[len(runs) // 2], folder)]


def _loss_gap(run: Run) -> tuple[np.ndarray, np.ndarray]:
    steps, test = run.series("loss/test")
    return steps, test - run.series("loss/train")[1]


def _curves(runs: Sequence[Run], folder: Path) -> tuple[Path, str]:
    memorized = "Fraction of samples memorized"
    panels: list[tuple[str, Callable[[Run], tuple[np.ndarray, np.ndarray]], bool]] = [
        ("Fréchet distance to held-out images", lambda run: run.series("sample/frechet"), False),
        (memorized, lambda run: run.series("sample/memorized"), False),
        (f"{memorized}, against τ / n", lambda run: run.series("sample/memorized"), True),
        ("Train loss at t = 0.01", lambda run: run.series("loss/train"), False),
        ("Test loss at t = 0.01", lambda run: run.series("loss/test"), False),
        ("Test − train loss, against τ / n", _loss_gap, True),
    ]
    figure, axes = plotting.figure(2, 3)
    colours, drawn = plotting.sequential(len(runs)), []
    for ax, (title, series, collapsed) in zip(axes.flat, panels, strict=True):
        for run, colour in zip(runs, colours, strict=True):
            steps, values = series(run)
            x = steps / run.config.data.n if collapsed else steps
            table = plotting.curve(ax, x, values, f"n = {run.config.data.n}", color=colour, linestyle="-")
            drawn.append({**table, "panel": np.full(len(x), title, dtype=object)})
        plotting.label(ax, title, "training steps / n" if collapsed else "training steps τ")
        plotting.log_scale(ax, x=10)
    plotting.log_scale(axes[0, 0], y=10)
    plotting.legend(axes[0, 0])
    image = plotting.save_figure(figure, folder / "curves", plotting.stack(drawn))[0]
    caption = (
        "Top: sample quality and memorized fraction against training steps τ, and against τ / n, where the "
        "curves of all n should collapse. Bottom: train and test loss at one noise level, and their gap. "
        "Mean over seeds with its 95 % bootstrap band."
    )
    return image, caption


def _times(runs: Sequence[Run], folder: Path) -> tuple[Path, str]:
    figure, axes = plotting.figure(1, 1, panel=(6.2, 4.0))
    ax, drawn = axes[0, 0], []
    for time, name, marker in (
        (memorization_time, "τ_mem: 5 % of samples memorized", "o"),
        (loss_gap_time, "test loss leaves train loss", "^"),
        (generalisation_time, "τ_gen: Fréchet distance levels off", "s"),
    ):
        n, times = _points(runs, time)
        slope = statistics.loglog_slope(n, times)
        text = f"{name}; slope {slope.value:.2f} [{slope.low:.2f}, {slope.high:.2f}]"
        ax.plot(n, times, marker=marker, linestyle="none", markersize=4, alpha=0.7, label=text)
        drawn.append({"time": np.full(len(n), name, dtype=object), "n": n, "step": times})
    per_image = drawn[0]["step"] / drawn[0]["n"]
    if np.isfinite(per_image).any():
        sizes, anchor = np.unique(drawn[0]["n"]), np.nanmedian(per_image)
        ax.plot(sizes, anchor * sizes, color="#8C959F", linestyle=":", label=f"{anchor:.3g} n (slope 1)")
    plotting.log_scale(ax, x=2, y=10)
    plotting.label(ax, "When quality and memorization arrive", "training images n", "training steps τ")
    plotting.legend(ax)
    image = plotting.save_figure(figure, folder / "times", plotting.stack(drawn))[0]
    return image, "One point a seed; log-log slopes with 95 % bootstrap intervals over seeds."


def _gallery(run: Run, folder: Path) -> tuple[Path, str]:
    """Samples of one seed early, in the window, and at the end, each above its nearest training image."""
    steps, _ = run.series("sample/frechet")
    arrived = np.nanmedian([*generalisation_time(run), steps[0]])
    inside = steps[np.argmin(np.abs(np.log(steps / (2 * arrived))))]
    rows: dict[str, np.ndarray] = {}
    for step in sorted({int(steps[0]), int(inside), int(steps[-1])}):
        arrays = run.artifact("sample", step)
        rows[f"samples, τ = {step}"] = arrays["samples"][0]
        rows[f"nearest in training, τ = {step}"] = arrays["nearest"][0]
    figure = plotting.gallery(rows, limits=(-1, 1))
    counts = {"row": list(rows), "images": [len(images) for images in rows.values()]}
    image = plotting.save_figure(figure, folder / "gallery", counts)[0]
    caption = (
        f"Samples of one seed at n = {run.config.data.n}, each above its nearest training image: at the "
        "first milestone, at about twice τ_gen, and at the end of training. The starting noise is the same."
    )
    return image, caption
