"""Reports as one HTML file: everything inlined, no script, nothing fetched, all text escaped."""

import base64
import html
import math
import os
import pathlib
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Self

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from ml_collections import ConfigDict

from common import config as config_lib
from common import plotting
from common.config import ConfigError
from common.verdict import Claim, Verdict, overall
from common.workdir import is_done, saved_config, saved_environment
from common.writer import read_events, read_metrics

_TONES = {
    Verdict.REPRODUCED: ("good", "✓"),
    Verdict.TREND_ONLY: ("part", "≈"),
    Verdict.NOT_REPRODUCED: ("bad", "✗"),
    Verdict.NOT_RUN: ("none", "–"),
}
_MAX_PANELS = 24


class Report:
    """A page built from top to bottom; every method returns the report."""

    def __init__(self, title: str, subtitle: str = ""):
        self._title, self._parts = title, list[Callable[[pathlib.Path], str]]()
        self._add(f"<h1>{html.escape(title)}</h1>")
        if subtitle:
            self._add(f'<p class="subtitle">{html.escape(subtitle)}</p>')

    def heading(self, text: str) -> Self:
        return self._add(f"<h2>{html.escape(text)}</h2>")

    def text(self, *paragraphs: str) -> Self:
        return self._add("".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs))

    def verdict(self, claims: Sequence[Claim]) -> Self:
        """A banner with the worst verdict, and each claim's measurement beside the paper's value."""
        result = overall(claims)
        counts = [(verdict, sum(claim.verdict == verdict for claim in claims)) for verdict in Verdict]
        summary = (
            ", ".join(f"{count} {verdict}" for verdict, count in counts if count) or "nothing was claimed"
        )
        tone, sign = _TONES[result]
        self._add(
            f'<div class="banner {tone}"><strong>{sign} {html.escape(result.capitalize())}</strong>'
            f"<span>Claims: {html.escape(summary)}</span></div>"
        )
        columns = ("Claim", "Paper", "Measured", "95 % interval", "Seeds", "Verdict")
        return self.table(columns, [_claim_row(claim) for claim in claims]) if claims else self

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> Self:
        """A table; numbers are set right with four digits, verdicts as badges, None and NaN as a dash."""
        rows = [list(row) for row in rows]
        ragged = [row for row in rows if len(row) != len(columns)]
        if ragged:
            raise ValueError(f"table row {ragged[0]}: needs {len(columns)} cells")
        numeric = [
            bool(rows) and all(_is_number(row[i]) or row[i] is None for row in rows)
            for i in range(len(columns))
        ]
        marks = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(
            f"<th{mark}>{html.escape(name)}</th>" for name, mark in zip(columns, marks, strict=True)
        )
        cells = [
            "".join(f"<td{m}>{_cell(item)}</td>" for item, m in zip(row, marks, strict=True)) for row in rows
        ]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        body = body or f'<tr><td colspan="{len(columns)}">none</td></tr>'
        title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        table = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return self._add(f'<div class="scroll">{table}</div>')

    def figure(self, image: str | os.PathLike[str], caption: str) -> Self:
        """Embeds a PNG, with links to the CSV and SVG that `plotting.save_figure` left beside it."""
        image = pathlib.Path(image)
        encoded = base64.b64encode(image.read_bytes()).decode()

        def part(folder: pathlib.Path) -> str:
            siblings = [
                path for path in (image.with_suffix(".csv"), image.with_suffix(".svg")) if path.exists()
            ]
            text = f"{html.escape(caption)} {' · '.join(_link(path, folder) for path in siblings)}".strip()
            source = f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{encoded}">'
            return f"<figure>{source}<figcaption>{text}</figcaption></figure>"

        self._parts.append(part)
        return self

    def write(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the page; a reader sees the old one or the whole new one, never a part."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(self.render(path.parent), encoding="utf-8")
        temporary.replace(path)
        return path

    def render(self, folder: str | os.PathLike[str] = ".") -> str:
        """The page as text; links to files are relative to `folder`."""
        css = resources.files("common").joinpath("report.css").read_text(encoding="utf-8")
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        body = "\n".join(part(pathlib.Path(folder)) for part in self._parts)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self._title)}</title>\n<style>\n{css}</style>\n</head>\n"
            f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
        )

    def _add(self, part: str) -> Self:
        self._parts.append(lambda _: part)
        return self


def _claim_row(claim: Claim) -> list[Any]:
    low, high = claim.interval or (math.nan, math.nan)
    interval = f"{low:.3g}\u00a0to\u00a0{high:.3g}" if math.isfinite(low) and math.isfinite(high) else None
    measured = float(f"{claim.measured:.3g}") if isinstance(claim.measured, float) else claim.measured
    return [claim.statement, claim.paper_value, measured, interval, claim.seeds, claim.verdict]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, Verdict):
        tone, sign = _TONES[value]
        return f'<span class="badge {tone}">{sign} {html.escape(value)}</span>'
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if _is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if isinstance(value, pathlib.PurePath):
        return f"<code>{html.escape(str(value))}</code>"
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return html.escape(str(value))


