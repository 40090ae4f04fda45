"""A user's type checker accepts the public names, and the program runs.

`make types` reads the same program with mypy.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "user_program.py"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.once


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow("pyright reads all of JAX and Flax")
def test_pyright_finds_no_error_in_a_users_program(tmp_path):
    pytest.importorskip("basedpyright")
    settings = {"include": [str(PROGRAM)], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    result = run("-m", "basedpyright", "--project", str(config), "--pythonpath", sys.executable, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow("belongs to the checks of types")
def test_the_users_program_runs():
    result = run(str(PROGRAM))
    assert result.returncode == 0, result.stdout + result.stderr
