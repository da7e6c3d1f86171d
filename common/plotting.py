"""One style for every figure, and every figure also as numbers: PNG, SVG and CSV are written together.

Figures are plain `Figure` objects on the Agg canvas: no pyplot, no global state, no display, the same bytes
every time.
"""

import csv
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from common.statistics import bootstrap_interval

# Okabe and Ito (2008) without its yellow, told apart by colour-blind readers; the dashes do it in print.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_INK, _RULE = "#24292F", "#D0D7DE"

STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=PALETTE) + cycler(linestyle=_DASHES),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8C959F",
    "axes.linewidth": 0.8,
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "axes.titlepad": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "grid.alpha": 0.7,
    "xtick.color": "#57606A",
    "ytick.color": "#57606A",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same figure on every machine
    "figure.facecolor": "white",
    "savefig.dpi": 160,
    "svg.hashsalt": "triptych",
    "svg.fonttype": "none",
}

Columns = Mapping[str, Sequence[Any] | NDArray]


@contextmanager
def style() -> Iterator[None]:
    """The house style, for code that makes its own axes."""
    with matplotlib.rc_context(STYLE):
        yield


def figure(
    rows: int = 1, columns: int = 1, panel: tuple[float, float] = (4.2, 3.0)
) -> tuple[Figure, NDArray]:
    """A figure of rows × columns panels of size `panel` in inches, and its array [rows, columns] of axes."""
    with style():
        fig = Figure(figsize=(panel[0] * columns, panel[1] * rows), layout="constrained")
        FigureCanvasAgg(fig)
        return fig, fig.subplots(rows, columns, squeeze=False)


def sequential(count: int) -> list[str]:
    """`count` colours from dark to light for an ordered family of curves, equally spaced to the eye."""
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.82, count))
    return [to_hex(colour) for colour in colours]


def curve(
    ax: Axes, x: ArrayLike, ys_by_seed: ArrayLike, label: str, level: float = 0.95, **line: Any
) -> dict[str, NDArray]:
    """Draws the mean over seeds and the bootstrap interval of that mean; a single seed has no band.

    Args:
      x: [T]; ys_by_seed: [S, T] or [T]. Non-finite values are left out; where none is left there is a gap.
      line: passed to `ax.plot` (color, marker, …).
    Returns: the numbers drawn, as CSV columns: curve, x, mean, low, high, seeds.
    """
    x, ys = np.asarray(x, np.float64), np.atleast_2d(np.asarray(ys_by_seed, np.float64))
    if x.ndim != 1 or ys.shape[1:] != x.shape:
        raise ValueError(f"curve {label!r}: x {x.shape} and ys_by_seed {ys.shape} do not fit")
    ys = np.where(np.isfinite(ys), ys, np.nan)
    seeds = np.sum(~np.isnan(ys), axis=0)
    mean = _finite_mean(ys, axis=0)
    low, high = np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    if len(ys) > 1 and len(x) > 0:
        low, high = bootstrap_interval(ys, lambda drawn, axis: _finite_mean(drawn, axis, mean), level)
        low, high = np.where(seeds > 1, low, np.nan), np.where(seeds > 1, high, np.nan)
    with style():
        if len(x) == 1:
            line.setdefault("marker", "o")
        (drawn,) = ax.plot(x, mean, label=label, **line)
        ax.fill_between(x, low, high, color=drawn.get_color(), alpha=0.18, linewidth=0)
    names = np.full(len(x), label, dtype=object)
    return {"curve": names, "x": x, "mean": mean, "low": low, "high": high, "seeds": seeds}


def _finite_mean(values: NDArray, axis: int, otherwise: NDArray | float = np.nan) -> NDArray:
    count = np.sum(~np.isnan(values), axis=axis)
    return np.where(count > 0, np.nansum(values, axis=axis) / np.maximum(count, 1), otherwise)


def stack(parts: Sequence[Columns]) -> dict[str, list[Any]]:
    """The rows of several tables under one another; a column that a table lacks is empty there."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(parts)))
    stacked: dict[str, list[Any]] = {name: [] for name in names}
    for part in parts:
        length = max((len(column) for column in part.values()), default=0)
        for name in names:
            stacked[name] += list(part.get(name, [""] * length))
    return stacked


def label(ax: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Titles in the house style."""
    with style():
        ax.set(title=title, xlabel=x, ylabel=y)


