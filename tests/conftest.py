"""Set up every test: strict promotion, fixed random examples, the order of the tests."""

from __future__ import annotations

import collections
import gc
import os
import shutil
import threading
from pathlib import Path

import hypothesis
import jax
import pytest
from hypothesis.internal.conjecture import providers
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Deadlines would measure XLA, because a first call compiles. A busy machine draws examples slowly. The examples are
# always the same, so that a failing run fails again.
hypothesis.settings.register_profile(
    "jaxmp", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("jaxmp")
# Hypothesis would also draw the constants of our imported modules, which depend on the tests that ran before.
assert callable(providers._get_local_constants)
providers._get_local_constants = providers.Constants

# An MLIR context takes half of the time to lower a small program. So ten programs share one, as in later JAX.
_contexts = threading.local()


def _shared_context(make=mlir.make_ir_context):
    if getattr(_contexts, "programs", 10) == 10:
        _contexts.context, _contexts.programs = make(), 0
    _contexts.programs += 1
    return _contexts.context


if jax.__version__.startswith("0.10."):
    mlir.make_ir_context = _shared_context

# Tracing creates many objects that stay alive. A collection after every 700 objects would find little garbage.
gc.set_threshold(20_000)

# This folder has no tests. Its scripts `record_*.py` are run by hand, because they need other libraries.
collect_ignore = ["tools"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse missing files of tests, and limit the size of the kept compiled programs.

    Compiled programs of earlier runs are removed if they exceed a gigabyte. A run of all tests leaves a tenth of that.
    """
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        return
    for argument in config.args:
        path = argument.partition("::")[0]
        if not (config.invocation_params.dir / path).exists():  # pytest-xdist would only say that no tests ran
            raise pytest.UsageError(f"no such file or folder of tests: {path}")
    compiled = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if sum(path.stat().st_size for path in compiled.glob("*-cache")) > 1e9:
        shutil.rmtree(compiled, ignore_errors=True)


# Tests that take up to a minute each. They begin first, so that no worker runs one alone at the end, and no two workers
# set up the same module.
LONG = (
    "test_notebooks", "test_runs",
    "test_language_modeling", "test_eight_gpus", "test_audit_clean", "test_image_classification", "test_processes",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cases N``, which runs only the first N cases of each test.

    ``make newest`` and ``make slow-changed`` use it. A test of both Linen and NNX keeps N cases of each. Tests with the
    mark ``absent_gpu`` or ``absent_tpu`` keep all cases, because they run nowhere else.
    """
    parser.addoption("--cases", type=int, default=None, help="run at most so many cases of each parametrised test")


@pytest.hookimpl(trylast=True)  # after pytest has selected tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, and leave out cases beyond ``--cases``.

    Tests that compile for an absent GPU or TPU are skipped if their compiler is missing.
    """
    from jaxmp.inspect.compiled import gpu_targets, tpu_targets

    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    missing = {"absent_gpu": gpu_targets.missing(), "absent_tpu": tpu_targets.missing()}
    for item in items:
        for mark, reason in missing.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason))
    most = config.getoption("--cases")
    if most is None:
        return
    counts: collections.Counter[tuple[str, object]] = collections.Counter()
    selected, left_out = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)  # absent if a test has one case only
        test = item.nodeid.partition("[")[0], callspec and callspec.params.get("api")
        counts[test] += 1
        is_selected = counts[test] <= most or any(map(item.get_closest_marker, missing))
        (selected if is_selected else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = selected


@pytest.fixture(autouse=True, scope="module")
def no_module_pays_for_those_before():
    """Freeze the objects that JAX has cached, so that later collections skip them.

    Collecting them again and again took minutes of the suite.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def standard_promotion():
    """Allow JAX's standard dtype promotion, which optax's Adam and Flax's norms need."""
    with jax.numpy_dtype_promotion("standard"):
        yield
