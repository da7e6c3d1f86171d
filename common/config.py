"""Configs: load a file, apply overrides, lock, compare, save.

A config is an `ml_collections.ConfigDict`. Whatever is wrong with one is a `ConfigError` of a single line
that names the field, the value and what is allowed, and is raised before any compute is spent.
"""

import ast
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import json
import math
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict

T = TypeVar("T")


class ConfigError(ValueError):
    """A config field, file or environment that cannot be used: one line for the user, no traceback."""


def require(ok: bool, field: str, value: Any, allowed: str) -> None:
    """Raises `ConfigError` naming `field`, `value` and what is `allowed`, unless `ok`."""
    if not ok:
        raise ConfigError(f"{field}={value!r}: {allowed}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint ' (did you mean x?)' for the known name closest to `name`, or the list of known names."""
    known = sorted(known)
    initials = "".join(word[:1] for word in name.split("_"))  # learning_rate is lr
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or [k for k in known if k == initials]
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})" if known else ""


def load_module(path: str) -> types.ModuleType:
    """Imports the Python file at `path`; a missing file or one that fails to import is a `ConfigError`."""
    file = _existing(path)
    spec = importlib.util.spec_from_file_location(f"_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path}: must be a Python file (.py) or a saved config (.json)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    _run(path, "the file", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def load(spec: str) -> ConfigDict:
    """The config of `file.py`, `file.py:name=value,…` (arguments of get_config) or of a saved `file.json`."""
    if spec.endswith(".json"):
        return _load_saved(spec)
    path, _, text = spec.partition(":")
    module = load_module(path)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"--config={path}: the file has no get_config()")
    arguments = parse_arguments(text, module.get_config, path)
    config = _run(path, "get_config()", lambda: module.get_config(**arguments))
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"--config={path}: get_config() must return a ConfigDict, not {type(config).__name__}"
        )
    return config


def _existing(path: str) -> pathlib.Path:
    file = pathlib.Path(path)
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob(f"*{file.suffix}")] if file.parent.is_dir() else []
        raise ConfigError(f"--config={path}: no such file{nearest(file.name, siblings)}")
    return file


def _run(path: str, what: str, function: Callable[[], Any]) -> Any:
    """Calls into the user's file; what it raises becomes one line that says where."""
    try:
        return function()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        name = str(pathlib.Path(path))
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(name)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f" at line {line}" if line else ""
        text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
        raise ConfigError(f"--config={path}: {what} fails{where} ({type(error).__name__}: {text})") from error


def _load_saved(path: str) -> ConfigDict:
    """What `to_json` or a run folder's config.json holds."""
    try:
        content = json.loads(_existing(path).read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--config={path}: not JSON ({error})") from None
    try:
        return from_json(json.dumps(content.get("config", content) if isinstance(content, dict) else content))
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"--config={path}: not a saved config ({error})") from None


