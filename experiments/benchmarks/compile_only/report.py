"""Tables and a picture of compiled steps, with their goals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.benchmarks.compile_only.predictions import TIMES, predictions
from experiments.benchmarks.measure import programs
from experiments.benchmarks.shared import records
from experiments.benchmarks.shared.goals import Goal, saved, share
from experiments.benchmarks.train_step.goals import LIMITS, MEMORY, RECORDED, TENSOR_FLOPS
from experiments.report import plots
from experiments.report.tables import Table

MIB = 2**20
COLUMNS = (
    "step", "temporaries MiB", "peak MiB", "/ torch.compile", "saved of fp32", "half FLOPs", "kernels", "GB moved",
    "layout GB", "predicted ms", "measured ms", "products")  # fmt: skip
AUTOCAST_MEMORY = 1.02
ABOUT = (
    "Compiled for the GPU, not run on it. Peak: arguments, temporaries, and results that do not reuse an argument's "
    "memory. The workspaces of cuDNN's kernels are missing, because the kernels are chosen on a GPU. "
    "`/ torch.compile`: relative to the measured peak of torch.compile under AMP in bfloat16 (torch 2.11.0+cu130, one "
    "H200, 2026-11-20, the same shapes and optimizer): "
    + ", ".join(f"{n} {r.torch:,} MiB" for n, r in RECORDED.items()) +
    ". `saved of fp32`: share saved of the peak by hand in float32. `half FLOPs`: share of the FLOPs that tensor cores "
    "do in float16 or bfloat16. An attention of cuDNN counts as two products forward and five backward over the whole "
    "square. `kernels`: kernels that a step launches; a library call counts as one. `GB moved`: bytes read and written "
    "by kernels other than products, convolutions and attention. `layout GB`: the part of them in kernels that only "
    "change a layout. `predicted ms`: by `jaxmp.inspect.roofline`. `measured ms`: on one H200, JAX 0.11.2, 2026-11-20, "
    "with the error of the prediction in brackets."
)  # fmt: skip


def table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each variant, and the goals."""
    variants, full = result["variants"], result["full"]
    base = variants.get("hand-fp32", {}).get("peak")
    rows: list[tuple[str, ...]] = []
    for key, row in variants.items():
        ms, measured = row.get("predicted"), TIMES.get(f"{result['name']}-{key}") if full else None
        rows.append((
            row["label"], f"{row['temporaries'] / MIB:,.0f}", f"{row['peak'] / MIB:,.0f}",
            f"{row['peak'] / MIB / RECORDED[result['name']].torch:.2f}" if full else "",
            f"{1 - row['peak'] / base:.0%}" if base else "",
            f"{row['half']:.2%}", f"{row['launches']:,}", f"{row['traffic'] / 1e9:.1f}", f"{row['layout'] / 1e9:.1f}",
            f"{ms:.1f}" if ms else "", f"{measured} ({ms / measured - 1:+.1%})" if ms and measured else "",
            programs.words(row["products"])))  # fmt: skip
    return Table(result["model"], COLUMNS, rows, notes=tuple(notes(result)))


def goals(result: dict[str, Any], torch: float | None = None, float32: float | None = None) -> list[Goal]:
    """Return the goals whose figures are known after compiling.

    Args:
      result: the compiled steps of a model.
      torch: the peak of torch.compile in bytes; None for the recorded peak.
      float32: the peak of float32 by hand in bytes; None for the recorded peak.
    """
    rows, recorded, limits = result["variants"], RECORDED[result["name"]], LIMITS[result["name"]]
    peaks = {key: row["peak"] for key, row in rows.items()}
    half, remat, by_hand = (peaks.get(key) for key in ("jaxmp-bf16", "jaxmp-bf16-remat", "hand-fp32"))
    if result["full"]:  # no other size was measured
        torch, float32 = torch or recorded.torch * MIB, float32 or recorded.float32 * MIB
    against = "memory saved against float32 by hand as"
    judged = [
        Goal("memory", "peak memory / torch.compile's", share(half, torch), MEMORY),
        Goal("remat_memory", "peak memory with remat / torch.compile's", share(remat, torch), limits.remat_memory),
        Goal("saved", f"{against} measured", saved(share(half, float32)), limits.saved, least=True, form=".2%"),
        # no limit: compiled peaks lack cuDNN's workspaces, which are known only on a GPU
        Goal("saved_compiled", f"{against} compiled here", saved(share(half, by_hand)), None, least=True, form=".2%"),
    ]
    for key, row in {"half": "jaxmp-bf16", "half_fp16": "jaxmp-fp16", "half_autocast": "autocast-bf16"}.items():
        if row in rows:
            name = f"{rows[row]['label']}: share of FLOPs on tensor cores in half"
            judged.append(Goal(key, name, rows[row]["half"], TENSOR_FLOPS, least=True, form=".2%"))
    ratio = share(peaks.get("autocast-bf16"), half)
    judged.append(Goal("autocast_memory", "peak memory under autocast / with a policy", ratio, AUTOCAST_MEMORY))
    return [goal for goal in judged if goal.value is not None]


def notes(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each goal, and figures that help to explain the goals."""
    rows, lines = result["variants"], [goal.sentence() for goal in goals(result)]
    if (half := rows.get("jaxmp-bf16")) and (auto := rows.get("autocast-bf16")):
        same = auto["products"] == half["products"]
        but = "" if same else f", but {programs.difference(auto['products'], half['products'])}"
        lines.append(f"{'met' if same else 'NOT MET'}: autocast has the products of the policy{but}")
        lines.append(f"autocast: {auto['launches'] - half['launches']:+,} kernels, "
                     f"{(auto['traffic'] - half['traffic']) / 1e9:+.2f} GB")  # fmt: skip
    if (plain := rows.get("jaxmp-fp16-unscaled")) and (row := rows.get("jaxmp-fp16")):
        kernels, moved = row["launches"] - plain["launches"], (row["traffic"] - plain["traffic"]) / 1e9
        more = (row["peak"] - plain["peak"]) / MIB
        lines.append(f"{row['label']}, against none: {kernels:+,} kernels, {moved:+.2f} GB, {more:+,.0f} MiB")
    return lines


def picture(result: dict[str, Any]) -> plots.Panel:
    """Draw the peak of each step in GiB, and torch.compile's peak as a line."""
    rows = list(result["variants"].values())
    torch = RECORDED[result["name"]].torch / 1024
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
    tables, panels = [*map(table, results), *predictions(results)], [[*map(picture, results)]]
    records.record(folder, "compile_only", title, where, tables, data, [ABOUT], "Peak memory", panels)
