"""Sweeps: lists of named override sets, built from products, zips and chains of axes.

A name tells its overrides apart to the last digit (1e-5 and 4e-5 are two folders), is safe as a folder name,
and does not depend on what else is in the sweep, so a finished run is found again after the sweep has grown.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.config import ConfigError

_MAX_NAME = 120
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")


@dataclass(frozen=True)
class Variant:
    """One run of a sweep: its name and the config values it sets, by dotted key."""

    name: str
    overrides: Mapping[str, Any]


Sweep = list[Variant]
Axes = Mapping[str, Sequence[Any]]


def fixed(overrides: Mapping[str, Any], name: str | None = None) -> Sweep:
    """One variant, called `name` or after its overrides; a factor for `product` that every variant shares."""
    if name is not None and (not name or _UNSAFE.search(name) or name.startswith(".")):
        raise ConfigError(f"sweep name {name!r}: must be letters, digits and ._+-, not starting with a dot")
    values = {key: _plain(value) for key, value in overrides.items()}
    return [Variant(name or _name(values), values)]


def product(*factors: Axes | Sweep) -> Sweep:
    """Every combination of the factors, mappings {dotted key: values} or sweeps; the last varies fastest."""
    sweeps = [_sweep(factor) for factor in factors]
    return _unique([_join(parts) for parts in itertools.product(*sweeps)])


def zipped(axes: Axes) -> Sweep:
    """The first values of all axes together, then the second ones, and so on; all must be equally many."""
    columns = {key: _values(key, values) for key, values in axes.items()}
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"sweep axes zipped with unequal lengths: {lengths}")
    return _unique(
        [fixed(dict(zip(columns, row, strict=True)))[0] for row in zip(*columns.values(), strict=True)]
    )


def chain(*sweeps: Sweep) -> Sweep:
    """One sweep after the other."""
    return _unique(list(itertools.chain(*sweeps)))


def _sweep(factor: Axes | Sweep) -> Sweep:
    if not isinstance(factor, Mapping):
        return factor
    axes = [[{key: value} for value in _values(key, values)] for key, values in factor.items()]
    return [fixed(dict(_merge(parts)))[0] for parts in itertools.product(*axes)]


def _values(key: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"sweep axis {key}={values!r}: must be a list of values")
    listed = list(values)
    if not listed:
        raise ConfigError(f"sweep axis {key}: has no values")
    return listed


def _join(parts: Sequence[Variant]) -> Variant:
    name = ",".join(part.name for part in parts if part.overrides or part.name != _name({}))
    return Variant(_shortened(name or _name({})), _merge([part.overrides for part in parts]))


def _merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ConfigError(f"sweep key {twice[0]}: set by two factors of one product")
        merged |= part
    return merged


def _unique(sweep: Sweep) -> Sweep:
    seen: dict[str, Variant] = {}
    for variant in sweep:
        # Compared without case: two folders must not become one on macOS.
        other = seen.setdefault(variant.name.lower(), variant)
        if other is not variant:
            sets = f"{dict(other.overrides)} and {dict(variant.overrides)}"
            raise ConfigError(f"sweep name {variant.name!r}: given to {sets}")
    return sweep


def _name(overrides: Mapping[str, Any]) -> str:
    return _shortened(",".join(f"{_text(key)}={_text(value)}" for key, value in overrides.items()) or "base")


def _text(value: Any) -> str:
    """Text that differs where values do; what a folder name cannot hold is replaced and marked by a hash."""
    if isinstance(value, list | tuple) and value:
        return "x".join(_text(item) for item in value)
    text = str(value) if isinstance(value, str) else repr(value)
    safe = _UNSAFE.sub("-", text)
    return safe if safe == text else f"{safe}~{_hash(text)}"


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 9]}~{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _plain(value: Any) -> Any:
    """numpy scalars as Python values, as a config holds them."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "shape", None) == () else value
