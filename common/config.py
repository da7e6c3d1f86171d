"""Configs: load a file, apply overrides, lock, compare, save.

A config is an `ml_collections.ConfigDict`. Whatever is wrong with one is a `ConfigError` of a single line
that names the field, the value and what is allowed, and is raised before any compute is spent.
"""

import ast
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import pathlib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict

T = TypeVar("T")


class ConfigError(ValueError):
    """A config field, file or environment that cannot be used: one line for the user, no traceback."""


def require(ok: bool, field: str, value: Any, allowed: str) -> None:
    """Raises `ConfigError` naming `field`, `value` and what is `allowed`, unless `ok`."""
    if not ok:
        raise ConfigError(f"{field}={value!r}: {allowed}")


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """The hint ' (did you mean x?)' for the known name closest to `name`, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})" if known else ""


def load_module(path: str) -> types.ModuleType:
    """Imports the Python file at `path`; a missing file or one that fails to import is a `ConfigError`."""
    file = pathlib.Path(path)
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(f"--config={path}: no such file{nearest(file.name, siblings)}")
    spec = importlib.util.spec_from_file_location(f"_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(spec: str) -> ConfigDict:
    """The config that `path.py` or `path.py:arg=value,…` builds by its `get_config(**args)`, or one saved as
    `path.json`."""
    if spec.endswith(".json"):
        return _load_saved(pathlib.Path(spec))
    path, _, arg = spec.partition(":")
    module = load_module(path)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config={path}: the file has no get_config()")
    return module.get_config(**parse_arguments(arg, module.get_config, path))


def _load_saved(file: pathlib.Path) -> ConfigDict:
    """What `to_json` or a run folder's config.json holds."""
    require(file.is_file(), "--config", str(file), "no such file")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--config={file}: not JSON ({error})") from None
    return from_json(json.dumps(content.get("config", content) if isinstance(content, dict) else content))


def parse_arguments(arg: str, function: typing.Callable[..., Any], path: str) -> dict[str, Any]:
    """Parses 'n=128,width=64' into keyword arguments of `function`, with the types of its defaults."""
    defaults = dict(
        zip(
            reversed(function.__code__.co_varnames[: function.__code__.co_argcount]),
            reversed(function.__defaults__ or ()),
            strict=False,
        )
    )
    parsed = {}
    for item in filter(None, arg.split(",")):
        name, equals, text = item.partition("=")
        if name not in defaults:
            raise ConfigError(f"--config={path}:{item}: unknown argument {name!r}{nearest(name, defaults)}")
        require(bool(equals), f"--config={path}:{name}", item, "write it as name=value")
        parsed[name] = parse_value(text, defaults[name], f"--config={path}:{name}")
    return parsed


def parse_value(text: str, like: Any, field: str) -> Any:
    """Parses command-line `text` to the type of `like` (None, a placeholder, takes any Python literal)."""
    if isinstance(like, str):
        return text
    try:
        value = {"true": True, "false": False}.get(text.lower()) if isinstance(like, bool) else None
        value = ast.literal_eval(text) if value is None else value
    except (ValueError, SyntaxError):
        if like is None:
            return text
        raise ConfigError(f"{field}={text!r}: expected {_type_name(like)}") from None
    return coerce(value, like, field)


def coerce(value: Any, like: Any, field: str) -> Any:
    """`value` with the type of `like`: int → float and list ↔ tuple are allowed, nothing lossy is."""
    kind = type(like)
    if like is None or (value is None and like is None):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind in (tuple, list) and isinstance(value, tuple | list):
        if like and value:
            value = [coerce(item, like[0], f"{field}[{i}]") for i, item in enumerate(value)]
        return kind(value)
    if type(value) is kind:
        return value
    raise ConfigError(f"{field}={value!r}: expected {_type_name(like)}")


def _type_name(like: Any) -> str:
    return {bool: "true or false", int: "an integer", float: "a number"}.get(type(like), type(like).__name__)


