"""The conditions of every test: four host devices, strict dtype promotion, property tests that repeat exactly."""

from __future__ import annotations

import gc
import os
from importlib import metadata

# Read by JAX when it is first imported, so set before anything imports it. Subprocesses inherit both.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs run once on little data: LLVM need not optimise them, nor take them in 32 parts, nor MLIR emit each fusion
# (later jaxlibs have no other emitter). So compiling takes a tenth of the time.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else "",
    )
).strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A first call compiles, so deadlines would measure XLA; derandomized, so that a red run is red again.
hypothesis.settings.register_profile("jaxmp", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("jaxmp")

# Tracing makes many objects that live: looking through them every 700 is in vain.
gc.set_threshold(20_000)

# What tests share. `record_*.py` are run by hand, where a library to compare with is installed.
collect_ignore = ["tools"]


# Tests of up to a minute each: begun last, one of them would run alone.
LONG = ("test_notebooks", "test_checkpoints_kill", "test_runs", "test_audit_clean", "test_image_classification")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.name.startswith(LONG))


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
