"""Environment settings that must be in place before JAX is imported; this file does not import it."""

import os
import pathlib

CORES = "TRIPTYCH_CORES"


def configure() -> None:
    """Sets a persistent compile cache and quiets the C++ start-up logs; what the user has set wins.

    TRIPTYCH_CORES="0,1" keeps the process on those cores: XLA sizes its thread pool by them. Exits with one
    line if it cannot.
    """
    if cores := os.environ.get(CORES):
        try:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (ValueError, OSError):
            raise SystemExit(
                f"error: {CORES}={cores!r}: must be numbers of this machine's cores, as 0,1"
            ) from None
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "triptych" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
