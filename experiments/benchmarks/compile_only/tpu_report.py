"""Tables and a picture of train steps that were compiled for a TPU, with their goals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.benchmarks.shared import records
from experiments.benchmarks.shared.goals import Goal, share
from experiments.report import plots
from experiments.report.tables import Table

NAME = "tpu_steps"
"""The name of the benchmark's files."""
MIB = 2**20
VARIANTS = (
    "hand-fp32", "hand-tf32", "hand-bf16", "jaxmp-bf16", "jaxmp-bf16-1chunk", "jaxmp-bf16-auto", "autocast-bf16",
    "unprepared-bf16", "jmp-bf16", "jaxmp-bf16-remat-full")  # fmt: skip
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
LIMITS = {
    "jaxmp-bf16": (1.01, 1.0),
    "jaxmp-bf16-1chunk": (1.01, 1.0),
    "autocast-bf16": (1.05, None),
    "unprepared-bf16": (1.05, None),
    "jaxmp-bf16-remat-full": (1.35, 0.45),
}
"""The goals of a row: its cycles and its peak memory, both relative to bfloat16 by hand."""
ABOUT = (
    "Compiled for a TPU, cycles estimated by the compiler, not run. `million cycles`: the sum over all kernels of a "
    "step, with the bodies of loops repeated. `ms`: the cycles divided by the clock. `memory ms`: the time in which "
    "the peak bandwidth moves the bytes of the step, beside the kernels. `peak`: arguments, temporaries, and results "
    "that do not reuse an argument's memory. `/ by hand`: relative to bfloat16 by hand. `half FLOPs`: the share of the "
    "products' FLOPs that are written in half precision. Attention is JAX's own products."
)


def table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each variant, and the goals."""
    rows, by_hand = result["variants"], result["variants"].get("hand-bf16")
    cells = []
    for key, row in rows.items():
        cycles = share(row["cycles"], by_hand["cycles"]) if by_hand else None
        peak = share(row["peak"], by_hand["peak"]) if by_hand else None
        cells.append((
            LABELS.get(key, row["label"]), f"{row['cycles'] / 1e6:,.1f}", _ratio(cycles),
            f"{row['parts']['kernels']:,.1f}", f"{row['parts']['memory']:,.1f}",
            f"{row['peak'] / MIB:,.0f}", _ratio(peak), f"{row['half']:.2%}",
            f"{row['kernels']:,}"))  # fmt: skip
    return Table(result["model"], COLUMNS, cells, notes=tuple(goal.sentence() for goal in goals(result)))


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals of the rows that were compiled, if bfloat16 by hand was compiled too."""
    rows = result["variants"]
    by_hand = rows.get("hand-bf16")
    if by_hand is None:
        return []
    judged = []
    for key, (cycles, peak) in LIMITS.items():
        if (row := rows.get(key)) is None:
            continue
        judged.append(
            Goal(f"{key}_cycles", f"{row['label']}: cycles / by hand", row["cycles"] / by_hand["cycles"], cycles)
        )
        if peak is not None:
            judged.append(
                Goal(f"{key}_peak", f"{row['label']}: peak memory / by hand", row["peak"] / by_hand["peak"], peak)
            )
    return judged


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