def override(config: ConfigDict, overrides: Mapping[str, Any], prefix: str = "config") -> None:
    """Sets dotted keys in place; strings are parsed to the type of the present value.

    Raises: ConfigError for an unknown key (with the nearest real one) or a wrong type.
    """
    for key, value in overrides.items():
        node, parts = config, key.split(".")
        for depth, part in enumerate(parts):
            here = ".".join([prefix, *parts[: depth + 1]])
            if not isinstance(node, ConfigDict):
                raise ConfigError(f"--{here}: {'.'.join([prefix, *parts[:depth]])} is a value, not a section")
            if part not in node:
                raise ConfigError(f"--{here}: unknown key {part!r}{_nearest_path(config, key, part, node)}")
            if depth < len(parts) - 1:
                node = node[part]
        current = node[parts[-1]]
        field = f"--{prefix}.{key}"
        if isinstance(current, ConfigDict):
            raise ConfigError(
                f"{field}={value!r}: a section cannot be replaced; set one of {sorted(current)}"
            )
        parse = isinstance(value, str) and not isinstance(current, str)
        new = parse_value(value, current, field) if parse else coerce(value, current, field)
        with node.ignore_type():
            node[parts[-1]] = new


def _nearest_path(config: ConfigDict, key: str, part: str, node: ConfigDict) -> str:
    """Prefers a real key of the same leaf name elsewhere (wrong level), then the closest sibling."""
    leaf = key.split(".")[-1]
    elsewhere = [path for path, _ in leaves(config) if path.split(".")[-1] == leaf]
    return f" (did you mean {elsewhere[0]!r}?)" if elsewhere else nearest(part, node)


def leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every leaf, in sorted order."""
    for key in sorted(config, key=str):
        value, path = config[key], f"{prefix}{key}"
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def diff(old: ConfigDict, new: ConfigDict, ignore: tuple[str, ...] = ()) -> list[str]:
    """One line 'key: old → new' for each leaf that differs; `ignore` holds dotted prefixes not compared."""
    a, b = dict(leaves(old)), dict(leaves(new))
    missing = object()
    return [
        f"{key}: {'(absent)' if a.get(key, missing) is missing else repr(a[key])} → "
        f"{'(absent)' if b.get(key, missing) is missing else repr(b[key])}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key, missing) != b.get(key, missing) and not _has_prefix(key, ignore)
    ]


def _has_prefix(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def fingerprint(config: ConfigDict, ignore: tuple[str, ...] = ()) -> str:
    """Twelve hex digits that change when any leaf outside `ignore` does; stable across processes."""
    kept = {key: _encode(value) for key, value in leaves(config) if not _has_prefix(key, ignore)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def to_json(config: ConfigDict) -> str:
    """JSON text that `from_json` turns back into an equal config: tuples and integer keys survive."""
    return json.dumps(_encode(config), indent=2, ensure_ascii=False)


def from_json(text: str) -> ConfigDict:
    """The config that `to_json` wrote."""
    decoded = _decode(json.loads(text))
    require(
        isinstance(decoded, ConfigDict), "config.json", type(decoded).__name__, "must hold one JSON object"
    )
    return decoded


def _encode(value: Any) -> Any:
    if isinstance(value, ConfigDict):
        return {str(key): _encode(value[key]) for key in value}
    if isinstance(value, dict):
        return {"__items__": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(item) for item in value]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return {"__float__": repr(float(value))}
    require(
        value is None or isinstance(value, bool | int | float | str),
        "config",
        value,
        "cannot be saved as JSON",
    )
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__items__" in value:
        return {_decode(k): _decode(v) for k, v in value["__items__"]}
    if "__tuple__" in value:
        return tuple(_decode(item) for item in value["__tuple__"])
    if "__float__" in value:
        return float(value["__float__"])
    # convert_dict=False: a plain dict leaf (it may have integer keys) must come back as a plain dict.
    return ConfigDict({key: _decode(item) for key, item in value.items()}, convert_dict=False)


def from_dataclass(instance: Any) -> ConfigDict:
    """A config section with one key for each field of a frozen dataclass: defaults are written down once."""
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return ConfigDict(values, convert_dict=False)


def view(section: ConfigDict, cls: type[T], field: str) -> T:
    """A config section as the frozen dataclass `cls`: no unknown key, no missing key, types as its defaults.

    Args: `field` is the section's dotted name, for messages.
    """
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in section:
        require(key in known, f"{field}.{key}", section[key], f"unknown key{nearest(key, known)}")
    values = {}
    for name, spec in known.items():
        require(name in section, f"{field}.{name}", "(absent)", "the section lacks this key")
        default = None if spec.default is dataclasses.MISSING else spec.default
        values[name] = coerce(section[name], default, f"{field}.{name}")
    return cls(**values)
