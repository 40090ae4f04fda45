"""What the remat benchmark found: tables of time against memory, goals, the picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import rich.console

from experiments.benchmarks.shared import kept
from experiments.benchmarks.shared.workloads import FULL
from experiments.benchmarks.train_step.goals import LIMITS, RECORDED, REMAT_TIME, Goal
from experiments.measure.timing import quartiles
from experiments.models.transformer import Remat
from experiments.report import plots
from experiments.report.tables import Table
from experiments.training.runs import write_json

KINDS = get_args(Remat)
FIGURES = ("step_bytes", "peak", "largest")
"""What is found of a step alone."""
MIB = 2**20
COLUMNS = ("remat", "ms", "quartiles", "time ÷ none", "step MiB", "memory ÷ none", "peak MiB", "largest batch")
NOTE = (
    "Time: median and quartiles of warm steps, all kinds in turn in one process; ÷ none: of a round's time over the "
    "same round's without remat, median. Step MiB: what the compiled step needs at most (arguments, results and "
    "temporaries). Peak MiB: the device's own, each step in a process of its own, where the device counts."
)

Result = dict[str, Any]


def collect(folder: Path) -> Result:
    """All that a run folder has, joined: a group for each model and policy, a row for each kind of remat."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    parts = [kept.read(file) for file in sorted(folder.glob("*-*.json"))]
    parts.sort(key=lambda part: part["environment"]["date"])  # of what was measured twice the last counts
    for part in sorted(parts, key=lambda part: "times" in part):  # memory first
        group = groups.setdefault(
            (part["model"], part["policy"]),
            {**{name: part[name] for name in ("model", "policy", "text", "items", "unit", "setting")}, "rows": {}},
        )
        if "times" not in part:
            names = (*FIGURES, "error")
            group["rows"][part["remat"]] = {name: part[name] for name in names if part.get(name) is not None}
            continue
        for remat, found in part["times"].items():
            row, none = group["rows"].setdefault(remat, {}), part["times"].get("none")
            row.pop("error", None)
            own = found["milliseconds"]
            row["milliseconds"], row["ms"] = own, quartiles(own)
            if none:
                ratios = [a / b for a, b in zip(own, none["milliseconds"], strict=True)]
                row["ratio"] = quartiles(ratios)
        for remat, error in part["errors"].items():
            row = group["rows"].setdefault(remat, {})
            if "ms" not in row:  # times count more than why there were none
                row["error"] = error
    for group in groups.values():
        group["rows"] = {kind: group["rows"][kind] for kind in KINDS if kind in group["rows"]}
        group["goals"] = [goal.sentence() for goal in goals(group)]
    where = kept.joined([part["environment"] for part in parts])
    return {"environment": where, "groups": list(groups.values())}


def goals(group: dict[str, Any]) -> list[Goal]:
    """Those that can be judged. A smoke test has none."""
    found, attention = [], group["rows"].get("attention", {})
    if group["setting"]["smoke"]:
        return []
    if "ratio" in attention:
        name = "step time with remat of all but attention / without"
        found.append(Goal("remat_time", name, attention["ratio"][1], REMAT_TIME))
    full = group["setting"]["sizes"] == dataclasses.asdict(FULL[group["model"]])
    if full and group["policy"] == "mixed_bfloat16" and (need := attention.get("peak") or attention.get("step_bytes")):
        torch, limit = RECORDED[group["model"]].torch, LIMITS[group["model"]].remat_memory
        name = (
            f"peak memory with remat of all but attention, {need / MIB:,.0f} MiB, / the {torch:,} MiB that "
            "torch.compile AMP took on one H200"
        )
        found.append(Goal("remat_memory", name, need / MIB / torch, limit))
    return found


