"""Two processes share one state, and skip and fail at the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import held_port

pytestmark = pytest.mark.slow("starts two processes, which compile")
SCRIPT = Path(__file__).parent / "tools" / "two_processes.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the results of both processes. The second waits 20 ms in each step."""
    root, folder = Path(__file__).parents[1], tmp_path_factory.mktemp("both")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    files = [folder / str(n) for n in range(2)]  # gloo also writes to stdout
    with held_port() as port:
        command = [sys.executable, str(SCRIPT), f"127.0.0.1:{port.getsockname()[1]}"]
        processes = [
            subprocess.Popen([*command, str(n), "0.02", str(file)], env=environment, stderr=subprocess.PIPE, text=True)
            for n, file in enumerate(files)
        ]
        try:
            errors = [process.communicate(timeout=300)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [json.loads(file.read_text()) for file in files]


def test_a_state_is_made_on_the_devices_of_both(both):
    assert [results["home"] for results in both] == [1, 1]


def test_a_bad_row_on_one_skips_the_step_on_both(both):
    for results in both:
        assert results["scales"] == [256.0, 256.0, 128.0]
        assert results["skips"] == [False, True, False]
    assert both[0]["losses"] == both[1]["losses"]


def test_both_end_with_the_same_error_at_the_same_step(both):
    first, second = both
    assert first["last"] == second["last"] < 30
    assert first["error"] == second["error"]
    assert (
        "5 steps in a row" in first["error"] or "steps in a row were skipped, and the loss scale 1 " in first["error"]
    )
    assert "gradients of 'a', 'b'; the batch. Look for NaN" in first["error"]
