"""Tables and a picture of compiled steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.benchmarks.measure import programs
from experiments.benchmarks.shared import records
from experiments.report import plots
from experiments.report.tables import Table

MIB = 2**20
COLUMNS = (
    "step", "temporaries MiB", "peak MiB", "/ torch.compile", "saved of fp32", "half FLOPs", "kernels", "GB moved",
    "layout GB", "predicted ms", "measured ms", "products")  # fmt: skip
TORCH_MIB = {"resnet50": 10_908, "bert": 13_938, "gpt2": 8_648}
"""Peaks of torch.compile under AMP in bfloat16, measured on one NVIDIA H200."""
TIMES = {
    "resnet50-hand-fp32": 238.3, "resnet50-hand-tf32": 68.0, "resnet50-hand-bf16": 37.9,
    "gpt2-hand-fp32": 331.7, "gpt2-hand-tf32": 103.7, "gpt2-hand-bf16": 33.6,
    "bert-hand-tf32": 145.9, "bert-hand-bf16": 60.7,
}  # fmt: skip
"""Milliseconds per step, measured in one run on one NVIDIA H200 with JAX 0.11.2 on 2026-11-20."""
ABOUT = (
    "Compiled for the GPU, not run on it. Peak: arguments, temporaries, and results that do not reuse an argument's "
    "memory. The workspaces of cuDNN's kernels are missing, because the kernels are chosen on a GPU. "
    "`/ torch.compile`: relative to the measured peak of torch.compile under AMP in bfloat16 (torch 2.11.0+cu130, one "
    "H200, 2026-11-20, the same shapes and optimizer): "
    + ", ".join(f"{name} {peak:,} MiB" for name, peak in TORCH_MIB.items()) +
    ". `saved of fp32`: share saved of the peak by hand in float32. `half FLOPs`: share of the products' FLOPs in "
    "float16 or bfloat16. `kernels`: kernels that a step launches; a library call counts as one. `GB moved`: bytes "
    "read and written by kernels other than products, convolutions and attention. `layout GB`: the part of them in "
    "kernels that only change a layout. `predicted ms`: by `jaxmp.inspect.roofline`. `measured ms`: on one H200, JAX "
    "0.11.2, 2026-11-20, with the error of the prediction in brackets."
)  # fmt: skip


def table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each variant."""
    variants, full = result["variants"], result["full"]
    base = variants.get("hand-fp32", {}).get("peak")
    rows: list[tuple[str, ...]] = []
    for key, row in variants.items():
        ms, measured = row.get("predicted"), TIMES.get(f"{result['name']}-{key}") if full else None
        rows.append((
            row["label"], f"{row['temporaries'] / MIB:,.0f}", f"{row['peak'] / MIB:,.0f}",
            f"{row['peak'] / MIB / TORCH_MIB[result['name']]:.2f}" if full else "",
            f"{1 - row['peak'] / base:.0%}" if base else "",
            f"{row['half']:.2%}", f"{row['launches']:,}", f"{row['traffic'] / 1e9:.1f}", f"{row['layout'] / 1e9:.1f}",
            f"{ms:.1f}" if ms else "", f"{measured} ({ms / measured - 1:+.1%})" if ms and measured else "",
            programs.words(row["products"])))  # fmt: skip
    return Table(result["model"], COLUMNS, rows)


def picture(result: dict[str, Any]) -> plots.Panel:
    """Draw the peak of each step in GiB, and torch.compile's peak as a line."""
    rows = list(result["variants"].values())
    torch = TORCH_MIB[result["name"]] / 1024
    return plots.Panel(
        result["model"],
        "peak memory, GiB",
        bars={row["label"]: row["peak"] / 2**30 for row in rows},
        colors=[plots.COLORS[2 if row["label"].startswith("jaxmp") else 5] for row in rows],
        line=(torch, f"torch.compile, measured: {torch:.2f}") if result["full"] else None,
        form=".2f",
    )


def write(folder: Path, where: dict[str, str], results: list[dict[str, Any]]) -> None:
    """Write compile_only.md, .json and .png, and print the tables."""
    title, data = "Train steps compiled for a GPU", {"results": results}
    tables, panels = [*map(table, results)], [[*map(picture, results)]]
    records.record(folder, "compile_only", title, where, tables, data, [ABOUT], "Peak memory", panels)
