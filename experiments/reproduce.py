"""Reproduces one figure: sweep → runs (those that are DONE are skipped) → figure, CSV, verdict, HTML report.

python -m experiments.reproduce diffusion_mem/fig2_memorization_window --scale=cpu [--seeds=5] [--jobs=2]
[--out=results] [--dry_run]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from common import runtime

runtime.configure()

from ml_collections import ConfigDict  # noqa: E402 - after the environment is set

from common import config as config_lib  # noqa: E402
from common.config import ConfigError, nearest, require  # noqa: E402
from common.report import Report, add_environment  # noqa: E402
from common.sweep import Variant  # noqa: E402
from common.verdict import Claim, Verdict, overall  # noqa: E402
from common.workdir import check_same, has_begun, saved_config, saved_environment  # noqa: E402
from experiments import jobs, plan  # noqa: E402
from experiments.runs import Run, load_run  # noqa: E402

_ROOT = Path(__file__).parent


def load_figure(name: str) -> ModuleType:
    """The module of `<paper>/<figure>`. Raises ConfigError with the nearest name there is."""
    known = [
        f"{file.parent.name}/{file.stem}" for file in _ROOT.glob("*/*.py") if file.stem[:3] in ("fig", "tab")
    ]
    require(name in known, "figure", name, f"no such figure{nearest(name, known)}")
    return config_lib.load_module(str(_ROOT / f"{name}.py"))


def configs(figure: ModuleType, scale: str, seeds: int | None) -> list[tuple[Variant, ConfigDict]]:
    """Every variant of the figure's sweep at a scale, with its locked config."""
    require(scale in figure.SWEEP, "--scale", scale, f"this figure has {', '.join(figure.SWEEP)}")
    require(seeds is None or seeds >= 1, "--seeds", seeds, "must be at least 1")
    built = []
    for variant in figure.SWEEP[scale]:
        config = figure.get_config(scale=scale)
        config_lib.override(config, variant.overrides)
        if seeds is not None:
            config.run.num_seeds = seeds
        built.append((variant, config.lock()))
    return built


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 report written, 1 a run failed (the report says which) or cannot be written, 2 wrong
    input."""
    try:
        options = _parser().parse_args(arguments)
        figure = load_figure(options.figure)
        variants = configs(figure, options.scale, options.seeds)
        if options.dry_run:
            plan.show([(variant.name, config) for variant, config in variants])
            return 0
        require(bool(options.out), "--out", options.out, "must be a folder")
        folder = Path(options.out) / options.figure / options.scale
        for variant, config in variants:
            _check_unfinished(folder / "runs" / variant.name, config)
        return _reproduce(figure, options, variants, folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the runs are saved, the same command goes on with them", file=sys.stderr)
        return 130


def _check_unfinished(folder: Path, config: ConfigDict) -> None:
    """Raises ConfigError where a run in `folder` is not a part of the one that is asked for."""
    if not has_begun(folder):
        return
    check_same(folder, config)
    steps = saved_config(folder).run.steps
    require(steps <= config.run.steps, "run.steps", config.run.steps, f"{folder} was run for {steps}")


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments as everything else that is wrong: in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"arguments: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m experiments.reproduce", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("figure", help="<paper>/<figure>, e.g. diffusion_mem/fig2_memorization_window")
    parser.add_argument("--scale", default="cpu", help="tiny, cpu, gpu or paper, as far as the figure has it")
    parser.add_argument("--seeds", type=int, help="seeds of each run (default: the figure's)")
    parser.add_argument(
        "--jobs", type=int, default=0, help="runs at a time (default: one a core, one with a GPU)"
    )
    parser.add_argument("--out", default="results", help="results go to <out>/<paper>/<figure>/<scale>")
    parser.add_argument("--dry_run", action="store_true", help="print the runs with their cost and stop")
    return parser


def _reproduce(
    figure: ModuleType, options: argparse.Namespace, variants: list[tuple[Variant, ConfigDict]], folder: Path
) -> int:
    started = time.time()
    names = {variant.name: config for variant, config in variants}
    failures = jobs.run_all(names, folder / "runs", options.jobs)
    done = [load_run(folder / "runs" / name, name) for name in names if name not in failures]
    claims = _claims(figure, options.scale, done, failures)
    _print(claims, failures)
    report = Report(figure.TITLE, f"scale {options.scale} · {len(done)} of {len(names)} runs")
    report.verdict(claims)
    if done:
        report.heading("Figures")
        for image, caption in figure.plot(done, folder / "figures"):
            report.figure(image, caption)
    _add_runs(report, names, done, failures)
    if done:
        add_environment(report, saved_environment(done[0].path))
    report.heading("How to read this").text(*(figure.CLAIM.__doc__ or "").strip().split("\n\n"))
    page = report.write(folder / "report.html")
    verdict, seconds = overall(claims).upper(), time.time() - started
    print(f"{verdict:>24}  over all claims, in {seconds:.0f} s; report: {page}")
    return 1 if failures else 0


def _claims(figure: ModuleType, scale: str, runs: Sequence[Run], failures: dict[str, str]) -> list[Claim]:
    """The figure's claims; at a scale that is too small to claim anything, or with runs missing, all are
    NOT_RUN."""
    if not runs:
        return []
    claims = figure.CLAIM(runs)
    if scale in figure.CLAIMED_SCALES and not failures:
        return claims
    return [
        Claim(c.statement, c.paper_value, c.measured, c.interval, c.seeds, Verdict.NOT_RUN) for c in claims
    ]


def _add_runs(
    report: Report, names: dict[str, ConfigDict], done: Sequence[Run], failures: dict[str, str]
) -> None:
    by_name = {run.name: run for run in done}
    rows = []
    for name, config in names.items():
        run = by_name.get(name)
        status = "done" if run is not None else f"failed: {failures[name]}"
        seconds = None if run is None else run.seconds
        rows.append([name, config.run.num_seeds, config.run.steps, seconds, status])
    report.heading("Runs").table(("Run", "Seeds", "Steps", "Seconds", "Status"), rows)


def _print(claims: Sequence[Claim], failures: dict[str, str]) -> None:
    for claim in claims:
        measured = f"{claim.measured:.3g}" if isinstance(claim.measured, float) else str(claim.measured)
        interval = f" [{claim.interval[0]:.3g}, {claim.interval[1]:.3g}]" if claim.interval else ""
        print(
            f"{claim.verdict.upper():>24}  {claim.statement}: measured {measured}{interval}, "
            f"paper {claim.paper_value}"
        )
    for name, reason in failures.items():
        print(f"{'FAILED':>24}  {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
