"""Predicted step times beside those on record, for programs that benchmarks.compile_only has compiled.

python -m experiments.benchmarks.compile_only --variants hand-fp32 hand-tf32 hand-fp16 hand-bf16 --hlo --run-dir FOLDER
python -m experiments.benchmarks.roofline FOLDER

It reads the programs, FOLDER/MODEL-VARIANT.hlo.txt, and writes a table; nothing is compiled or run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.report.tables import Table
from jaxmp.inspect import hlo
from jaxmp.inspect.prediction import _hardware, of_program

RECORDED = {
    "resnet50-hand-fp32": 238.3, "resnet50-hand-tf32": 68.0, "resnet50-hand-fp16": 35.2, "resnet50-hand-bf16": 37.9,
    "gpt2-hand-fp32": 331.7, "gpt2-hand-tf32": 103.7, "gpt2-hand-fp16": 32.6, "gpt2-hand-bf16": 33.6,
    "bert-hand-tf32": 145.9, "bert-hand-fp16": 58.2, "bert-hand-bf16": 60.7,
}  # fmt: skip
"""Milliseconds a step, measured on one NVIDIA H200 with JAX 0.11.2, 2026-11-20, one run each."""


def table(folder: Path) -> Table:
    """A row for each program in ``folder`` whose time is on record, the fastest first.

    Raises:
      FileNotFoundError: there is none.
    """
    rows = []
    for name, measured in sorted(RECORDED.items(), key=lambda row: row[1]):
        file = folder / f"{name}.hlo.txt"
        if file.exists():
            found = of_program(hlo.Program(file.read_text()), _hardware("h200"))
            error = found.milliseconds / measured - 1
            rows.append((name, f"{measured:.1f}", f"{found.milliseconds:.1f}", f"{error:+.1%}"))
    if not rows:
        raise FileNotFoundError(f"{folder} has no MODEL-VARIANT.hlo.txt; run benchmarks.compile_only with --hlo")
    return Table("Step times on an H200", ("program", "measured ms", "predicted ms", "error"), rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])).markdown())
