"""Trains one config: `python -m experiments.train --config=FILE.py:arg=value --config.section.key=value
--workdir=DIR`."""

import os
import sys
from collections.abc import Sequence

from common import runtime

runtime.configure()

import jax  # noqa: E402 - after the environment is set
from ml_collections import ConfigDict  # noqa: E402

from common import config as config_lib  # noqa: E402
from common.config import ConfigError  # noqa: E402
from common.loop import GuardStop, Outcome, fit  # noqa: E402
from common.mesh import ParallelConfig, initialize_distributed, is_lead, make_mesh  # noqa: E402
from common.report import run_report  # noqa: E402
from common.start import RunConfig  # noqa: E402
from common.watchdog import leave  # noqa: E402
from experiments.tasks import build  # noqa: E402

PRECISIONS = ("default", "high", "highest")
USAGE = (
    "usage: python -m experiments.train --config=FILE.py[:arg=value,…] [--config.key=value …] --workdir=DIR"
)


def parse(arguments: Sequence[str]) -> tuple[ConfigDict, str]:
    """(locked config, workdir) from command-line arguments. Raises ConfigError."""
    flags: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        config_lib.require(
            argument.startswith("--") and bool(equals), "argument", argument, f"not --name=value; {USAGE}"
        )
        known = name in ("config", "workdir") or name.startswith("config.")
        config_lib.require(known, "argument", argument, f"unknown; {USAGE}")
        flags[name] = value
    for name in ("config", "workdir"):
        config_lib.require(bool(flags.get(name)), f"--{name}", flags.get(name), f"is needed; {USAGE}")
    config = config_lib.load(flags.pop("config"))
    workdir = os.path.expanduser(flags.pop("workdir"))  # no shell does it behind an =
    config_lib.override(config, {name.removeprefix("config."): value for name, value in flags.items()})
    return config.lock(), workdir


def run(config: ConfigDict, workdir: str) -> Outcome:
    """Builds the task of `config` and trains it in `workdir`."""
    settings = config_lib.view(config, RunConfig, "run")
    precision = settings.matmul_precision
    config_lib.require(precision in PRECISIONS, "run.matmul_precision", precision, f"one of {PRECISIONS}")
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)
    if settings.debug:
        jax.config.update("jax_debug_nans", True)
    mesh = make_mesh(config_lib.view(config, ParallelConfig, "parallel"))
    outcome = fit(build(config, mesh), config, workdir, mesh)
    if is_lead() and outcome.reason != "preempted":  # a machine that is taken away gives seconds
        run_report(workdir)
    return outcome


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 finished or preempted with everything saved, 1 a write failed, 2 wrong input, 3 the
    guard's stop, 130 interrupted outside the loop."""
    if arguments in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    try:
        config, workdir = parse(arguments)
        initialize_distributed()
        run(config, workdir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except GuardStop as error:
        print(f"guard: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was saved is kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
