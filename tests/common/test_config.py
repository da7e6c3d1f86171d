"""Configs: overrides, files, round trips and the one-line errors of each."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from common import config as config_lib
from common.config import ConfigError, from_dataclass, from_json, override, parse_value, to_json, view
from common.defaults import base_config


def make() -> ConfigDict:
    c = base_config("toy")
    c.model = ConfigDict({"bpnn": ConfigDict({"layernorm": True}), "width": 8})
    c.data = ConfigDict({"name": "digits", "sizes": (1, 2), "tags": ["a"], "limit": None})
    return c.lock()


def refusal(function, *args, **kwargs) -> str:
    """The message of the ConfigError; one line of it is all a user sees."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "bad", "hint"),
    [
        ("model.layernorm", "config.model.layernorm", "model.bpnn.layernorm"),  # one level too high
        ("layernorm", "config.layernorm", "model.bpnn.layernorm"),
        ("model.lr", "config.model.lr", "optim.lr"),  # another section's
        ("model.typo_key", "typo_key", "bpnn, width"),
        ("optim.warmup_step", "warmup_step'", "warmup_steps"),
        ("optim.learning_rte", "config.optim.learning_rte", "did you mean 'lr'?"),
        ("optm.lr", "config.optm:", "optim.lr"),  # the misspelt parent, not its child
        ("optm.name", "config.optm:", "'optim.name'"),  # not data.name
        ("dat.name", "config.dat:", "'data.name'"),
        ("optm.nonsense", "config.optm:", "'optim'"),
        ("", "config.:", "known"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_real_one(key, bad, hint):
    message = refusal(override, make(), {key: "1"})
    assert bad in message
    assert hint in message


def test_a_value_is_no_section_and_a_section_no_value():
    assert "config.model.width is a value" in refusal(override, make(), {"model.width.x": "1"})
    assert "bpnn, width" in refusal(override, make(), {"model": "1"})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("run.steps", "20", 20),
        ("run.steps", "1e3", 1000),
        ("run.steps", " 1_000 ", 1000),
        ("parallel.data", "-1", -1),
        ("optim.lr", "1e-3", 1e-3),
        ("optim.lr", "-2.5E+1", -25.0),
        ("optim.lr", " 3 ", 3.0),
        ("optim.lr", "inf", float("inf")),
        ("run.debug", "true", True),
        ("run.debug", "False", False),
        ("run.debug", " True ", True),
        ("optim.name", "sgd", "sgd"),
        ("optim.name", "1", "1"),
        ("optim.decay_pattern", "", ""),
        ("run.trackers", "('wandb',)", ("wandb",)),
        ("run.trackers", "['wandb']", ("wandb",)),
        ("run.trackers", "()", ()),
        ("data.sizes", "()", ()),
        ("data.sizes", "(3, 4.0, 5)", (3, 4, 5)),
        ("data.tags", "()", []),
        ("data.limit", "none", None),
        ("data.limit", "3", 3),
        ("data.limit", "true", True),
        ("data.limit", "some text", "some text"),
    ],
)
def test_override_parses_to_the_type_of_the_present_value(key, text, value):
    c = make()
    override(c, {key: text})
    new = dict(config_lib.leaves(c))[key]
    assert new == value
    assert type(new) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("run.steps", "1.5", "an integer"),
        ("run.steps", "ten", "an integer"),
        ("run.steps", "true", "an integer"),
        ("run.steps", "", "an integer"),
        ("run.steps", "inf", "an integer"),
        ("run.steps", "none", "an integer"),
        ("run.steps", "[" * 5000, "an integer"),
        ("optim.lr", "fast", "a number"),
        ("optim.lr", "true", "a number"),
        ("run.debug", "1", "true or false"),
        ("run.debug", "yes", "true or false"),
        ("run.trackers", "wandb", "a tuple"),
        ("data.sizes", "(1, 2.5)", "an integer"),
        ("data.sizes", "(1, 'a')", "an integer"),
    ],
)
def test_wrong_type_is_refused_by_name(key, text, expected):
    c = make()
    message = refusal(override, c, {key: text})
    assert f"config.{key}" in message
    assert f"expected {expected}" in message
    assert config_lib.diff(make(), c) == []


def test_typed_overrides_are_checked_too():
    c = make()
    override(c, {"optim.lr": 1, "run.steps": 5.0, "data.tags": ("x", "y")})
    assert (c.optim.lr, c.run.steps, c.data.tags) == (1.0, 5, ["x", "y"])
    assert isinstance(c.optim.lr, float)
    assert isinstance(c.run.steps, int)
    assert "a text" in refusal(override, c, {"optim.name": 3})


