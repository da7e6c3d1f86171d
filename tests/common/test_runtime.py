"""Settings that must precede JAX: tried in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OURS = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "TF_CPP_MIN_LOG_LEVEL")


def configured(code: str, **env: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if key not in OURS and key != "TRIPTYCH_CORES"}
    code = f"import os, sys; from common import runtime; runtime.configure(); {code}"
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_it_does_not_import_jax_and_sets_a_cache(tmp_path):
    code = "assert 'jax' not in sys.modules; print(os.environ['JAX_COMPILATION_CACHE_DIR'])"
    result = configured(code, XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "triptych" / "jax")
    assert not list(tmp_path.iterdir())  # nothing is written before something is compiled


def test_what_the_user_has_set_wins():
    code = f"print([os.environ[name] for name in {OURS}])"
    assert configured(code, **dict.fromkeys(OURS, "7")).stdout.strip() == "['7', '7', '7']"


def test_cores_can_be_chosen():
    core = min(os.sched_getaffinity(0))
    assert (
        configured("print(os.sched_getaffinity(0))", TRIPTYCH_CORES=str(core)).stdout.strip() == f"{{{core}}}"
    )


@pytest.mark.parametrize("cores", ["a", "0,", "99999", "-1"])
def test_impossible_cores_end_with_one_line(cores):
    result = configured("print('went on')", TRIPTYCH_CORES=cores)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: TRIPTYCH_CORES={cores!r}")
    assert result.stderr.count("\n") == 1
