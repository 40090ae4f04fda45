"""Predicted step times beside those on record, for programs that benchmarks.compile_only has compiled.

python -m experiments.benchmarks.compile_only --variants hand-fp32 hand-tf32 hand-fp16 hand-bf16 --hlo --run-dir FOLDER

python -m experiments.benchmarks.roofline --programs FOLDER

It reads the programs, FOLDER/MODEL-VARIANT.hlo.txt; nothing is compiled or run. The run folder holds roofline.md and
roofline.json.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.benchmarks.shared import records
from experiments.measure.environment import environment
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import run_folder
from jaxmp import hardware, hlo
from jaxmp.inspect import prediction

RECORDED = {
    "resnet50-hand-fp32": 238.3, "resnet50-hand-tf32": 68.0, "resnet50-hand-fp16": 35.2, "resnet50-hand-bf16": 37.9,
    "gpt2-hand-fp32": 331.7, "gpt2-hand-tf32": 103.7, "gpt2-hand-fp16": 32.6, "gpt2-hand-bf16": 33.6,
    "bert-hand-tf32": 145.9, "bert-hand-fp16": 58.2, "bert-hand-bf16": 60.7,
}  # fmt: skip
"""Milliseconds a step, measured on one NVIDIA H200 with JAX 0.11.2, 2026-11-20, one run each."""
COLUMNS = ("program", "measured ms", "predicted ms", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Config):
    """Flags of the benchmark."""

    programs: Annotated[Path, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: this folder)")] = Path()
    """Where compile_only wrote them."""


def predicted(folder: Path) -> dict[str, float]:
    """Milliseconds of each program in ``folder`` whose time is on record, the fastest first.

    Raises:
      ValueError: there is none.
    """
    files = {name: folder / f"{name}.hlo.txt" for name in sorted(RECORDED, key=lambda name: RECORDED[name])}
    device = hardware.detect("h200")
    found = {
        name: prediction.of_program(hlo.Program(file.read_text()), device).milliseconds
        for name, file in files.items()
        if file.exists()
    }
    if not found:
        raise ValueError(f"{folder} has no MODEL-VARIANT.hlo.txt; run benchmarks.compile_only with --hlo")
    return found


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        found = predicted(config.programs)
        folder = run_folder("roofline", config.run_dir)
    rows = [
        (name, f"{RECORDED[name]:.1f}", f"{ms:.1f}", f"{ms / RECORDED[name] - 1:+.1%}") for name, ms in found.items()
    ]
    data = {name: {"measured": RECORDED[name], "predicted": ms} for name, ms in found.items()}
    tables = [Table("Step times on an H200", COLUMNS, rows)]
    records.record(folder, "roofline", "Predicted beside measured times", environment(), tables, {"programs": data})
    return data


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
