"""The programs of docs/sharding.md run in two processes with two devices each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from ports import held_port

pytestmark = [pytest.mark.once, pytest.mark.slow("starts two processes, which compile")]
SCRIPT = ROOT / "tests" / "tools" / "devices_page.py"


def test_the_page_runs_in_two_processes_with_the_same_losses(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    files = [tmp_path / f"{process}.json" for process in range(2)]
    with held_port() as port:
        command = [sys.executable, str(SCRIPT), f"127.0.0.1:{port.getsockname()[1]}"]
        processes = [
            subprocess.Popen([*command, str(n), str(file)], env=environment, stderr=subprocess.PIPE, text=True)
            for n, file in enumerate(files)
        ]
        try:
            errors = [process.communicate(timeout=300)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, text[-4000:]
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second
    assert all(len(losses) == 4 and all(0 < loss < 1 for loss in losses) for losses in first.values())
    train_step, _, own_step, _ = first["Linen"]  # both begin with the same params
    assert own_step == pytest.approx(train_step, rel=1e-3)
