"""Write the table, the goals and the picture of a run folder."""

from __future__ import annotations

from pathlib import Path

from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.train_step.results import Results, read
from experiments.benchmarks.train_step.rows import REFERENCE, ROWS, rows_of
from experiments.report import plots
from experiments.report.tables import Table, cell, spread, titled

COLUMNS = (
    "row", "ms", "quartiles", "/ torch.compile", "{unit}/s", "peak MiB", "/ torch.compile", "program MiB",
    "J per call", "loss", "compile s")  # fmt: skip
EXPLANATION = (
    "A ratio of times is the time of a row divided by the time of torch.compile under AMP in bfloat16 in the "
    "same round. The median over the rounds is shown. Each peak is measured in a separate process, by the allocator "
    "of JAX or torch. torch's peak begins after the row was compiled and run once, so it leaves out the search for "
    "kernels. JAX's peak is of the whole process and includes XLA's search for kernels, because it cannot be reset. "
    "Program MiB is the memory that XLA plans for the program, without the search. If the device does not count its "
    "memory, program MiB takes the place of the peak, marked c. The energy is read while the row repeats alone. The "
    "learning rate is almost 0, so that all rows compute on the same numbers. Loss: after the timing. A row is not "
    "judged if its loss moved, or if it is not near those of the other rows. Rows share XLA's choice of kernels, so "
    "most of the search is in the compile time of the first row."
)


def table(results: Results) -> Table:
    """Return a table with a row for each of ``ROWS`` that was measured.

    A row without figures has the reason.
    """
    columns = tuple(column.format(unit=results.about["unit"]) for column in COLUMNS)
    rows = []
    for key, row in rows_of(results.about["model"]).items():
        figures = results.figures(key)
        if "error" in figures:
            rows.append((row.label, figures["error"]))
        elif figures:
            rows.append((row.label, *_cells(results, key)))
    title = titled(f"{results.about['text']}: the train step", results.about["setting"]["smoke"])
    return Table(title, columns, rows)


def _cells(results: Results, key: str) -> list[str]:
    figures = results.figures(key)
    ms = figures["ms"][1] if "ms" in figures else None
    ratio = results.ratio(key, REFERENCE)
    memory, compiled, other = results.memory(key), figures.get("compiled_bytes"), results.memory(REFERENCE)
    return [
        cell(ms, ".4g"),
        spread(figures["ms"], ".4g") if ms else "",
        cell(ratio and ratio[1], ".3f"),
        cell(ms and 1000 * results.about["items"] / ms, ",.0f"),
        cell(memory and memory / 2**20, ",.1f") + (" c" if memory and figures.get("peak") is None else ""),
        cell(memory / other if memory and other else None, ".3f"),
        cell(compiled and compiled / 2**20, ",.1f"),
        cell(figures.get("joules"), ".3g"),
        cell(figures.get("loss"), ".4g"),
        cell(figures.get("compile_seconds"), ".1f"),
    ]


def write(folder: Path) -> dict[str, Results]:
    """Write train_step.md, .json and .png of a run folder, and print the tables.

    If the folder has no results, nothing is written.

    Raises:
      ValueError: a file is not a result of a run.
    """
    results = read(folder)
    if not results:
        return results
    where = measurements.joined([of_model.about["environment"] for of_model in results.values()])
    models = {}
    for name, of_model in results.items():
        about = {key: of_model.about[key] for key in ("text", "sizes", "items", "unit", "environment")}
        rows = {key: of_model.figures(key) for key in rows_of(name)}
        models[name] = {**about, "rows": rows, "turns": of_model.turns}
    grid = list(zip(*map(pictures, results.values()), strict=True))
    title, shows = "A train step in mixed precision", "milliseconds and peak memory of a train step"
    tables = [table(of_model) for of_model in results.values()]
    records.record(folder, "train_step", title, where, tables, {"models": models}, [EXPLANATION], shows, grid)
    return results


def pictures(results: Results) -> tuple[plots.Panel, plots.Panel]:
    """Draw each row's milliseconds and peak memory.

    jaxmp, other JAX code and torch have different colours.
    """
    keys = [key for key in rows_of(results.about["model"]) if results.figures(key)]
    rows = [ROWS[key] for key in keys]
    colors = [
        plots.COLORS[5 if row.torch else 2 if row.library in ("jaxmp", "autocast", "unprepared") else 6] for row in rows
    ]
    times = {ROWS[key].label: results.figures(key).get("ms", (None, None))[1] for key in keys}
    memory = {ROWS[key].label: results.memory(key) for key in keys}
    sizes = {label: bytes_ and bytes_ / 2**30 for label, bytes_ in memory.items()}
    title = results.about["text"]
    return plots.Panel(title, "ms", times, colors=colors), plots.Panel(title, "peak, GiB", sizes, colors=colors)
