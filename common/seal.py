"""The seal of a checkpoint: a list of its files with their digests, written last.

A folder without a seal was not finished, one that does not match its seal was damaged since; neither is used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from etils import epath

from common.config import ConfigError

_NAME = "seal.json"


class CorruptCheckpoint(ConfigError):
    """A checkpoint that is incomplete, truncated or unreadable."""


@dataclass(frozen=True)
class Seal:
    """SHA-256 digests by file name, and the eval metrics of the state."""

    files: dict[str, str]
    metrics: dict[str, float]


def is_sealed(folder: epath.Path) -> bool:
    """Whether the writing of `folder` was finished."""
    return (folder / _NAME).exists()


def write(folder: epath.Path, metrics: Mapping[str, float]) -> None:
    """Seals what is in `folder` now; replaces a seal it has."""
    digests = {name: _digest(path) for name, path in _files(folder, "").items() if name != _NAME}
    temporary = folder / f"{_NAME}.tmp"
    values = {name: str(float(value)) for name, value in metrics.items()}  # strict JSON has no NaN
    temporary.write_text(json.dumps({"files": digests, "metrics": values}))
    temporary.replace(folder / _NAME)


def read(folder: epath.Path) -> Seal:
    """Raises CorruptCheckpoint when there is none or it cannot be read."""
    try:
        content = json.loads((folder / _NAME).read_text())
        metrics = {name: float(value) for name, value in content["metrics"].items()}
        return Seal(dict(content["files"]), metrics)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{folder / _NAME} is unreadable ({first_line(error)})") from error


def remove(folder: epath.Path) -> None:
    """Makes `folder` an unfinished one."""
    (folder / _NAME).unlink()


def verify(folder: epath.Path) -> None:
    """Raises CorruptCheckpoint unless every file is there and holds what was written."""
    for name, digest in read(folder).files.items():
        path = folder / name
        if not path.exists():
            raise CorruptCheckpoint(f"{path} is missing")
        if _digest(path) != digest:
            raise CorruptCheckpoint(f"{path} is not what was written ({path.stat().length} bytes)")


def _digest(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _files(folder: epath.Path, prefix: str) -> dict[str, epath.Path]:
    found = {}
    for path in sorted(folder.iterdir()):
        name = f"{prefix}{path.name}"
        found |= _files(path, f"{name}/") if path.is_dir() else {name: path}
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
