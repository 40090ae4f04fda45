"""Every notebook runs, and is stored with the pictures that it draws."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT

pytestmark = pytest.mark.once

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def train_for_a_tenth_of_the_steps(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"\bsteps=(\d+)", lambda match: f"steps={int(match[1]) // 10}", cell.source)


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS] == [
        "autocast.ipynb", "find_float32.ipynb", "formats.ipynb", "loss_scale.ipynb", "quickstart.ipynb",
    ]  # fmt: skip


@pytest.mark.slow("runs every notebook")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_draws_what_is_stored_with_it(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    stored = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    if path.name == "quickstart.ipynb":  # it trains for so many steps that optimised programs save time
        flags = os.environ["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=1")
        monkeypatch.setenv("XLA_FLAGS", flags)
    else:
        train_for_a_tenth_of_the_steps(notebook)
    NotebookClient(
        notebook, timeout=600, startup_timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert pictures(notebook) == pictures(stored) > 0
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    if path.name != "quickstart.ipynb":
        return
    losses = [float(line.split("held-out loss ")[1].split(",")[0]) for line in printed(notebook).splitlines()
              if "held-out loss" in line]  # fmt: skip
    float32, unscaled, scaled, bfloat16 = losses
    assert unscaled > float32 + 0.1 and abs(scaled - float32) < 0.02 and abs(bfloat16 - float32) < 0.02


def test_a_stored_notebook_is_small_and_names_no_path_of_a_machine():
    for path in NOTEBOOKS:
        text = path.read_text()
        assert len(text) < 300_000
        here = (str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix, "site-packages")
        assert not [place for place in here if place in text]
        assert not re.search(r"[\w-]+/[\w-]+\.py:\d+", text)  # warnings and tracebacks name a file and a line