def test_a_tuple_of_mixed_types_accepts_itself():
    assert parse_value("('a', 1)", ("b", 2), "field") == ("a", 1)


def test_integer_keys_can_be_overridden_and_survive_json():
    c = ConfigDict()
    c.batch_at = {0: 8, 100: 16}  # ml_collections makes it a section
    c.plain = ConfigDict({"x": {1: (2,)}}, convert_dict=False)
    override(c, {"batch_at.100": "32"})
    assert "did you mean '100'" in refusal(override, c, {"batch_at.10": "32"})
    back = from_json(to_json(c.lock()))
    assert dict(back.batch_at) == {0: 8, 100: 32}
    assert back.plain.x == {1: (2,)}
    assert back.to_dict() == c.to_dict()


def test_json_round_trip_keeps_types_and_special_values():
    values = {
        "empty_tuple": (),
        "empty_list": [],
        "nested": ((1, (2.0, "x")), [None, True]),
        "inf": float("inf"),
        "minus": float("-inf"),
        "float": 1.0,
        "int": 1,
        "none": None,
        "text": "ε→\n",
        "section": ConfigDict({"empty": ConfigDict()}),
    }
    c = ConfigDict(values)
    back = from_json(to_json(c))
    assert back.to_dict() == c.to_dict()
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in c.items()}
    assert to_json(back) == to_json(c)
    json.loads(to_json(c), parse_constant=pytest.fail)  # NaN and Infinity are not JSON


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_empty_tuple_and_list_set_by_command_line_freeze_and_return(order):
    c = ConfigDict({"a": (1,), "b": [1]})
    for key in order:
        override(c, {key: "()" if key == "a" else "[]"})
    back = from_json(to_json(c.lock()))
    assert (back.a, back.b) == ((), [])
    assert config_lib.diff(c, back) == []


def test_nan_equals_itself_and_number_types_differ():
    nan = ConfigDict({"x": float("nan")})
    back = from_json(to_json(nan))
    assert back.x != back.x
    assert config_lib.diff(nan, back) == []
    assert config_lib.fingerprint(nan) == config_lib.fingerprint(back)
    one, real = ConfigDict({"x": 1}), ConfigDict({"x": 1.0})
    assert config_lib.diff(one, real) == ["x: 1 → 1.0"]
    assert config_lib.fingerprint(one) != config_lib.fingerprint(real)


def test_what_json_cannot_hold_is_named():
    c = ConfigDict({"a": ConfigDict({"b": [1, object()]})})
    assert refusal(to_json, c).startswith("config.a.b[1]=")


def test_diff_lists_changed_added_and_removed_keys():
    old, new = ConfigDict({"a": 1, "b": 2, "s": {"t": 1}}), ConfigDict({"a": 1, "c": 3, "s": {"t": 2}})
    assert config_lib.diff(old, new) == ["b: 2 → (absent)", "c: (absent) → 3", "s.t: 1 → 2"]
    assert config_lib.diff(old, new, ignore=("b", "c", "s")) == []
    assert config_lib.diff(ConfigDict({"run_x": 1}), ConfigDict({"run_x": 2}), ignore=("run",)) != []


def test_fingerprint_changes_with_any_leaf_but_the_ignored():
    c, other = make(), make()
    override(other, {"optim.lr": 2e-3})
    assert config_lib.fingerprint(c) == config_lib.fingerprint(make())
    assert config_lib.fingerprint(c) != config_lib.fingerprint(other)
    assert config_lib.fingerprint(c, ignore=("optim",)) == config_lib.fingerprint(other, ignore=("optim",))


def test_fingerprint_is_the_same_in_another_process():
    code = (
        "from tests.common.test_config import make; from common.config import fingerprint;"
        "print(fingerprint(make()))"
    )
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, timeout=60,
        cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    assert out.stdout.strip() == config_lib.fingerprint(make())


@dataclasses.dataclass(frozen=True)
class Section:
    rate: float = 1.0
    names: tuple[str, ...] = ()
    count: int = 2


def test_view_and_from_dataclass_are_inverse():
    section = from_dataclass(Section(rate=2.0, names=("a",)))
    config = ConfigDict({"part": section})
    assert view(config, Section, "part") == Section(2.0, ("a",))
    assert view(from_json(to_json(config)), Section, "part") == Section(2.0, ("a",))


