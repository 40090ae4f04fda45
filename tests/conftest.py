"""The conditions of every test: four host devices, strict dtype promotion, property tests that repeat exactly."""

from __future__ import annotations

import gc
import os
import shutil
import zlib
from collections import defaultdict
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

# Tracing makes many objects that live: looking through them every 700 is in vain.
gc.set_threshold(20_000)

# What tests share. `record_*.py` are run by hand, where a library to compare with is installed.
collect_ignore = ["tools"]


def pytest_configure(config: pytest.Config) -> None:
    """What was compiled is kept for later runs, up to a gigabyte; a whole run leaves a tenth of that."""
    compiled, is_worker = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), hasattr(config, "workerinput")
    if not is_worker and sum(path.stat().st_size for path in compiled.glob("*-cache")) > 1e9:
        shutil.rmtree(compiled, ignore_errors=True)


HALVES = [
    {name.format(half) for half in ("float16", "bfloat16")} for name in ("{}", "mixed_{}", "<class 'jax.numpy.{}'>")
]

# Tests of up to a minute each: begun last, one of them would run alone, and two workers would run what a module shares.
LONG = (
    "test_notebooks", "test_several_processes", "test_checkpoints_kill", "test_runs", "test_audit_clean",
    "test_image_classification", "test_processes",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a product of parameters the newest Python takes cases that have each value of each; all others are ``once``.

    The i-th value of the longest list goes with the i-th of each other one, which begins again at its end. Which of the
    two half formats it is decides nothing that another JAX could change: without a longer list it is one of them, the
    other one in another test.
    """
    items.sort(key=lambda item: not item.path.name.startswith(LONG))
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        numbers = [numbers_of(cases, names) for names in axes(cases[0])]
        formats = [{str(case.callspec.params[names[0]]) for case in cases} in HALVES for names in axes(cases[0])]
        longest = max(
            (each for each, is_format in zip(numbers, formats, strict=True) if not is_format), key=max, default=None
        )
        for position, case in enumerate(cases):
            number = longest[position] if longest else zlib.crc32(name.encode())
            if any(each[position] != number % (1 + max(each)) for each in numbers):
                case.add_marker("once")


def axes(item: pytest.Item) -> list[list[str]]:
    """The parameters of a test by the lists that they come from."""
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    found = [each.replace(" ", "").split(",") if isinstance(each, str) else list(each) for each in lists]
    return found + [[name] for name in item.callspec.params if not any(name in each for each in found)]


def numbers_of(cases: list[pytest.Item], names: list[str]) -> list[int]:
    """For each case the place of its parameters in the list that they come from."""
    seen = {}
    keys = [tuple(id(case.callspec.params[name]) for name in names) for case in cases]
    return [seen.setdefault(key, len(seen)) for key in keys]


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
