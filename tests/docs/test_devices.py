"""The programs of docs/sharding.md run in two processes with two devices each."""

from __future__ import annotations

from pathlib import Path

import pytest
from joined_processes import results_of_two
from places import ROOT

pytestmark = [pytest.mark.once, pytest.mark.slow("starts two processes, which compile")]
SCRIPT = ROOT / "tests" / "tools" / "devices_page.py"


def test_the_page_runs_in_two_processes_with_the_same_losses(tmp_path: Path) -> None:
    first, second = results_of_two(SCRIPT, tmp_path)
    assert first == second
    assert all(len(losses) == 4 and all(0 < loss < 1 for loss in losses) for losses in first.values())
    train_step, _, own_step, _ = first["Linen"]  # both begin with the same params
    assert own_step == pytest.approx(train_step, rel=1e-3)
