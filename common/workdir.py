"""A run's folder: what is in it, and what may change when a run is started there again."""

import fcntl
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from common import config as config_lib
from common.config import ConfigError
from common.mesh import from_lead, is_lead
from common.writer import read_events

# Length, cadence, logging and the devices may change between attempts; everything else would change what a
# run is.
SAFE_KEYS = (
    "run.steps",
    "run.log_every",
    "run.save_every",
    "run.trackers",
    "run.debug",
    "run.stall_timeout",
    "checkpoint",
    "parallel",
    "profile",
)
_TOKEN = ".processes"


@dataclass
class Workdir:
    """An opened run folder. `attempt` counts the times a run was started here, from 1."""

    path: epath.Path
    attempt: int
    _config: ConfigDict
    _lock: Any = field(default=None, repr=False)

    @property
    def checkpoints(self) -> epath.Path:
        return self.path / "checkpoints"

    def record_config(self) -> None:
        """Writes the config of this attempt, which has passed all checks, in place of an earlier one's."""
        if is_lead():
            _write_config(self.path / "config.json", self._config)

    def mark_done(self, step: int) -> None:
        """Writes DONE: the run reached its last step, or its data ended."""
        if is_lead():
            _write(self.path / "DONE", json.dumps({"step": step}) + "\n")

    def close(self) -> None:
        """Lets another process use the folder."""
        if self._lock is not None:
            self._lock.close()


def is_done(path: epath.PathLike) -> bool:
    """Whether the run in this folder is finished."""
    return (epath.Path(path) / "DONE").exists()


def _done_at(folder: epath.Path) -> int:
    """The step DONE was written at; −1 if it cannot be read, as after a power cut."""
    try:
        return int(json.loads((folder / "DONE").read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def open_workdir(path: str, config: ConfigDict) -> Workdir:
    """Creates or re-opens a run folder; a new one gets its `config.json`.

    Raises: ConfigError when another run is using the folder, when it was started with another config (the
    differences are listed; SAFE_KEYS may differ), when it cannot be written, or when the processes of one run
    do not all see the same folder.
    """
    folder = epath.Path(path)
    begun = has_begun(folder)
    if begun:
        check_same(folder, config)
    lock = None
    try:
        if is_lead():
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
            if not begun:
                _write_config(folder / "config.json", config)
            if is_done(folder) and _done_at(folder) < config.run.steps:  # a longer run was asked for
                (folder / "DONE").unlink()
        _check_shared(folder)
        attempt = 1 + max((event["attempt"] for event in read_events(folder)), default=0)
    except Exception as error:
        if lock is not None:
            lock.close()
        if isinstance(error, OSError):
            raise ConfigError(f"--workdir={path}: cannot be written ({error.strerror or error})") from None
        raise
    return Workdir(folder, attempt, config, lock)


def has_begun(path: epath.PathLike) -> bool:
    """Whether there is anything to lose: an attempt that was refused before its first step leaves nothing."""
    folder = epath.Path(path)
    rows = folder / "metrics.jsonl"
    written = rows.exists() and rows.stat().length > 0
    return (folder / "checkpoints").exists() or written or is_done(folder)


def check_same(folder: epath.PathLike, config: ConfigDict) -> None:
    """Raises ConfigError listing how `config` differs from the one this folder was started with."""
    differences = config_lib.diff(saved_config(folder), config, ignore=SAFE_KEYS)
    if differences:
        raise ConfigError(
            f"--workdir={folder}: holds a run with another config ({'; '.join(differences)}); "
            "use another workdir, or the old values"
        )


def saved_config(folder: epath.PathLike) -> ConfigDict:
    """The config a run folder was started with. Raises ConfigError when it holds none that can be read."""
    file = epath.Path(folder) / "config.json"
    try:
        return config_lib.from_json(json.dumps(json.loads(file.read_text())["config"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not a run's config ({type(error).__name__})") from None


def saved_environment(folder: epath.PathLike) -> dict[str, Any]:
    """What `environment` was when the run's last attempt began."""
    return json.loads((epath.Path(folder) / "config.json").read_text()).get("environment", {})


def _write_config(file: epath.Path, config: ConfigDict) -> None:
    content = {"config": json.loads(config_lib.to_json(config)), "environment": environment()}
    _write(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write(file: epath.Path, text: str) -> None:
    """Whole or not at all."""
    temporary = file.parent / f"{file.name}.tmp"
    temporary.write_text(text)
    temporary.replace(file)


def _check_shared(folder: epath.Path) -> None:
    """Raises ConfigError, in every process, if one of them does not see the lead's folder."""
    if jax.process_count() == 1:
        return
    token = from_lead(secrets.randbelow(2**31))
    if is_lead():
        _write(folder / _TOKEN, str(token))
    multihost_utils.sync_global_devices("the lead has written its token")
    found = _sees(folder / _TOKEN, str(token))
    everywhere = np.ravel(multihost_utils.process_allgather(np.array(found)))
    others = [str(process) for process, sees in enumerate(everywhere) if not sees]
    if others:
        raise ConfigError(
            f"--workdir={folder}: process {', '.join(others)} does not see the folder of process 0; "
            "all processes need one shared folder"
        )


def _sees(file: epath.Path, text: str) -> bool:
    """Whether `file` holds `text`; a network file system may take a moment to show it."""
    for _ in range(20):
        if file.exists() and file.read_text() == text:
            return True
        time.sleep(0.1)
    return False


def _lock(folder: epath.Path) -> Any:
    """Holds `.lock` until the process ends; local disks only (object stores have no locks)."""
    if "://" in str(folder):
        return None
    handle = open(os.fspath(folder / ".lock"), "a+")  # noqa: SIM115 - held open for the whole run
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        owner = handle.read().strip() or "another process"
        handle.close()
        raise ConfigError(
            f"--workdir={folder}: in use by {owner}; wait for it or use another workdir"
        ) from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()}")
    handle.flush()
    return handle


def environment() -> dict[str, Any]:
    """Git revision, versions, devices and command line: what else a result depends on."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "git": _git(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "device": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "command": sys.argv,
    }


def _git() -> str:
    """Revision of the source tree, '+' appended when it has uncommitted changes, '' outside a checkout."""
    command = ["git", "-C", os.path.dirname(__file__)]
    try:
        revision = subprocess.run(
            [*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        status = subprocess.run(
            [*command, "status", "--porcelain"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return revision.stdout.strip() + ("+" if status.stdout.strip() else "")
