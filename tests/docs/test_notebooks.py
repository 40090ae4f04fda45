"""Every notebook runs, is stored with the pictures that it draws, and prints what its text says."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from places import ROOT

pytestmark = pytest.mark.once

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def train_for_a_tenth_of_the_steps(notebook: Any) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"\bsteps=(\d+)", lambda match: f"steps={int(match[1]) // 10}", cell.source)


@pytest.mark.slow("runs every notebook")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_draws_what_is_stored_with_it(path, tmp_path, monkeypatch):
    import nbformat  # here, because every run of the tests would wait for these imports
    from nbclient import NotebookClient

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
    if path.name in CONCLUSIONS:
        CONCLUSIONS[path.name](printed(notebook))


def only_float16_without_a_loss_scale_is_worse(output: str) -> None:
    losses = [float(line.split("held-out loss ")[1].split(",")[0]) for line in output.splitlines()
              if "held-out loss" in line]  # fmt: skip
    float32, unscaled, scaled, bfloat16 = losses
    assert unscaled > float32 + 0.1 and abs(scaled - float32) < 0.02 and abs(bfloat16 - float32) < 0.02


def numbers_of(output: str, name: str) -> list[list[float]]:
    """Return the numbers in each line of a table that begins with ``name``."""
    lines = [line.removeprefix(name) for line in output.splitlines() if line.startswith(name + " ")]
    return [[float(number) for number in re.findall(r"[+-]?\d[\d.]*(?:e[+-]\d+)?", line)] for line in lines]


def only_bfloat16_angles_depend_on_the_context(output: str) -> None:
    deviations, errors = numbers_of(output, "bfloat16 angles")
    assert deviations[2] > 10 * deviations[0] and errors[3] > 0.5
    for name in ("bfloat16 tables", "jaxmp.autocast"):
        for values in numbers_of(output, name):
            assert values[3] < 1.5 * values[0] < 0.01
    (right,) = numbers_of(output, "tables in the dtype of x")
    (wrong,) = numbers_of(output, "positions cast to bfloat16")
    assert max(right) < 0.01 and min(wrong) > 0.3


def only_rounding_to_nearest_loses_updates(output: str) -> None:
    for name, is_lost in {"nearest": True, "stochastic": False, "Kahan": False}.items():
        (mean, _, _), (_, difference, *_) = numbers_of(output, name)
        assert (mean == 1) == is_lost, name
        assert (difference > 1) == is_lost, name
    ((stored, *_),) = numbers_of(output, "stochastic, bfloat16 moments")
    ((float32_stored, *_),) = numbers_of(output, "float32 masters")
    assert (stored, float32_stored) == (6, 12)


def only_scales_that_are_rounded_up_clip_nothing(output: str) -> None:
    (up,), (down,) = (numbers_of(output, f"MX, {rounding}") for rounding in ("up (paper)", "down (OCP)"))
    (cast,), (jaxmp_float8,) = (numbers_of(output, name) for name in ("MX, cast to e8m0", "jaxmp, float8"))
    for column in range(3):
        assert 1.1 * up[column] < down[column] < cast[column] / 2
        assert abs(jaxmp_float8[column] - up[column]) < 0.1
    for distribution in ("Gaussian    ", "Laplace     ", "Student's t "):
        (clipped_up,) = numbers_of(output, f"{distribution} MX, up (paper)")
        (clipped_down,) = numbers_of(output, f"{distribution} MX, down (OCP)")
        assert clipped_up[0] == 0 and clipped_down[0] > 10


CONCLUSIONS = {
    "paper_mx_scales.ipynb": only_scales_that_are_rounded_up_clip_nothing,
    "paper_rope.ipynb": only_bfloat16_angles_depend_on_the_context,
    "paper_stochastic_rounding.ipynb": only_rounding_to_nearest_loses_updates,
    "quickstart.ipynb": only_float16_without_a_loss_scale_is_worse,
}
"""Checks of what a notebook prints, where its text states a result."""
