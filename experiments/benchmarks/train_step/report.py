"""The tables, the goals and the picture of what lies in a run folder of benchmarks.train_step."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import rich.console

from experiments.benchmarks.train_step import goals as train_step_goals
from experiments.benchmarks.train_step.results import Results, read
from experiments.benchmarks.train_step.rows import ROWS, Pass, rows_of
from experiments.report import plots
from experiments.report.tables import Table
from experiments.training.runs import write_json

COLUMNS: dict[Pass, tuple[str, ...]] = {
    "train": (
        "row", "ms", "quartiles", "/ torch.compile", "{unit}/s", "peak MiB", "/ torch.compile", "program MiB",
        "of the ceiling", "FLOPs on tensor cores", "time in their kernels", "J a step", "compile s",
    ),
    "forward": ("row", "ms", "quartiles", "/ torch.compile", "{unit}/s", "peak MiB", "/ torch.compile", "program MiB",
                "of the ceiling", "time in their kernels", "J a pass", "compile s"),
}  # fmt: skip
TITLES = {"train": "the train step", "forward": "the forward pass alone"}
EXPLANATION = (
    "A ratio of times is a round's time over the same round's time of the fastest of torch.compile's rows in half, "
    "median over the rounds. Peaks are of processes of their own, by JAX's and torch's allocators: torch's since the "
    "row was compiled and had run once, so without what only its search for kernels needed; JAX's, which cannot be "
    "set back, of the whole process, with XLA's search for kernels. Program MiB is what a program needs by XLA's own "
    "account, without any search; where the device counts no memory it stands for the peak, too, marked c. "
    "Utilisation is the model's FLOPs (three times those of the forward pass) over the time, against the fastest "
    "product of the row's dtype on this device. FLOPs on tensor cores are the share of a step's products in dtypes "
    "that these multiply; time in their kernels is the share of a trace's kernel time in kernels whose names say that "
    "they do. Rows compile one after the other and share XLA's choice of kernels: the first one's compile time has "
    "most of it."
)


def table(results: Results, which: Pass) -> Table:
    """A row for each of ``ROWS``, with its figures or with why there are none."""
    columns = tuple(column.format(unit=results.about["unit"]) for column in COLUMNS[which])
    rows = []
    for key, row in rows_of(results.about["model"]).items():
        if which == "forward" and not row.forward:
            continue
        found = results.figures(which, key)
        if not found and row.missing is None:
            continue
        if row.missing and not found:
            found = {"error": f"not installed: {row.missing}"}
        cells = [row.label, found["error"]] if "error" in found else [row.label, *_cells(results, which, key)]
        rows.append(tuple(cells + [""] * (len(columns) - len(cells))))
    notes = train_step_goals.sentences(results) if which == "train" else []
    smoke = "SMOKE TEST, no result: " if results.about["setting"]["smoke"] else ""
    return Table(f"{smoke}{results.about['text']}: {TITLES[which]}", columns, rows, notes=tuple(notes))


def _cells(results: Results, which: Pass, key: str) -> list[str]:
    found, reference = results.figures(which, key), results.reference(which)
    cells = ["", "", "", ""]
    if "ms" in found:
        low, ms, high = found["ms"]
        ratio = results.ratio(which, key, reference) if reference else None
        per_second = 1000 * results.about["items"] / ms
        cells = [f"{ms:.4g}", f"{low:.4g} to {high:.4g}", f"{ratio[1]:.3f}" if ratio else "", f"{per_second:,.0f}"]
    memory = results.memory(which, key)
    other = results.memory(which, reference) if reference else None
    cells += [
        "" if memory is None else f"{memory / 2**20:,.1f}{' c' if found.get('peak') is None else ''}",
        f"{memory / other:.3f}" if memory and other else "",
        "" if found.get("compiled_bytes") is None else f"{found['compiled_bytes'] / 2**20:,.1f}",
        _percent(results.utilisation(which, key)),
    ]
    if which == "train":
        cells.append(_percent(found.get("tensor_flops")))
    joules, seconds = found.get("joules"), found.get("compile_seconds")
    return [
        *cells,
        _percent(found.get("tensor_time")),
        "" if joules is None else f"{joules:.3g}",
        "" if seconds is None else f"{seconds:.1f}",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def ceiling_note(ceiling: dict[str, Any]) -> str:
    """The ceilings in a sentence."""
    best = ", ".join(f"{kind} {tflops:.3g}" for kind, tflops in ceiling.get("best", {}).items())
    return f"Fastest product on this device, TFLOP/s: {best}; a copy moves {ceiling.get('copy', 0):.3g} TB/s."


def show(results: dict[str, Results], console: rich.console.Console) -> None:
    """Prints the tables."""
    for each in results.values():
        for which in each.passes():
            table(each, which).show(console)
    for each in list(results.values())[:1]:
        console.print(ceiling_note(each.ceiling), *_facts(each.about), sep="\n", markup=False, highlight=False)


def write(folder: Path) -> dict[str, Results]:
    """Writes train_step.md, .json and .png of what lies in a run folder, if there is anything, and returns it.

    Raises:
      ValueError: a file is no result of a run.
    """
    results = read(folder)
    if not results:
        return results
    lines = ["# A train step in mixed precision", ""]
    for each in list(results.values())[:1]:
        lines += [*_facts(each.about), "", EXPLANATION, "", ceiling_note(each.ceiling), ""]
        lines += ["![milliseconds and peak memory of a train step](train_step.png)", ""]
    summary: dict[str, Any] = {}
    for name, each in results.items():
        passes = each.passes()
        lines += [table(each, which).markdown() for which in passes]
        lines += [f"Measured {each.about['measured']} by `{each.about['environment']['command']}`.", ""]
        rows = {which: {key: each.figures(which, key) for key in rows_of(name)} for which in passes}
        summary[name] = {key: each.about[key] for key in ("text", "sizes", "items", "unit", "model_flops")}
        summary[name] |= {"environment": each.about["environment"], "goals": train_step_goals.sentences(each)}
        summary[name].update(rows)
        summary[name]["turns"] = each.turns
    (folder / "train_step.md").write_text("\n".join(lines))
    ceiling = next((each.ceiling for each in results.values()), {})
    write_json(folder / "train_step.json", {"ceiling": ceiling, "models": summary})
    picture(results, folder / "train_step.png")
    return results


def _facts(about: dict[str, Any]) -> list[str]:
    return [f"- {name}: {value}" for name, value in about["environment"].items()]


@plots.drawn
def picture(results: dict[str, Results], path: Path) -> None:
    """Bars of each row's milliseconds, and of its peak memory, a column a model."""
    most = max(len(rows_of(name)) for name in results)
    figure = plots.figure(2 + 4.2 * len(results), 1.2 + 0.44 * most)
    grid = figure.subplots(2, len(results), squeeze=False)
    for (name, each), (top, bottom) in zip(results.items(), grid.T, strict=True):
        keys = [key for key in rows_of(name) if "ms" in each.figures("train", key) or each.memory("train", key)]
        times = [statistics.median(each.figures("train", key).get("milliseconds") or [0]) for key in keys]
        sizes = [(each.memory("train", key) or 0) / 2**30 for key in keys]
        for axes, values, title in ((top, times, f"{each.about['text']}: ms"), (bottom, sizes, "peak memory, GiB")):
            plots.style(axes, title)
            axes.barh(range(len(keys)), values, color=[_color(key) for key in keys], height=0.7)
            for i, value in enumerate(values):
                if value:
                    axes.annotate(
                        f"{value:.3g}", (value, i), (3, 0), textcoords="offset points", va="center", fontsize=7
                    )
            plots.row_axis(axes, [ROWS[key].label for key in keys])
            axes.locator_params(axis="x", nbins=4)
            axes.margins(x=0.16)
    where = next(iter(results.values())).about["environment"]
    plots.save(figure, path, f"{where['device']}, {where['date'][:10]}")


def _color(key: str) -> str:
    """jaxmp, other JAX and torch told apart."""
    row = ROWS[key]
    return plots.COLORS[5 if row.torch else 2 if row.library in ("jaxmp", "autocast", "unprepared") else 6]
