from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
from places import ROOT

import jaxmp

pytestmark = pytest.mark.once


def python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


TIMED_IMPORT = "import jax, time; t = time.process_time(); import jaxmp; print(time.process_time() - t)\n"


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Return the CPU time of importing jaxmp, and the names loaded and missing."""
    for_later = {"flax", "matplotlib", "tensorflow", "tensorflow_datasets", "jmp", "rich", "orbax"}
    code = (
        "jaxmp.get_policy('auto'); jaxmp.hardware.detect(); autocast = jaxmp.autocast(jax.numpy.vdot, 'mixed_bfloat16')"
    )
    output = python(
        f"{TIMED_IMPORT}import sys; print({for_later} & {{*sys.modules}})\n"
        f"{code}; jax.jit(autocast)(1., 2.); print('flax' in sys.modules)\n"
        "print([name for name in dir(jaxmp) if not hasattr(jaxmp, name)])"
    )
    return output.split()


def test_importing_jaxmp_imports_nothing_that_it_does_without_and_policies_hardware_and_autocast_work_without_flax(
    imported,
):
    assert imported[1:] == ["set()", "False", "[]"]  # no optional package, no Flax, no missing name


def test_importing_jaxmp_adds_at_most_a_tenth_of_a_second_to_importing_jax(imported):
    # CPU time depends little on other processes; the first run may still write bytecode
    assert float(imported[0]) <= 0.1 or any(float(python(TIMED_IMPORT)) <= 0.1 for _ in range(2))


@pytest.mark.slow("a process of its own that compiles")
def test_no_part_of_jaxmp_that_is_loaded_later_has_what_was_jitted_before_compiled_again():
    output = python(
        "import jax, jaxmp; from flax import nnx; traced = []\n"
        "own = jax.jit(lambda x: traced.append('own') or x)\n"
        "half = jax.jit(jaxmp.autocast(lambda w: traced.append('half') or w @ w, 'mixed_bfloat16'))\n"
        "eye = jax.numpy.eye(2)\n"
        "for later in ('losses', 'inspect', 'hardware', 'linen', 'nnx', 'checkpoint', 'make_train_step'):\n"
        "    own(eye), half(eye), getattr(jaxmp, later)\n"
        "net = jaxmp.nnx.apply_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 'mixed_bfloat16')\n"
        "net(eye), own(eye), half(eye), print(*traced)"
    )
    assert output == "own half"


def test_a_type_checker_sees_the_names_of_all():
    source = (ROOT / "jaxmp" / "__init__.py").read_text()
    imports_from = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname for node in imports_from for alias in node.names}
    assert names - {None} == {*jaxmp.__all__}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("no_such_name", "module 'jaxmp' has no attribute 'no_such_name'"),
        ("all_finite", "write jaxmp.jmp.all_finite"),
        ("select_tree", "write jaxmp.jmp.select_tree, or jaxmp.keep_if_skipped"),
        ("apply_policy", "write jaxmp.linen.apply_policy or jaxmp.nnx.apply_policy"),
        ("GradScaler", r"write jaxmp.loss_scaling\(tx, jaxmp.DynamicLossScale\(\)\)"),
        ("unscale", r"write jaxmp.value_and_grad\(loss_fn, opt_state\), whose gradients are unscaled"),
    ],
)
def test_the_error_for_an_unknown_name_says_what_to_write_if_another_library_has_it(name, remedy):
    with pytest.raises(AttributeError, match=remedy):
        getattr(jaxmp, name)
