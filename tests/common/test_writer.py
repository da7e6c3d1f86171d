import io
import json
import math
import pathlib
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from common.config import ConfigError
from common.writer import Writer, encode, read_events, read_metrics, to_line


def _writer(folder, **options):
    return Writer(folder, **({"attempt": 1, "total": 100, "stream": io.StringIO()} | options))


def _log(folder, attempt, steps, kind="train"):
    with _writer(folder, attempt=attempt) as writer:
        for step in steps:
            writer.log(step, {"loss": attempt + step / 1000}, kind)


def _curve(folder, kind="train"):
    return [(row["step"], row["attempt"]) for row in read_metrics(folder, kind)]


def test_rows_and_events_come_back_as_written(tmp_path):
    with _writer(tmp_path / "run") as writer:
        writer.log(5, {"loss": 0.5, "per_seed": [1.0, 2.0], "hist": {"counts": [1, 2]}})
        writer.log(5, {"fid": 3.0}, kind="eval")
        writer.event(5, "alert", "spike <nan>", ratio=np.float32(2.5))
    train, evaluated = read_metrics(tmp_path / "run")
    assert train.pop("time") == pytest.approx(time.time(), abs=60)
    expected = {"step": 5, "attempt": 1, "kind": "train", "loss": 0.5, "per_seed": [1.0, 2.0]}
    assert train == expected | {"hist": {"counts": [1, 2]}}
    assert read_metrics(tmp_path / "run" / "metrics.jsonl", kind="eval") == [evaluated]
    event = read_events(tmp_path / "run")[0]
    assert (event["event"], event["message"], event["ratio"]) == ("alert", "spike <nan>", 2.5)
    assert (event["step"], event["attempt"]) == (5, 1)


def test_lines_are_strict_json_and_nonfinite_floats_survive(tmp_path):
    with _writer(tmp_path) as writer:
        writer.log(1, {"a": math.nan, "b": [math.inf, -math.inf, 1.0], "c": jnp.float32(np.nan)})
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert '"a": "nan"' in text
    row = read_metrics(tmp_path)[0]
    assert math.isnan(row["a"])
    assert math.isnan(row["c"])
    assert row["b"] == [math.inf, -math.inf, 1.0]


def test_encode_takes_arrays_and_scalars_of_numpy_and_jax():
    given = {
        "a": np.float32(0.5),
        "b": jnp.arange(2),
        "c": np.bool_(True),
        "d": jnp.bfloat16(2),
        "e": np.int64(3),
    }
    assert encode(given) == {"a": 0.5, "b": [0, 1], "c": True, "d": 2.0, "e": 3}
    assert encode({1: (None, True, pathlib.PurePosixPath("x/y"))}) == {"1": [None, True, "x/y"]}
    assert encode(np.float64("inf")) == "inf"
    with pytest.raises(TypeError, match="object"):
        encode({"x": object()})


def test_a_metric_may_not_take_a_field_of_the_row(tmp_path):
    with _writer(tmp_path) as writer:
        with pytest.raises(ValueError, match="step"):
            writer.log(1, {"step": 3.0})
        with pytest.raises(ValueError, match="time"):
            writer.event(1, "x", "y", time=3)
    assert read_metrics(tmp_path) == []


def test_crash_and_resume_give_one_clean_curve(tmp_path):
    """Crash after step 7, resume from step 5."""
    _log(tmp_path, 1, range(1, 8))
    _log(tmp_path, 2, range(6, 11))
    assert _curve(tmp_path) == [(s, 1) for s in range(1, 6)] + [(s, 2) for s in range(6, 11)]


def test_a_later_attempt_voids_what_lies_beyond_it_in_every_kind(tmp_path):
    _log(tmp_path, 1, [10, 20, 30, 40])
    _log(tmp_path, 1, [20, 40], "eval")
    _log(tmp_path, 2, [30])
    assert _curve(tmp_path) == [(10, 1), (20, 1), (30, 2)]
    assert _curve(tmp_path, "eval") == [(20, 1)]


def test_an_evaluation_done_again_at_the_resumed_step_keeps_the_update_before_it(tmp_path):
    _log(tmp_path, 1, [10, 20, 30])
    _log(tmp_path, 1, [20], "eval")
    _log(tmp_path, 2, [20], "eval")
    assert _curve(tmp_path) == [(10, 1), (20, 1)]
    assert _curve(tmp_path, "eval") == [(20, 2)]


def test_many_attempts_each_going_further_back(tmp_path):
    _log(tmp_path, 1, range(0, 50, 10))
    _log(tmp_path, 2, [30, 40, 50])
    _log(tmp_path, 3, [10])
    assert _curve(tmp_path) == [(0, 1), (10, 3)]
    _log(tmp_path, 4, [20, 30])
    assert _curve(tmp_path) == [(0, 1), (10, 3), (20, 4), (30, 4)]


def test_a_rollback_within_a_run_is_a_new_attempt(tmp_path):
    with _writer(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"loss": 1.0})
        writer.attempt += 1
        writer.log(2, {"loss": 2.0})
    assert _curve(tmp_path) == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "att', b'{"step": 3, "kind": "tr\xc3', b"{", b"null", b"\xff"]
)
def test_a_torn_last_line_is_tolerated_and_repaired(tmp_path, torn):
    _log(tmp_path, 1, [1, 2])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn)
    assert _curve(tmp_path) == [(1, 1), (2, 1)]
    _log(tmp_path, 2, [2, 3])
    assert _curve(tmp_path) == [(1, 1), (2, 2), (3, 2)]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    _log(tmp_path, 1, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    _log(tmp_path, 2, [3])
    assert _curve(tmp_path) == [(1, 1), (2, 1), (3, 2)]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    _log(tmp_path, 1, [1])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("garbage\n")
    _log(tmp_path, 1, [2])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not a row of a run"):
        read_metrics(tmp_path)


def test_missing_and_empty_files_hold_nothing(tmp_path):
    assert read_metrics(tmp_path / "absent") == read_events(tmp_path) == []
    with _writer(tmp_path):
        pass
    assert read_metrics(tmp_path) == []


def test_a_killed_process_loses_no_row(tmp_path):
    code = (
        "import sys, os, signal; from common.writer import Writer\n"
        "w = Writer(sys.argv[1], stream=open(os.devnull, 'w'))\n"
        "for i in range(100): w.log(i, {'x': float(i)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=120)
    assert done.returncode == -9
    assert [row["x"] for row in read_metrics(tmp_path)] == list(range(100))


def test_only_the_lead_writes(tmp_path):
    with _writer(tmp_path / "run", enabled=False) as writer:
        writer.log(1, {"loss": 1.0})
        writer.event(1, "x", "y")
        writer.progress(2)
        writer.flush()
        assert math.isnan(writer.steps_per_second)
    assert not (tmp_path / "run").exists()


def test_close_and_flush_may_be_repeated(tmp_path):
    writer = _writer(tmp_path)
    writer.log(1, {"loss": 1.0})
    writer.flush()
    writer.close()
    writer.close()
    writer.flush()
    writer.log(2, {"loss": 1.0})
    assert _curve(tmp_path) == [(1, 1)]


def test_one_line_a_row():
    assert to_line({"text": "a\nb\u2028"}).count("\n") == 1