def parse_arguments(text: str, function: Callable[..., Any], path: str) -> dict[str, Any]:
    """Parses 'n=128,sizes=(1, 2)' into keyword arguments of `function`, with the types of its defaults."""
    parameters = inspect.signature(function).parameters
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}
    parsed = {}
    for item in re.split(r",(?=\s*\w+\s*=)", text) if text else []:
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in defaults:
            raise ConfigError(f"--config={path}:{item}: unknown argument {name!r}{nearest(name, defaults)}")
        require(bool(equals), f"--config={path}:{name}", item, "write it as name=value")
        parsed[name] = parse_value(value, defaults[name], f"--config={path}:{name}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in parsed:
            raise ConfigError(f"--config={path}: argument {name!r} is needed: --config={path}:{name}=…")
    return parsed


_WORDS = {"true": True, "false": False, "none": None}


def parse_value(text: str, like: Any, field: str) -> Any:
    """Parses command-line `text` to the type of `like`; None takes any Python literal, and else the text."""
    if isinstance(like, str):
        return text
    try:
        if isinstance(like, float):
            return float(text)
        word = text.strip().lower()
        value = _WORDS[word] if word in _WORDS else ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if like is None:
            return text
        raise ConfigError(f"{field}={text!r}: expected {_type_name(like)}") from None
    return coerce(value, like, field)


def coerce(value: Any, like: Any, field: str) -> Any:
    """`value` with the type of `like`: int → float and list ↔ tuple are allowed, nothing lossy is."""
    kind = type(like)
    if like is None:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind in (tuple, list) and isinstance(value, tuple | list):
        if len({type(item) for item in like}) == 1:
            value = [coerce(item, like[0], f"{field}[{i}]") for i, item in enumerate(value)]
        return kind(value)
    if type(value) is kind:
        return value
    raise ConfigError(f"{field}={value!r}: expected {_type_name(like)}")


def _type_name(like: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    names |= {
        tuple: "a tuple, as (1, 2) or ('a',)",
        list: "a list, as [1, 2] or ['a']",
        dict: "a mapping, as {1: 2}",
    }
    return names.get(type(like), type(like).__name__)


def override(config: ConfigDict, overrides: Mapping[str, Any], prefix: str = "config") -> None:
    """Sets dotted keys in place; strings are parsed to the type of the present value.

    Raises: ConfigError for an unknown key (with the nearest real one) or a wrong type.
    """
    for key, value in overrides.items():
        *parents, leaf = key.split(".")
        node, path = config, prefix
        for part in parents:
            path, node = f"{path}.{part}", node[_real_key(config, key, part, node, f"{path}.{part}")]
            if not isinstance(node, ConfigDict):
                raise ConfigError(f"--{prefix}.{key}: {path} is a value, not a section")
        field = f"--{prefix}.{key}"
        real = _real_key(config, key, leaf, node, f"{path}.{leaf}")
        current = node[real]
        if isinstance(current, ConfigDict):
            keys = ", ".join(sorted(map(str, current)))
            raise ConfigError(f"{field}={value!r}: a section cannot be replaced; set one of its keys {keys}")
        parse = isinstance(value, str) and not isinstance(current, str)
        new = parse_value(value, current, field) if parse else coerce(value, current, field)
        with node.ignore_type():
            node[real] = new


def _real_key(config: ConfigDict, key: str, part: str, node: ConfigDict, path: str) -> Any:
    """The key of `node` that is written `part` on the command line (it may be an integer).

    Raises: ConfigError with the closest key that has the same leaf name (wrong level or section), or else the
    closest sibling.
    """
    keys = {str(real): real for real in node}
    if part in keys:
        return keys[part]
    leaf = key.split(".")[-1]
    same_leaf = [known for known, _ in leaves(config) if known.split(".")[-1] == leaf]
    close = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0)
    hint = f" (did you mean {close[0]!r}?)" if close else nearest(part, keys)
    raise ConfigError(f"--{path}: unknown key {part!r}{hint}")


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
    return [
        f"{key}: {repr(a[key]) if key in a else '(absent)'} → {repr(b[key]) if key in b else '(absent)'}"
        for key in sorted(a.keys() | b.keys())
        if not _has_prefix(key, ignore)
        # Encoded, so that nan equals itself, and 1, 1.0 and True differ as they do in a fingerprint.
        and (key not in a or key not in b or _canonical(a[key], key) != _canonical(b[key], key))
    ]


def _canonical(value: Any, field: str) -> str:
    return json.dumps(_encode(value, field), sort_keys=True)


def _has_prefix(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def fingerprint(config: ConfigDict, ignore: tuple[str, ...] = ()) -> str:
    """Twelve hex digits that change when any leaf outside `ignore` does; stable across processes."""
    kept = {key: _canonical(value, key) for key, value in leaves(config) if not _has_prefix(key, ignore)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def to_json(config: ConfigDict) -> str:
    """JSON text that `from_json` turns back into an equal config: tuples, integer keys, nan and inf survive.

    Raises: ConfigError naming the field of a value that is no number, text, tuple, list, mapping or None.
    """
    return json.dumps(_encode(config, "config"), indent=2, ensure_ascii=False)


def from_json(text: str) -> ConfigDict:
    """The config that `to_json` wrote. Raises ValueError for text that is not JSON."""
    decoded = _decode(json.loads(text))
    require(
        isinstance(decoded, ConfigDict), "config.json", type(decoded).__name__, "must hold one JSON object"
    )
    return decoded


def _encode(value: Any, field: str) -> Any:
    if isinstance(value, ConfigDict | dict):
        items = [(key, _encode(value[key], f"{field}.{key}")) for key in value]
        if isinstance(value, ConfigDict) and all(isinstance(key, str) for key in value):
            return dict(items)
        tag = "__section__" if isinstance(value, ConfigDict) else "__items__"
        return {tag: [[_encode(key, field), item] for key, item in items]}
    if isinstance(value, tuple | list):
        encoded = [_encode(item, f"{field}[{i}]") for i, item in enumerate(value)]
        return {"__tuple__": encoded} if isinstance(value, tuple) else encoded
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": repr(float(value))}
    require(
        value is None or isinstance(value, bool | int | float | str), field, value, "cannot be saved as JSON"
    )
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__items__" in value:
        return {_decode(key): _decode(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(_decode(item) for item in value["__tuple__"])
    if "__float__" in value:
        return float(value["__float__"])
    items = value.get("__section__", value.items())
    # convert_dict=False: a plain dict leaf must come back as a plain dict.
    return ConfigDict({_decode(key): _decode(item) for key, item in items}, convert_dict=False)


def from_dataclass(instance: Any) -> ConfigDict:
    """A config section with one key for each field of a frozen dataclass: defaults are written down once."""
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return ConfigDict(values, convert_dict=False)


def view(config: ConfigDict, cls: type[T], name: str) -> T:
    """Section `name` of a config as the frozen dataclass `cls`.

    Raises: ConfigError for a missing section, an unknown or missing key, a type that is not its default's.
    """
    section: Any = config.get(name, "(absent)")
    require(isinstance(section, ConfigDict), name, section, f"must be a section, that of {cls.__name__}")
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in section:
        require(key in known, f"{name}.{key}", section[key], f"unknown key{nearest(key, known)}")
    values = {}
    for key, spec in known.items():
        require(key in section, f"{name}.{key}", "(absent)", "the section lacks this key")
        default = None if spec.default is dataclasses.MISSING else spec.default
        values[key] = coerce(section[key], default, f"{name}.{key}")
    return cls(**values)
