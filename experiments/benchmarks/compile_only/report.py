"""What benchmarks.compile_only found, held against the goals, as tables and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks.shared import records
from experiments.benchmarks.train_step.goals import LIMITS, RECORDED, TENSOR_FLOPS
from experiments.measure import programs
from experiments.report import plots
from experiments.report.goals import Goal, saved, share
from experiments.report.tables import Table

MIB = 2**20
COLUMNS = (
    "step", "temporaries MiB", "peak MiB", "/ torch.compile", "saved of fp32", "half FLOPs", "kernels", "GB moved",
    "layout GB", "predicted ms", "measured ms", "products",
)  # fmt: skip
AUTOCAST_MEMORY = 1.02
TIMES = {
    "resnet50-hand-fp32": 238.3, "resnet50-hand-tf32": 68.0, "resnet50-hand-fp16": 35.2, "resnet50-hand-bf16": 37.9,
    "gpt2-hand-fp32": 331.7, "gpt2-hand-tf32": 103.7, "gpt2-hand-fp16": 32.6, "gpt2-hand-bf16": 33.6,
    "bert-hand-tf32": 145.9, "bert-hand-fp16": 58.2, "bert-hand-bf16": 60.7,
    "resnet50-jmp-fp16": 36.18, "resnet50-flax-fp16": 36.31, "gpt2-jmp-fp16": 35.77, "gpt2-flax-fp16": 35.42,
}  # fmt: skip
"""Milliseconds a step, measured on one NVIDIA H200 with JAX 0.11.2, 2026-11-20, one run each."""
ABOUT = (
    "Compiled for the GPU, not run on it. Peak: arguments, results that reuse none of them, and temporaries, without "
    "the workspaces that cuDNN's kernels may ask for once there is a GPU to choose them on. "
    "`/ torch.compile`: of the peak that torch.compile under AMP had in bfloat16 (torch 2.11.0+cu130, one H200, "
    "2026-11-20, the same shapes and optimizer): " + ", ".join(f"{n} {r.torch:,} MiB" for n, r in RECORDED.items()) +
    ". `saved of fp32`: of the row by hand in float32. `half FLOPs`: share of the FLOPs that tensor cores do in "
    "float16 or bfloat16, cuDNN's attentions counted as two products forward and five backward over the whole square. "
    "`kernels`: launched by a step, a call of a library as one. `GB moved`: read and written by kernels other than "
    "products, convolutions and attention; `layout GB`: by those of them that only change a layout. `predicted ms`: by "
    "`jaxmp.inspect.roofline`; `measured ms`: on one H200, JAX 0.11.2, 2026-11-20, and how far off the prediction is."
)  # fmt: skip


def table(result: dict[str, Any]) -> Table:
    """A row a variant, and the goals."""
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
            programs.words(row["products"]),
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
        but = "" if same else f", but {programs.difference(auto['products'], half['products'])}"
        lines.append(f"{'met' if same else 'NOT MET'}: autocast has the products of the policy{but}")
        lines.append(f"autocast: {auto['launches'] - half['launches']:+,} kernels, "
                     f"{(auto['traffic'] - half['traffic']) / 1e9:+.2f} GB")  # fmt: skip
    if (plain := rows.get("jaxmp-fp16-unscaled")) and (row := rows.get("jaxmp-fp16")):
        kernels, moved = row["launches"] - plain["launches"], (row["traffic"] - plain["traffic"]) / 1e9
        more = (row["peak"] - plain["peak"]) / MIB
        lines.append(f"{row['label']}, against none: {kernels:+,} kernels, {moved:+.2f} GB, {more:+,.0f} MiB")
    return lines


class Timed(NamedTuple):
    """A step whose time is on record: milliseconds measured and predicted, and which it is."""

    measured: float
    predicted: float
    name: str

    @property
    def error(self) -> float:
        """How far off the prediction is, of what was measured."""
        return self.predicted / self.measured - 1


def on_record(results: Sequence[dict[str, Any]]) -> list[Timed]:
    """The steps whose times are on record, the fastest first."""
    return sorted(
        Timed(TIMES[f"{result['name']}-{key}"], row["predicted"], f"{result['name']}, {row['label']}")
        for result in results
        for key, row in result["variants"].items()
        if result["full"] and f"{result['name']}-{key}" in TIMES and row.get("predicted")
    )


def apart(one: Timed, other: Timed) -> float:
    """By what share two predictions differ, of the smaller."""
    return max(one.predicted, other.predicted) / min(one.predicted, other.predicted) - 1


def reversed_pairs(found: Sequence[Timed]) -> list[tuple[Timed, Timed]]:
    """Those of which the first, which was measured faster, is not predicted so; of the most apart first."""
    pairs = [pair for pair in itertools.combinations(found, 2) if pair[0].predicted >= pair[1].predicted]
    return sorted(pairs, key=lambda pair: -apart(*pair))


def predictions(results: Sequence[dict[str, Any]]) -> list[Table]:
    """The times on record beside those predicted, and how many pairs of them are in order."""
    found = on_record(results)
    if len(found) < 2:
        return []
    rows = [(each.name, f"{each.measured:.1f}", f"{each.predicted:.1f}", f"{each.error:+.1%}") for each in found]
    largest = max(abs(each.error) for each in found)
    pairs, ties = list(itertools.combinations(found, 2)), reversed_pairs(found)
    far = [pair for pair in pairs if apart(*pair) > largest]
    notes = [
        f"{len(pairs) - len(ties)} of {len(pairs)} pairs are ordered as measured; of those whose predictions differ by "
        f"more than the largest error, {largest:.1%}, {len(set(far) - set(ties))} of {len(far)}"
    ]
    if ties:
        named = "; ".join(f"{one.name} and {other.name} ({apart(one, other):.1%})" for one, other in ties)
        notes.append(f"not ordered, by how much the predictions differ: {named}")
    return [Table("Predicted and measured", ("step", "measured ms", "predicted ms", "error"), rows, notes=tuple(notes))]


def picture(result: dict[str, Any]) -> plots.Panel:
    """The peak of each step in GiB, torch.compile's as a line."""
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
    """compile_only.md, .json and .png, and the tables on the terminal."""
    title, data = "Train steps compiled for a GPU", {"results": results}
    tables, panels = [*map(table, results), *predictions(results)], [[*map(picture, results)]]
    records.record(folder, "compile_only", title, where, tables, data, [ABOUT], "Peak memory", panels)
