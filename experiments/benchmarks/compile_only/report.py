"""What benchmarks.compile_only found, as tables, as a picture, and held against the goals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich.console

from experiments.benchmarks.train_step.goals import LIMITS, RECORDED, SCALING, TENSOR_FLOPS, Goal, saved, share
from experiments.report import plots
from experiments.report.tables import Table

MIB = 2**20
COLUMNS = (
    "step", "temporaries MiB", "peak MiB", "/ torch.compile", "saved of fp32", "half FLOPs", "kernels", "GB moved",
    "layout GB", "products",
)  # fmt: skip
COPY_RATE = 4.3e12  # bytes a second that a copy on that H200 moved, read plus written
AUTOCAST_MEMORY = 1.02
ABOUT = (
    "Compiled for the GPU, not run on it. Peak: arguments, results that reuse none of them, and temporaries, without "
    "the workspaces that cuDNN's kernels may ask for once there is a GPU to choose them on. "
    "`/ torch.compile`: of the peak that torch.compile under AMP had in bfloat16 (torch 2.11.0+cu130, one H200, "
    "2026-11-20, the same shapes and optimizer): " + ", ".join(f"{n} {r.torch:,} MiB" for n, r in RECORDED.items()) +
    ". `saved of fp32`: of the row by hand in float32. `half FLOPs`: share of the FLOPs that tensor cores do in "
    "float16 or bfloat16, cuDNN's attentions counted as two products forward and five backward over the whole square. "
    "`kernels`: launched by a step, a call of a library as one. `GB moved`: read and written by kernels other than "
    "products, convolutions and attention; `layout GB`: by those of them that only change a layout."
)  # fmt: skip


def table(result: dict[str, Any]) -> Table:
    """A row a variant, and the goals."""
    variants, full = result["variants"], result["full"]
    base = variants.get("hand-fp32", {}).get("peak")
    rows: list[tuple[str, ...]] = []
    for row in variants.values():
        products = ", ".join(f"{count} {name}" for name, count in sorted(row["products"].items()))
        rows.append((
            row["label"], f"{row['temporaries'] / MIB:,.0f}", f"{row['peak'] / MIB:,.0f}",
            f"{row['peak'] / MIB / RECORDED[result['name']].torch:.2f}" if full else "",
            f"{1 - row['peak'] / base:.0%}" if base else "",
            f"{row['half']:.2%}", f"{row['launches']:,}", f"{row['traffic'] / 1e9:.1f}", f"{row['layout'] / 1e9:.1f}",
            products,
        ))  # fmt: skip
    return Table(result["model"], COLUMNS, rows, notes=tuple(notes(result)))


def goals(result: dict[str, Any], torch: float | None = None, float32: float | None = None) -> list[Goal]:
    """Those that compiling tells something of, held against the recorded peaks or, in bytes, those given."""
    rows, recorded, limits = result["variants"], RECORDED[result["name"]], LIMITS[result["name"]]
    peaks = {key: row["peak"] for key, row in rows.items()}
    half, remat, by_hand = (peaks.get(key) for key in ("jaxmp-bf16", "jaxmp-bf16-remat", "hand-fp32"))
    if result["full"]:  # no other size was measured
        torch, float32 = torch or recorded.torch * MIB, float32 or recorded.float32 * MIB
    against = "memory saved against float32 by hand as"
    found = [
        Goal("memory", "peak memory / torch.compile's", share(half, torch), limits.memory),
        Goal("remat_memory", "peak memory with remat / torch.compile's", share(remat, torch), limits.remat_memory),
        Goal("saved", f"{against} measured", saved(share(half, float32)), limits.saved, least=True, form=".2%"),
        # without a limit: as compiled, neither has the workspaces that cuDNN asks a GPU for
        Goal("saved_compiled", f"{against} compiled here", saved(share(half, by_hand)), None, least=True, form=".2%"),
    ]
    for key, row in {"half": "jaxmp-bf16", "half_fp16": "jaxmp-fp16", "half_autocast": "autocast-bf16"}.items():
        if row in rows:
            name = f"{rows[row]['label']}: share of FLOPs on tensor cores in half"
            found.append(Goal(key, name, rows[row]["half"], TENSOR_FLOPS, least=True, form=".2%"))
    ratio = share(peaks.get("autocast-bf16"), half)
    found.append(Goal("autocast_memory", "peak memory under autocast / with a policy", ratio, AUTOCAST_MEMORY))
    return [goal for goal in found if goal.value is not None]


def notes(result: dict[str, Any]) -> list[str]:
    """A sentence a goal; what has none but belongs to one, as figures."""
    rows, lines = result["variants"], [goal.sentence() for goal in goals(result)]
    if (half := rows.get("jaxmp-bf16")) and (auto := rows.get("autocast-bf16")):
        same = auto["products"] == half["products"]
        lines.append(f"{'met' if same else 'NOT MET'}: autocast has the products of the policy" + (
            "" if same else f", but {difference(auto['products'], half['products'])}"))  # fmt: skip
        lines.append(f"autocast: {auto['launches'] - half['launches']:+,} kernels, "
                     f"{(auto['traffic'] - half['traffic']) / 1e9:+.2f} GB")  # fmt: skip
    if plain := rows.get("jaxmp-fp16-unscaled"):
        for key in ("jaxmp-fp16-gradients", "jaxmp-fp16-updates", "jaxmp-fp16"):
            if row := rows.get(key):
                lines.append(scaling(row, plain, RECORDED[result["name"]].torch_ms if result["full"] else None))
    return lines


def scaling(row: dict[str, Any], plain: dict[str, Any], torch_ms: float | None) -> str:
    """What a row with loss scaling has more than the one without."""
    kernels, moved = row["launches"] - plain["launches"], row["traffic"] - plain["traffic"]
    text = (
        f"{row['label']}, against none: {kernels:+,} kernels, {moved / 1e9:+.2f} GB, "
        f"{(row['peak'] - plain['peak']) / MIB:+,.0f} MiB"
    )
    if torch_ms is None:
        return text
    milliseconds = moved / COPY_RATE * 1e3
    return (
        f"{text}; at {COPY_RATE / 1e12:g} TB/s the bytes take {milliseconds:.2f} ms, "
        f"{milliseconds / torch_ms:.1%} of torch.compile's {torch_ms} ms (the goal for the time that "
        f"scaling adds, which a GPU must confirm: {SCALING - 1:.1%})"
    )


def difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """Which products two programs have not in common, in words."""
    return ", ".join(
        f"{ours.get(name, 0)} {name} for {theirs.get(name, 0)}"
        for name in sorted({*ours, *theirs})
        if ours.get(name, 0) != theirs.get(name, 0)
    )


def buffers(result: dict[str, Any]) -> list[Table]:
    """What fills the memory of each step, if that was asked for."""
    return [
        Table(
            f"{result['model']}: {row['label']}, the largest buffers at the peak",
            ("array", "made by", "MiB"),
            [(array, made_by, f"{size / MIB:,.1f}") for size, array, made_by in row["buffers"]],
            left=2,
        )
        for row in result["variants"].values()
        if "buffers" in row
    ]


def write(folder: Path, where: dict[str, str], results: list[dict[str, Any]]) -> None:
    """compile_only.md and compile_only.png."""
    facts = [f"- {name}: {value}" for name, value in where.items()]
    lines = ["# Train steps compiled for a GPU", "", *facts, "", ABOUT, "", "![Peak memory](compile_only.png)", ""]
    tables = [each for result in results for each in (table(result), *buffers(result))]
    (folder / "compile_only.md").write_text("\n".join([*lines, *(each.markdown() for each in tables)]))
    chart(results, folder / "compile_only.png", f"compiled for {where['target']}; {where['date'][:10]}")


def show(console: rich.console.Console, where: dict[str, str], results: list[dict[str, Any]]) -> None:
    """The same on a terminal, but for the picture."""
    for result in results:
        for each in (table(result), *buffers(result)):
            each.show(console)
    console.print("\n".join(f"- {name}: {value}" for name, value in where.items()), markup=False, highlight=False)


@plots.drawn
def chart(results: list[dict[str, Any]], path: Path, caption: str) -> None:
    """A panel a model: the peak of each step in GiB, torch.compile's as a line."""
    height = max(len(result["variants"]) for result in results)
    figure = plots.figure(3.2 + 3.4 * len(results), 1.3 + 0.3 * height)
    labels = list(dict.fromkeys(row["label"] for result in results for row in result["variants"].values()))
    for i, (axes, result) in enumerate(zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True)):
        plots.style(axes, result["model"], "peak memory, GiB")
        for row in result["variants"].values():
            y, gib = labels.index(row["label"]), row["peak"] / 2**30
            axes.barh(y, gib, color=plots.COLORS[2 if row["label"].startswith("jaxmp") else 5], height=0.65)
            axes.annotate(f"{gib:.2f}", (gib, y), (4, 0), textcoords="offset points", va="center", fontsize=8,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        if result["full"]:
            torch = RECORDED[result["name"]].torch / 1024
            axes.axvline(torch, color=plots.COLORS[1], linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(f"torch.compile, measured: {torch:.2f}", (torch, -0.8), (3, 0), textcoords="offset points",
                          fontsize=8, color=plots.COLORS[1])  # fmt: skip
        plots.row_axis(axes, labels, named=i == 0, above=1.2)
        axes.margins(x=0.16)
    plots.save(figure, path, caption)
