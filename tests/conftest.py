"""The conditions of every test: four host devices, strict dtype promotion, property tests that repeat exactly."""

from __future__ import annotations

import gc
import os

# Read by JAX when it is first imported, so set before anything imports it. Subprocesses inherit both.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs run once on little data, so LLVM need not optimise them: compiling takes a third of the time.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    )
).strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A first call compiles, so deadlines would measure XLA; derandomized, so that a red run is red again.
hypothesis.settings.register_profile("jaxmp", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("jaxmp")

# What tests share. `record_*.py` are run by hand, where a library to compare with is installed.
collect_ignore = ["tools"]


@pytest.fixture(autouse=True, scope="module")
def no_module_pays_for_those_before():
    """What JAX has cached by now is not looked through by every later collection, which took minutes of the suite."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def standard_promotion():
    """For a module of tests of what mixes dtypes by itself, as optax's Adam and Flax's norms do."""
    with jax.numpy_dtype_promotion("standard"):
        yield
