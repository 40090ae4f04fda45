"""Keep the programs that JAX and torch compile, and the kernels that they chose, in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables with which another process keeps its programs in ``folder``.

    XLA's search for kernels takes most of the time of a first compilation. Its results are in the folder too, so that
    a program with the same products needs no search on another machine of the same kind.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "xla_gpu_per_fusion_autotune_cache_dir",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


@contextlib.contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """Keep compiled programs in ``folder`` while the body of the context runs.

    Another process then need not compile again. If the environment names a folder for JAX's programs already, the
    context changes nothing.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        yield
        return
    named = variables(folder)
    os.environ |= {name: value for name, value in named.items() if not name.startswith("JAX_")}
    jax.config.update("jax_compilation_cache_dir", named["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # else JAX keeps the folder from its first compilation
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
