"""Tables and a picture of train steps that were compiled for a TPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.benchmarks.shared import records
from experiments.report import plots
from experiments.report.tables import Table

NAME = "tpu_steps"
"""The name of the benchmark's files."""
MIB = 2**20
VARIANTS = (
    "hand-fp32", "hand-tf32", "hand-bf16", "jaxmp-bf16", "jaxmp-bf16-1chunk", "jaxmp-bf16-auto", "autocast-bf16",
    "unprepared-bf16", "jaxmp-bf16-remat-full")  # fmt: skip
"""The rows of benchmarks.train_step that make sense on a TPU."""
LABELS = {
    "hand-fp32": "JAX by hand, float32, highest precision",
    "hand-tf32": "JAX by hand, float32, JAX's default precision",
    "hand-bf16": "JAX by hand, bf16, by `dtype=` of Flax's modules",
}
"""The labels of rows whose usual label names a GPU's format, and of the row that the others are compared with."""
COLUMNS = (
    "step", "million cycles", "/ by hand", "ms", "memory ms", "peak MiB", "/ by hand", "half FLOPs", "kernels",
)  # fmt: skip
ABOUT = (
    "Compiled for a TPU, cycles estimated by the compiler, not run. `million cycles`: the sum over all kernels of a "
    "step, with the bodies of loops repeated. `ms`: the cycles divided by the clock. `memory ms`: the time in which "
    "the peak bandwidth moves the bytes of the step, beside the kernels. `peak`: arguments, temporaries, and results "
    "that do not reuse an argument's memory. `/ by hand`: relative to bfloat16 by hand. `half FLOPs`: the share of the "
    "products' FLOPs that are written in half precision. Attention is JAX's own products."
)


def table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each variant."""
    rows, by_hand = result["variants"], result["variants"].get("hand-bf16")
    cells = []
    for key, row in rows.items():
        cycles, peak = (f"{row[figure] / by_hand[figure]:.3f}" if by_hand else "" for figure in ("cycles", "peak"))
        cells.append((
            LABELS.get(key, row["label"]), f"{row['cycles'] / 1e6:,.1f}", cycles,
            f"{row['parts']['kernels']:,.1f}", f"{row['parts']['memory']:,.1f}",
            f"{row['peak'] / MIB:,.0f}", peak, f"{row['half']:.2%}",
            f"{row['kernels']:,}"))  # fmt: skip
    return Table(result["model"], COLUMNS, cells)


def picture(result: dict[str, Any]) -> plots.Panel:
    """Draw the milliseconds of each step, by the compiler's cycles."""
    rows = result["variants"]
    return plots.Panel(
        result["model"],
        "ms, by the compiler's cycles",
        bars={LABELS.get(key, row["label"]): row["parts"]["kernels"] for key, row in rows.items()},
        colors=[plots.COLORS[2 if row["label"].startswith("jaxmp") else 5] for row in rows.values()],
        form=",.1f",
    )


def write(folder: Path, where: dict[str, str], results: list[dict[str, Any]]) -> None:
    """Write tpu_steps.md, .json and .png, and print the tables."""
    title, panels = f"Train steps compiled for {where['target']}", [[*map(picture, results)]]
    records.record(folder, NAME, title, where, [*map(table, results)], {"results": results}, [ABOUT],
                   "Estimated time", panels)  # fmt: skip
