"""Set the conditions of every test: four CPU devices, strict dtype promotion, the same random examples."""

from __future__ import annotations

import collections
import gc
import os
import shutil
import threading
from importlib import metadata
from pathlib import Path

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
        # Devices wait for each other in a collective: after 40 s, of a machine that stalls say, XLA ends the process.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else "",
    )
).strip()

# What was compiled once is read by the other workers, by the processes that tests start, and by every later run.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".cache" / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"

# Each operation is lowered with the place in a file that wrote it, and without the nine calls around that.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"

import hypothesis
import jax
import pytest
from hypothesis.internal.conjecture import providers
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A first call compiles, so deadlines would measure XLA, and a busy machine draws slowly; derandomized, so that a red
# run is red again.
hypothesis.settings.register_profile(
    "jaxmp", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("jaxmp")
# It would draw numbers of the code of ours that is imported by then, too: others after other tests, or another change.
assert callable(providers._get_local_constants)
providers._get_local_constants = providers.Constants

# A context of MLIR takes half of the time to lower a small program: ten programs share one, as in later JAX.
_contexts = threading.local()


def _shared_context(make=mlir.make_ir_context):
    if getattr(_contexts, "programs", 10) == 10:
        _contexts.context, _contexts.programs = make(), 0
    _contexts.programs += 1
    return _contexts.context


if jax.__version__.startswith("0.10."):
    mlir.make_ir_context = _shared_context

# Tracing makes many objects that live: looking through them every 700 is in vain.
gc.set_threshold(20_000)

# What tests share. `record_*.py` are run by hand, where a library to compare with is installed.
collect_ignore = ["tools"]


def pytest_configure(config: pytest.Config) -> None:
    """Remove compiled programs of earlier runs above a gigabyte; a whole run leaves a tenth of that."""
    compiled, is_worker = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), hasattr(config, "workerinput")
    if not is_worker and sum(path.stat().st_size for path in compiled.glob("*-cache")) > 1e9:
        shutil.rmtree(compiled, ignore_errors=True)


# Tests of up to a minute each: begun last, one of them would run alone, and two workers would run what a module shares.
LONG = (
    "test_several_processes", "test_notebooks", "test_inspect_pictures", "test_checkpoints_kill", "test_runs",
    "test_language_modeling", "test_eight_gpus", "test_audit_clean", "test_image_classification", "test_processes",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cases N``, for the newest Python: run only the first N cases of each test.

    The default Python runs all cases. Tests with the mark ``absent_gpu`` keep all cases, because they run nowhere else.
    """
    parser.addoption("--cases", type=int, default=None, help="run at most so many cases of each parametrised test")


@pytest.hookimpl(trylast=True)  # after marks are looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, and leave out cases beyond ``--cases``.

    Tests that compile for an absent GPU are skipped if their compiler is missing.
    """
    from jaxmp.inspect.program import targets

    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    if reason := targets.missing():
        for item in items:
            if item.get_closest_marker("absent_gpu"):
                item.add_marker(pytest.mark.skip(reason))
    most = config.getoption("--cases")
    if most is None:
        return
    counts: collections.Counter[str] = collections.Counter()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        counts[test] += 1
        is_kept = counts[test] <= most or item.get_closest_marker("absent_gpu")
        (kept if is_kept else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(autouse=True, scope="module")
def no_module_pays_for_those_before():
    """Freeze the objects that JAX has cached by now: to look through them again and again took minutes of the suite."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def standard_promotion():
    """Allow JAX's standard dtype promotion in a module, because optax's Adam and Flax's norms need it."""
    with jax.numpy_dtype_promotion("standard"):
        yield