def table(group: dict[str, Any]) -> Table:
    """A row a kind of remat."""
    rows, none = [], group["rows"].get("none", {})
    for kind, row in group["rows"].items():
        cells = [kind, *[""] * (len(COLUMNS) - 1)]
        if "ms" in row:
            low, ms, high = row["ms"]
            cells[1:3] = [f"{ms:.4g}", f"{low:.4g} to {high:.4g}"]
        if "ratio" in row:
            cells[3] = f"{row['ratio'][1]:.3f}"
        if "step_bytes" in row:
            cells[4] = f"{row['step_bytes'] / MIB:,.0f}"
            cells[5] = f"{row['step_bytes'] / none['step_bytes']:.3f}" if "step_bytes" in none else ""
        if "peak" in row:
            cells[6] = f"{row['peak'] / MIB:,.0f}"
        if "batch" in row.get("largest", {}):
            cells[7] = str(row["largest"]["batch"])
        if "error" in row:
            cells[1] = row["error"]
        rows.append(tuple(cells))
    notes = [NOTE]
    if limits := {row["largest"]["limit"] for row in group["rows"].values() if "batch" in row.get("largest", {})}:
        limit = " to ".join(f"{size / MIB:,.0f}" for size in sorted({min(limits), max(limits)}))
        notes.append(
            f"Largest batch: whose step needs at most {limit} MiB, by compiling; near that limit XLA computes some of "
            "a step again by itself."
        )
    notes += [row["largest"]["error"] for row in group["rows"].values() if "error" in row.get("largest", {})]
    smoke = "SMOKE TEST, no result: " if group["setting"]["smoke"] else ""
    return Table(f"{smoke}{group['text']}, {group['policy']}", COLUMNS, rows, 1, (*notes, *group["goals"]))


def write(folder: Path) -> Result:
    """Writes remat.md, remat.json and remat.png of all that the folder has, and returns it."""
    result = collect(folder)
    where = result["environment"]
    lines = ["# What rematerialisation buys", "", *(f"- {name}: {value}" for name, value in where.items()), ""]
    lines += ["![time against memory](remat.png)", "", *(table(group).markdown() for group in result["groups"])]
    (folder / "remat.md").write_text("\n".join(lines))
    write_json(folder / "remat.json", result)
    about = f"compiled for {where['target']}" if "target" in where else where["device"]
    picture(result["groups"], folder / "remat.png", f"{about}, {where['date'][:10]}")
    return result


@plots.drawn
def picture(groups: list[dict[str, Any]], path: Path, caption: str) -> None:
    """A panel a model: memory of a step against its time, both over those without remat; a line a policy.

    Where no times were measured, the largest batch takes their place.
    """
    models = dict.fromkeys(group["model"] for group in groups)
    figure = plots.figure(1 + 4.4 * len(models), 3.6)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        own = [group for group in groups if group["model"] == model]
        timed = any("ratio" in row for group in own for row in group["rows"].values())
        plots.style(axes, own[0]["text"], "memory ÷ none", "time ÷ none" if timed else "largest batch")
        axes.grid(axis="x", color=plots.LIGHT, linewidth=0.8)
        for i, group in enumerate(own):
            points, none = [], group["rows"].get("none", {}).get("step_bytes")
            for kind, row in group["rows"].items():
                y = row["ratio"][1] if "ratio" in row else None if timed else row.get("largest", {}).get("batch")
                if none and y is not None and "step_bytes" in row:
                    points.append((row["step_bytes"] / none, y))
                    axes.annotate(kind, points[-1], (6, 5), textcoords="offset points", fontsize=8)
            if points:
                axes.plot(
                    *zip(*points, strict=True), "o", color=plots.COLORS[2 + i], markersize=7, label=group["policy"]
                )
        axes.margins(x=0.2, y=0.2)
        axes.legend(fontsize=8, framealpha=1, edgecolor="#BBBBBB")  # in a frame: its dots are no measurements
    plots.save(figure, path, caption)


def show(result: Result, folder: Path) -> None:
    """Prints the tables and where they are."""
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=140)
    for group in result["groups"]:
        table(group).show(console)
        console.print()
    for name, value in result["environment"].items():
        console.print(f"- {name}: {value}", markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
