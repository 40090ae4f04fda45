"""jmp's own tests and Haiku's of its mixed precision, as they lie in the installed packages, run on jaxmp.jmp."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

# jmp's tests import the private modules of jmp, Haiku's import jmp; both are jaxmp.jmp here.
RUNNER = """
import importlib.util, json, sys, types, unittest
from jaxmp import jmp

private = types.ModuleType("jmp._src")
private.loss_scale = private.policy = jmp
sys.modules.update({"jmp": jmp, "jmp._src": private})
spec = importlib.util.spec_from_file_location("suite", sys.argv[1])
suite = sys.modules["suite"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
assert suite.jmp is jmp
result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromModule(suite))
bad = [str(test) for test, _ in result.failures + result.errors + result.skipped]
print(json.dumps({"run": result.testsRun, "bad": bad, "imported": sys.modules["jmp"] is jmp}))
"""


@pytest.mark.parametrize(
    ("package", "suite", "at_least"),
    [
        ("jmp", "_src/loss_scale_test.py", 25),
        ("jmp", "_src/policy_test.py", 70),
        ("haiku", "_src/mixed_precision_test.py", 10),
    ],
)
def test_every_test_of_the_package_passes_with_jaxmps_jmp_in_place_of_jmp(package, suite, at_least):
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUNNER, str(Path(spec.origin).parent / suite)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bad"] == [], done.stderr
    assert result["run"] >= at_least and result["imported"]
