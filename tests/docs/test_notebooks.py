"""Every notebook runs, and is stored with the pictures that it draws."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def train_for_a_tenth_of_the_steps(notebook: Any) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"\bsteps=(\d+)", lambda match: f"steps={int(match[1]) // 10}", cell.source)


@pytest.mark.once
@pytest.mark.slow("runs every notebook")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_draws_what_is_stored_with_it(path, tmp_path, monkeypatch):
    import nbformat  # here, because every run of the tests would wait for these imports
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    stored, notebook = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    if path.name == "quickstart.ipynb":  # it trains for so many steps that optimised programs save time
        flags = os.environ["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=1")
        monkeypatch.setenv("XLA_FLAGS", flags)
    else:
        train_for_a_tenth_of_the_steps(notebook)
    resources = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=600, startup_timeout=600, kernel_name="python3", resources=resources).execute()
    assert pictures(notebook) == pictures(stored) > 0
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    if path.name == "quickstart.ipynb":
        printed = "".join(output.get("text", "") for output in outputs(notebook))
        float32, unscaled, scaled, bfloat16 = map(float, re.findall(r"held-out loss ([\d.]*\d)", printed))
        assert unscaled > float32 + 0.1 and abs(scaled - float32) < 0.02 and abs(bfloat16 - float32) < 0.02