def log_scale(ax: Axes, x: float = 0, y: float = 0) -> None:
    """Makes the axes with a base (not 0) logarithmic; one without a positive value, which has none, stays."""
    if x and np.isfinite(ax.xaxis.get_minpos()):
        ax.set_xscale("log", base=x)
    if y and np.isfinite(ax.yaxis.get_minpos()):
        ax.set_yscale("log", base=y)


def legend(ax: Axes, **options: Any) -> None:
    """The house legend, where there is something to name."""
    if ax.get_legend_handles_labels()[0]:
        with style():
            ax.legend(**options)


def gallery(
    rows: Mapping[str, ArrayLike],
    limits: tuple[float, float] | None = None,
    width: float = 8.4,
) -> Figure:
    """A figure of rows of images beside their labels, as high as they need.

    Args:
      rows: label to images [k, h, w] or [k, h, w, 1 or 3], all of one h × w; k may differ.
      limits: the values drawn black and white; the smallest and largest finite ones by default.
      width: of the figure, in inches.
    """
    images = {name: _colour(np.asarray(batch, np.float64)) for name, batch in rows.items()}
    sizes = {batch.shape[1:3] for batch in images.values()}
    if len(sizes) != 1 or not any(len(batch) for batch in images.values()):
        raise ValueError(f"gallery: needs images of one size, got {[b.shape for b in images.values()]}")
    h, w = sizes.pop()
    gap = max(1, w // 10)
    finite = np.concatenate([batch[np.isfinite(batch)] for batch in images.values()])
    low, high = limits or ((finite.min(), finite.max()) if finite.size else (0.0, 1.0))
    across = max(len(batch) for batch in images.values())
    canvas = np.ones((len(images) * (h + gap) - gap, across * (w + gap) - gap, 3))
    for i, batch in enumerate(images.values()):
        shown = np.nan_to_num(np.clip((batch - low) / (high - low or 1.0), 0, 1), nan=0.5)
        for j, image in enumerate(shown):
            canvas[i * (h + gap) : i * (h + gap) + h, j * (w + gap) : j * (w + gap) + w] = image
    label_width = 0.2 + 0.062 * max(map(len, images))  # at font size 8
    height = (width - label_width) * canvas.shape[0] / canvas.shape[1]
    with style():
        fig = Figure(figsize=(width, height))
        FigureCanvasAgg(fig)
        ax = fig.add_axes((label_width / width, 0, 1 - label_width / width, 1))
        ax.imshow(canvas, interpolation="nearest", aspect="auto")
        ax.set_axis_off()
        for i, name in enumerate(images):
            ax.text(-gap, i * (h + gap) + h / 2, name, ha="right", va="center", fontsize=8, color=_INK)
    return fig


def _colour(batch: NDArray) -> NDArray:
    if batch.ndim == 3:
        batch = batch[..., None]
    if batch.ndim != 4 or batch.shape[-1] not in (1, 3):
        raise ValueError(f"gallery: images of shape {batch.shape}; needs [k, h, w] or [k, h, w, 1 or 3]")
    return np.repeat(batch, 3, axis=-1) if batch.shape[-1] == 1 else batch


def save_figure(fig: Figure, path: str | os.PathLike[str], data: Columns) -> list[pathlib.Path]:
    """Writes `<path>.png`, `.svg` and `.csv`; `data` holds every number drawn, in columns of one length.

    Returns: the three paths. The same figure and numbers give the same bytes.
    """
    lengths = {name: len(column) for name, column in data.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path}: CSV columns of unequal lengths {lengths}")
    base = pathlib.Path(path)
    base.parent.mkdir(parents=True, exist_ok=True)
    png, svg, table = (base.with_name(base.name + suffix) for suffix in (".png", ".svg", ".csv"))
    with style():
        fig.savefig(png, format="png", metadata={"Software": None})
        fig.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(data)
        writer.writerows(zip(*(_cells(column) for column in data.values()), strict=True))
    return [png, svg, table]


def _cells(column: Sequence[Any] | NDArray) -> list[Any]:
    """Python values, which print their shortest exact digits."""
    return np.asarray(column).tolist() if isinstance(column, np.ndarray) else [_cell(item) for item in column]


def _cell(item: Any) -> Any:
    return item.item() if isinstance(item, np.generic) else item
