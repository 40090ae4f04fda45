"""Make chooses the environment of each command and what runs small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once


@pytest.fixture
def project(tmp_path):
    """Return a folder with the Makefile and an environment that is ready."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / "installed").touch()
    return tmp_path


def make(project: Path, *arguments: str, target: str = "doctor") -> subprocess.CompletedProcess[str]:
    # without the settings of a make that runs these tests
    env = {name: value for name, value in os.environ.items() if name != "PYTHON" and not name.startswith("MAKE")}
    # On a PATH with version managers, pythons.sh would start each of their Pythons.
    env["PATH"] = os.defpath
    return subprocess.run(
        [shutil.which("make"), target, *arguments], cwd=project, env=env, capture_output=True, text=True
    )


def test_an_environment_of_the_python_that_is_named_or_of_none_is_kept(project):
    assert "setup.sh" not in make(project, "--dry-run").stdout
    assert "setup.sh" not in make(project, "--dry-run", f"PYTHON={sys.executable}").stdout


def test_an_environment_of_another_python_than_the_one_that_is_named_is_made_again(project):
    python = project / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 3.10\n")
    python.chmod(0o755)
    assert "setup.sh" not in make(project, "--dry-run").stdout
    assert ".ci/setup.sh .venv default\n" in make(project, "--dry-run", f"PYTHON={sys.executable}").stdout


def test_a_python_that_is_none_is_an_error_also_where_an_environment_is(project):
    done = make(project, "PYTHON=/nonexistent")
    assert done.returncode and "jaxmp needs Python 3.11 to 3.14" in done.stderr
    assert "and /nonexistent is not one." in done.stderr and not done.stdout


def test_a_smoke_run_has_no_limit_unless_minutes_are_given(project):
    for variables, flags in ((["SMOKE=0"], "--minutes 9 "), (["SMOKE=1", "MINUTES=5"], "--minutes 5 --smoke")):
        shown = make(project, "--dry-run", *variables, target="gpu").stdout
        assert f"-m experiments.benchmarks.gpu {flags}" in shown and ("--smoke" in shown) == ("--smoke" in flags)
    assert "--minutes 0 --smoke" in make(project, "--dry-run", "SMOKE=1", target="gpu").stdout


def test_make_check_runs_the_tests_of_the_scripts_once(project):
    file = "tests/experiments/test_masked_lm.py"
    check = make(project, "--dry-run", target="check").stdout
    assert check.count(f" {file}") == check.count(f"--ignore={file}") == 1
    assert f" {file}" in make(project, "--dry-run", target="test").stdout
    assert "--ignore" not in make(project, "--dry-run", target="experiments").stdout


def test_a_benchmark_that_is_none_is_one_sentence(project):
    done = make(project, "NAME=nosuch", f"PYTHONPATH={ROOT}", target="benchmark")
    assert done.returncode == 2
    assert done.stderr.startswith("error: NAME is a benchmark of experiments/benchmarks/README.md, got nosuch\n")


@pytest.mark.slow("a run of pytest")
def test_examples_in_docstrings_pass_without_the_tests():
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" and not name.startswith("PYTEST")}
    module = "jaxmp/sharding/gather.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", module]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