def _link(path: pathlib.Path, folder: pathlib.Path) -> str:
    target = urllib.parse.quote(os.path.relpath(path, folder).replace(os.sep, "/"))
    return f'<a href="{html.escape(target)}">{path.suffix[1:].upper()}</a>'


def run_report(workdir: str | os.PathLike[str], defaults: ConfigDict | None = None) -> pathlib.Path:
    """Writes `<workdir>/report.html` and `figures/metrics.*` of a run, finished or not, from its files.

    Args: `defaults`, the config file's own values, sets off what was changed from them.
    """
    workdir = pathlib.Path(workdir)
    rows, events = read_metrics(workdir), read_events(workdir)
    last = max((row["step"] for row in rows + events), default=0)
    attempts = max((row["attempt"] for row in rows + events), default=0)
    status = "finished" if is_done(str(workdir)) else "not finished"
    report = Report(
        workdir.resolve().name, f"{status} · step {last:,} · {attempts} attempt{'s' * (attempts != 1)}"
    )
    report.heading("Metrics")
    series = metric_series(rows)
    if series:
        figure, data = metric_panels(series)
        image = plotting.save_figure(figure, workdir / "figures" / "metrics", data)[0]
        hidden = f" The first {_MAX_PANELS} of {len(series)} are drawn." if len(series) > _MAX_PANELS else ""
        report.figure(image, f"Metrics against the step; of several seeds, mean and 95 % interval.{hidden}")
        last_rows = [[name, steps[-1], _last(values)] for name, (steps, values) in series.items()]
        report.table(("Metric", "Step", "Last value"), last_rows)
    else:
        report.text("No metrics were written.")
    _add_config(report, workdir, defaults)
    report.heading("Events")
    columns = ("step", "attempt", "event", "message")
    report.table([name.capitalize() for name in columns], [[row[name] for name in columns] for row in events])
    return report.write(workdir / "report.html")


def metric_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[list[float]]]]:
    """{"kind name": (steps, values [steps][seeds])} of every metric in `rows` that has a finite value."""
    series: dict[str, tuple[list[int], list[list[float]]]] = {}
    for row in rows:
        for name, value in row.items():
            values = value if isinstance(value, list) else [value]
            if name in ("step", "attempt", "kind", "time") or not values or not all(map(_is_number, values)):
                continue
            steps, curves = series.setdefault(f"{row['kind']} {name}", ([], []))
            steps.append(row["step"])
            curves.append([float(item) for item in values])
    return {
        name: curve for name, curve in series.items() if any(math.isfinite(v) for at in curve[1] for v in at)
    }


def metric_panels(
    series: Mapping[str, tuple[list[int], list[list[float]]]],
) -> tuple[Figure, dict[str, list[Any]]]:
    """Small panels, three across, one a metric, and their numbers; what spans two decades is drawn log."""
    shown = list(series.items())[:_MAX_PANELS]
    across = min(3, len(shown))
    figure, axes = plotting.figure(math.ceil(len(shown) / across), across, panel=(3.3, 2.3))
    drawn = []
    for ax, (name, (steps, values)) in zip(axes.flat, shown, strict=False):
        seeds = max(map(len, values))
        padded = [[*at, *[math.nan] * (seeds - len(at))] for at in values]
        drawn.append(plotting.curve(ax, steps, list(zip(*padded, strict=True)), name))
        plotting.label(ax, name)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        finite = [value for at in values for value in at if math.isfinite(value)]
        if min(finite) > 0 and max(finite) > 100 * min(finite):
            ax.set_yscale("log")
    for ax in axes.flat[len(shown) :]:
        ax.remove()
    return figure, plotting.stack(drawn)


def _last(values: list[list[float]]) -> float | list[float]:
    return values[-1] if len(values[-1]) > 1 else values[-1][0]


def _add_config(report: Report, workdir: pathlib.Path, defaults: ConfigDict | None) -> None:
    report.heading("Config")
    try:
        config = saved_config(str(workdir))
        environment = saved_environment(str(workdir))
    except ConfigError as error:
        report.text(str(error))
        return
    if defaults is not None:
        changes = config_lib.diff(defaults, config)
        report.text(
            "Changed from the defaults:" if changes else "Nothing is changed from the defaults.", *changes
        )
    report.table(("Key", "Value"), [[key, repr(value)] for key, value in config_lib.leaves(config)])
    add_environment(report, environment)


def add_environment(report: Report, environment: Mapping[str, Any]) -> None:
    """A table of `workdir.environment`: git revision, versions, devices, command line."""
    single = {key: value for key, value in environment.items() if key != "versions"}
    report.heading("Environment")
    report.table(("What", "Value"), [*single.items(), *environment.get("versions", {}).items()])
