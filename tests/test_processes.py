"""Two processes of two CPU devices each: one state, one scale, the same skips and the same error at the same step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "tools" / "two_processes.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def both():
    """What each process printed; the second one waits 20 ms before each step of the last loop."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SCRIPT), f"127.0.0.1:{free_port()}"]
    processes = [
        subprocess.Popen(
            [*command, str(n), "0.02"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(text.splitlines()[-1]) for text, _ in outputs]


def test_a_state_is_made_on_the_devices_of_both(both):
    assert [found["home"] for found in both] == [1, 1]


def test_a_bad_row_on_one_skips_the_step_on_both(both):
    for found in both:
        assert found["scales"] == [256.0, 256.0, 128.0]
        assert found["skips"] == [False, True, False]
    assert both[0]["losses"] == both[1]["losses"]


def test_both_end_with_the_same_error_at_the_same_step(both):
    first, second = both
    assert first["last"] == second["last"] < 30
    assert first["error"] == second["error"]
    assert "5 steps in a row" in first["error"] or "steps in a row were skipped at loss scale 1" in first["error"]
    assert "batch entries" in first["error"]