def test_view_refuses_unknown_missing_and_mistyped_keys():
    extra = from_dataclass(Section())
    extra.nams = ()

    def message(part):
        return refusal(view, ConfigDict({"part": part}), Section, "part")

    assert message(extra) == "part.nams=(): unknown key (did you mean 'names'?)"
    assert "part.count" in message({"rate": 1.0, "names": ()})
    assert message({"rate": "x", "names": (), "count": 1}) == "part.rate='x': expected a number"
    assert message(3) == "part=3: must be a section, that of Section"
    assert refusal(view, ConfigDict(), Section, "part").startswith("part='(absent)': must be a section")


FILE = """
from ml_collections import ConfigDict

def get_config(n=4, lr=0.1, name="x", sizes=(1,), *, fast=False):
    if n < 0:
        raise RuntimeError("first line\\nsecond line")
    return ConfigDict(dict(n=n, lr=lr, name=name, sizes=sizes, fast=fast))
"""


@pytest.fixture
def file(tmp_path) -> pathlib.Path:
    path = tmp_path / "figure.py"
    path.write_text(FILE)
    return path


def test_config_file_takes_arguments_with_the_types_of_its_defaults(file):
    assert config_lib.load(f"{file}").to_dict() == {
        "n": 4,
        "lr": 0.1,
        "name": "x",
        "sizes": (1,),
        "fast": False,
    }
    c = config_lib.load(f"{file}:n=1e2,lr=1,name=3,sizes=(1, 2),fast=true")
    assert c.to_dict() == {"n": 100, "lr": 1.0, "name": "3", "sizes": (1, 2), "fast": True}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("m=3", "unknown argument 'm'"),
        ("szes=(1,)", "did you mean 'sizes'"),
        ("fast", "write it as name=value"),
        ("n=3.5", "expected an integer"),
        ("n=", "expected an integer"),
        ("n=3,lr", "expected an integer"),
        ("fast=1", "expected true or false"),
        ("n=-1", "get_config() fails at line 6 (RuntimeError: first line second line)"),
    ],
)
def test_a_wrong_argument_of_a_config_file_is_named(file, arguments, expected):
    message = refusal(config_lib.load, f"{file}:{arguments}")
    assert str(file) in message
    assert expected in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x = 1\ndef get_config(:\n", "fails at line 2 (SyntaxError"),
        (
            "\nimport no_such_package\n",
            "fails at line 2 (ModuleNotFoundError: No module named 'no_such_package')",
        ),
        ("x = 1 / 0\n", "fails at line 1 (ZeroDivisionError"),
        ("from common.config import require\nrequire(False, 'field', 1, 'no')\n", "field=1: no"),
        ("x = 1\n", "no get_config()"),
        ("def get_config(): return {}\n", "must return a ConfigDict, not dict"),
        ("def get_config(n): return n\n", "argument 'n' is needed"),
    ],
)
def test_a_broken_config_file_gives_one_line(tmp_path, content, expected):
    path = tmp_path / "broken.py"
    path.write_text(content)
    assert expected in refusal(config_lib.load, str(path))


def test_a_missing_config_file_names_the_nearest(file):
    assert "no such file (did you mean 'figure.py'?)" in refusal(
        config_lib.load, str(file.parent / "figur.py")
    )
    assert "no such file" in refusal(config_lib.load, str(file.parent / "no/where.py"))
    (file.parent / "notes.txt").write_text("")
    assert "must be a Python file" in refusal(config_lib.load, str(file.parent / "notes.txt"))


def test_a_config_file_may_define_dataclasses(tmp_path):
    path = tmp_path / "with_dataclass.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom common.config import from_dataclass\n"
        "@dataclasses.dataclass\nclass A:\n    x: int = 3\n\ndef get_config(): return from_dataclass(A())\n"
    )
    assert config_lib.load(str(path)).x == 3


def test_a_saved_config_is_loaded_from_json(tmp_path):
    c = make()
    bare, run = tmp_path / "bare.json", tmp_path / "config.json"
    bare.write_text(to_json(c))
    run.write_text(f'{{"config": {to_json(c)}, "environment": {{}}}}')
    for path in (bare, run):
        assert config_lib.diff(c, config_lib.load(str(path))) == []
    assert "did you mean 'bare.json'" in refusal(config_lib.load, str(tmp_path / "bar.json"))
    bare.write_text('{"a": ')
    assert "not JSON" in refusal(config_lib.load, str(bare))
    bare.write_text("[1]")
    assert "one JSON object" in refusal(config_lib.load, str(bare))
