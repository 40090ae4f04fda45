"""jaxmp.jmp passes the tests of jmp and of Haiku's mixed precision."""

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
from jaxmp.jmp import *
assert "jmp" not in sys.modules and str(get_policy("f16")) == "p=f16,c=f16,o=f16"
from jaxmp import jmp

private = types.ModuleType("jmp._src")
private.loss_scale = private.policy = jmp
sys.modules.update({"jmp": jmp, "jmp._src": private})
results = []
for file in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("suite", file)
    suite = sys.modules["suite"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    assert suite.jmp is jmp
    result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromModule(suite))
    bad = [str(test) for test, _ in result.failures + result.errors + result.skipped]
    results.append({"run": result.testsRun, "bad": bad, "imported": sys.modules["jmp"] is jmp})
print(json.dumps(results))
"""
SUITES = {
    ("jmp", "_src/loss_scale_test.py"): 25,
    ("jmp", "_src/policy_test.py"): 70,
    ("haiku", "_src/mixed_precision_test.py"): 10,
}


@pytest.mark.slow("a process that runs three suites; tests beside it compare with jmp")
def test_every_test_of_the_packages_passes_with_jaxmps_jmp_which_does_not_import_jmp():
    specs = [(importlib.util.find_spec(package), suite) for package, suite in SUITES]
    files = [str(Path(spec.origin).parent / suite) for spec, suite in specs]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RUNNER, *files], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for result, at_least in zip(json.loads(done.stdout.splitlines()[-1]), SUITES.values(), strict=True):
        assert result["bad"] == [], done.stderr
        assert result["run"] >= at_least and result["imported"]
