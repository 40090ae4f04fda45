"""Set up JAX for tests and for examples in docstrings: four CPU devices, and quick compilation.

The examples also get the names that they use, and run on the default Python only.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

# JAX reads these variables when it is first imported, so they are set before. Subprocesses inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# By default, XLA ends a process whose devices wait for 40 s in a collective. A busy machine may need longer.
flags = [
    "--xla_force_host_platform_device_count=4",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
]
# Each program runs once on little data. So LLVM does not optimise it, XLA does not split it into 32 parts, and jaxlib
# 0.10 does not use MLIR's emitters of fusions. Compilation then takes a tenth of the time. `make nightly` sets this
# variable to run the tests once with XLA's defaults, as users run their programs.
if not os.environ.get("JAXMP_TESTS_OPTIMISED"):
    flags += [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()

# Other workers, processes that tests start, and later runs read the programs that are compiled here.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent / ".cache" / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"

# A lowered operation records the line that wrote it, but not the nine calls around that line.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"


@pytest.fixture(autouse=True, scope="session")
def names_in_examples(doctest_namespace):
    """Add ``jaxmp``, ``jax`` and related libraries to the names of the examples."""
    import tempfile

    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jaxmp

    doctest_namespace.update(jaxmp=jaxmp, jax=jax, jnp=jnp, nn=nn, nnx=nnx, optax=optax, tempfile=tempfile)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run the examples on the default Python only: tests cover the same functions on the newest one."""
    if isinstance(item, pytest.DoctestItem):
        item.add_marker("once")
