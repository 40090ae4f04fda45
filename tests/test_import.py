from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmp


def python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["flax", "matplotlib", "tensorflow", "tensorflow_datasets", "jmp", "rich"])
def test_importing_jaxmp_does_not_import(module):
    assert python(f"import jaxmp, sys; print({module!r} in sys.modules)") == "False"


def test_policies_and_hardware_work_without_flax():
    code = "import jaxmp, sys; jaxmp.get_policy('auto'); jaxmp.hardware.detect(); print('flax' in sys.modules)"
    assert python(code) == "False"


def test_autocast_works_without_flax():
    code = "import jax, jaxmp, sys; jax.jit(jaxmp.autocast(jax.numpy.vdot, 'mixed_bfloat16'))(1., 2.)"
    assert python(f"{code}; print('flax' in sys.modules)") == "False"


def test_importing_jaxmp_adds_at_most_a_tenth_of_a_second_to_importing_jax():
    # processor time, so that a busy machine does not count; the first run may still be writing bytecode
    code = "import jax, time; t = time.process_time(); import jaxmp; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) <= 0.1


def test_what_a_type_checker_sees_is_what_there_is():
    source = (Path(__file__).parents[1] / "jaxmp" / "__init__.py").read_text()
    seen = {
        alias.asname for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen - {None} == {*jaxmp._EXPORTS, "autocast"}


def test_every_public_name_is_there_and_listed():
    assert python("import jaxmp; print([name for name in dir(jaxmp) if not hasattr(jaxmp, name)])") == "[]"
    with pytest.raises(subprocess.CalledProcessError) as failure:
        python("import jaxmp; jaxmp.no_such_name")
    assert "module 'jaxmp' has no attribute 'no_such_name'" in failure.value.stderr
