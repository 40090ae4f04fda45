"""Write the tables, the goals and the picture of a run folder."""

from __future__ import annotations

from pathlib import Path

from experiments.benchmarks.measure import ceiling, profiling
from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.shared.goals import share
from experiments.benchmarks.train_step import goals as train_step_goals
from experiments.benchmarks.train_step.results import Results, read
from experiments.benchmarks.train_step.rows import ROWS, Pass, rows_of
from experiments.report import plots
from experiments.report.tables import Table, cell, spread, titled
from jaxmp.inspect._profile.kinds import KINDS, UNKNOWN

COLUMNS = (
    "row", "ms", "quartiles", "/ torch.compile", "{unit}/s", "peak MiB", "/ torch.compile", "program MiB",
    "of the ceiling", "FLOPs on tensor cores", "time in tensor-core kernels", "J per call", "loss",
    "compile s")  # fmt: skip
POWER_COLUMNS = ("row", "J per call", "W", "limit, W", "SM MHz", "highest MHz", "clocks lowered by", "°C")
KINDS_NOTE = (
    "Milliseconds per call, from a trace of the same program without CUDA graphs. The compiled program tells the kinds "
    "apart, so these are more exact than the names of kernels. The JSON file has the modules with the most time."
)
TITLES = {"train": "the train step", "forward": "the forward pass alone"}
EXPLANATION = (
    "A ratio of times is the time of a row divided by the time of torch.compile's fastest half-precision row in the "
    "same round. The median over the rounds is shown. Each peak is measured in a separate process, by the allocator "
    "of JAX or torch. torch's peak begins after the row was compiled and run once, so it leaves out the search for "
    "kernels. JAX's peak is of the whole process and includes XLA's search for kernels, because it cannot be reset. "
    "Program MiB is the memory that XLA plans for the program, without the search. If the device does not count its "
    "memory, program MiB takes the place of the peak, marked c. Of the ceiling: the model's FLOPs per second, "
    "relative to the fastest product of the row's dtype on this device. The model's FLOPs are three times those of "
    "the forward pass. FLOPs on tensor cores: the share of a step's product FLOPs in dtypes that tensor cores "
    "multiply. Time in tensor-core kernels: the share of a trace's kernel time in kernels whose names say that they "
    "use tensor cores. The learning rate is almost 0, so that all rows compute on the same numbers. Loss: after "
    "the timing. A row is not judged if its loss moved, or if it is not near those of the other rows. Rows share XLA's "
    "choice of kernels, so most of the search is in the compile time of the first row."
)


SECONDS = (
    "The seconds that each measurement took. Start: imports and the start of the device in the row's process, and its "
    "end. Preparing is mostly compilation."
)
POWER = (
    "While the row repeats alone. Means over the samples; the highest temperature. Clocks lowered by: the share of "
    "samples in which the power limit or the temperature lowered the clocks. Time follows energy at the power limit."
)
KERNELS = (
    "Milliseconds per call, from a trace of three calls, by the names of the kernels. XLA fuses the optimizer with "
    "other elementwise code, so its optimizer counts as elementwise."
)


def table(results: Results, which: Pass) -> Table:
    """Return a table with a row for each of ``ROWS``.

    A row without figures has the reason.
    """
    columns = tuple(column.format(unit=results.about["unit"]) for column in COLUMNS)
    rows = []
    for key, row in rows_of(results.about["model"]).items():
        if which == "forward" and not row.forward:
            continue
        figures = results.figures(which, key)
        error = figures.get("error") or (f"not installed: {row.missing}" if row.missing and not figures else "")
        if figures or error:
            rows.append((row.label, *([error] if error else _cells(results, which, key))))
    notes = train_step_goals.sentences(results) if which == "train" else []
    title = titled(f"{results.about['text']}: {TITLES[which]}", results.about["setting"]["smoke"])
    return Table(title, columns, rows, notes=tuple(notes))


def _cells(results: Results, which: Pass, key: str) -> list[str]:
    figures, reference = results.figures(which, key), results.reference(which, key) or results.reference(which)
    ms = figures["ms"][1] if "ms" in figures else None
    ratio = results.ratio(which, key, reference) if reference else None
    memory, compiled = results.memory(which, key), figures.get("compiled_bytes")
    other = results.memory(which, reference) if reference else None
    return [
        cell(ms, ".4g"),
        spread(figures["ms"], ".4g") if ms else "",
        cell(ratio and ratio[1], ".3f"),
        cell(ms and 1000 * results.about["items"] / ms, ",.0f"),
        cell(memory and memory / 2**20, ",.1f") + (" c" if memory and figures.get("peak") is None else ""),
        cell(share(memory, other), ".3f"),
        cell(compiled and compiled / 2**20, ",.1f"),
        cell(results.utilisation(which, key), ".1%"),
        cell(figures.get("tensor_flops"), ".1%"),
        cell(figures.get("tensor_time"), ".1%"),
        cell(figures.get("joules"), ".3g"),
        cell(figures.get("loss"), ".4g"),
        cell(figures.get("compile_seconds"), ".1f"),
    ]


def power_table(results: Results, which: Pass) -> Table | None:
    """Return a table with the power and the clocks of the GPU, in a row for each of ``ROWS``.

    The result is None if they were not read.
    """
    rows = []
    for key in rows_of(results.about["model"]):
        figures = results.figures(which, key)
        if power := figures.get("power"):
            numbers = (power[name] for name in ("watts", "power_limit", "sm_clock", "max_sm_clock"))
            lowered = ", ".join(f"{reason} {part:.0%}" for reason, part in power["throttled"].items())
            energy = cell(figures["joules"], ".3g")
            rows.append(
                (ROWS[key].label, energy, *map("{:.0f}".format, numbers), lowered, f"{power['temperature']:.0f}")
            )
    title = titled(f"{results.about['text']}: {TITLES[which]}, power", results.about["setting"]["smoke"])
    return Table(title, POWER_COLUMNS, rows, notes=(POWER,)) if rows else None


def seconds_table(results: Results, which: Pass) -> Table | None:
    """Return a table with the seconds that each row took to measure, by part.

    The result is None if no row has them.
    """
    parts, rows = dict[str, None](), []
    seconds = {key: results.figures(which, key).get("seconds") for key in rows_of(results.about["model"])}
    measured = {key: laps for key, laps in seconds.items() if laps}
    for laps in measured.values():
        parts |= dict.fromkeys(laps)
    for key, laps in measured.items():
        figures = results.figures(which, key)
        wall = figures.get("wall_seconds")
        cells = (cell(laps.get(part), ".1f") for part in parts)
        start = wall and wall - sum(laps.values())
        rows.append((ROWS[key].label, cell(wall, ".1f"), cell(start, ".1f"), *cells))
    for rounds in results.rounds:
        if rounds["pass"] == which and rounds.get("seconds"):
            laps = rounds["seconds"]
            text = f"{len(rounds['rows'])} rows in turn, getting ready and timing"
            rows.append((text, cell(sum(laps.values()), ".1f"), "", cell(laps.get("preparing"), ".1f")))
    title = titled(f"{results.about['text']}: {TITLES[which]}, seconds", results.about["setting"]["smoke"])
    return Table(title, ("row", "all", "start", *parts), rows, notes=(SECONDS,)) if rows else None


def kernels_table(results: Results, which: Pass) -> Table | None:
    """Return a table with the milliseconds of each group of kernels, in a row for each of ``ROWS``.

    The result is None if no row has a trace.
    """
    groups = {
        key: groups for key in rows_of(results.about["model"]) if (groups := results.figures(which, key).get("groups"))
    }
    if not groups:
        return None
    rows = []
    for key, by_kind in groups.items():
        figures = results.figures(which, key)
        cells = (f"{by_kind[kind]['ms']:.2f}" if kind in by_kind else "–" for kind in profiling.GROUPS)
        rows.append((ROWS[key].label, *cells, f"{figures['kernel_ms']:.2f}", f"{figures['kernel_count']:,.0f}"))
    title = titled(f"{results.about['text']}: {TITLES[which]}, kernels by group", results.about["setting"]["smoke"])
    return Table(title, ("row", *profiling.GROUPS, "all", "kernels"), rows, notes=(KERNELS,))


def kinds_table(results: Results, which: Pass) -> Table | None:
    """Return a table with the milliseconds of each kind of work, in a row for each row of jaxmp.

    The kinds are those of :func:`jaxmp.inspect.profile`, which reads the compiled program. Rows without a trace, and
    rows most of whose kernels are of unknown kinds, are left out. The result is None if no row is left.
    """
    by_row = {}
    for key in rows_of(results.about["model"]):
        kinds = results.figures(which, key).get("kinds")
        if kinds and kinds.get(UNKNOWN, 0.0) < 0.5 * sum(kinds.values()):
            by_row[key] = kinds
    shown = [kind for kind in KINDS if any(kind in kinds for kinds in by_row.values())]
    rows = []
    for key, kinds in by_row.items():
        rows.append((ROWS[key].label, *(f"{kinds[kind]:.2f}" if kind in kinds else "–" for kind in shown)))
    title = titled(f"{results.about['text']}: {TITLES[which]}, by kind of work", results.about["setting"]["smoke"])
    return Table(title, ("row", *shown), rows, notes=(KINDS_NOTE,)) if rows else None


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
    ceilings = next(iter(results.values())).ceiling
    tables, models = [], {}
    for name, of_model in results.items():
        passes = of_model.passes()
        for which in passes:
            more = (make(of_model, which) for make in (kernels_table, kinds_table, power_table, seconds_table))
            tables += [table(of_model, which), *(extra for extra in more if extra)]
        about = {key: of_model.about[key] for key in ("text", "sizes", "items", "unit", "model_flops", "environment")}
        figures = {which: {key: of_model.figures(which, key) for key in rows_of(name)} for which in passes}
        models[name] = {**about, "goals": train_step_goals.sentences(of_model), **figures, "turns": of_model.turns}
        models[name]["rounds"] = of_model.rounds
    grid = list(zip(*map(pictures, results.values()), strict=True))
    text = [EXPLANATION, *([ceiling.sentence(ceilings)] if ceilings else [])]
    data = {"ceiling": ceilings, "models": models}
    title, shows = "A train step in mixed precision", "milliseconds and peak memory of a train step"
    records.record(folder, "train_step", title, where, tables, data, text, shows, grid)
    return results


def pictures(results: Results) -> tuple[plots.Panel, plots.Panel]:
    """Draw each row's milliseconds and peak memory.

    jaxmp, other JAX code and torch have different colours.
    """
    keys = [key for key in rows_of(results.about["model"]) if results.figures("train", key)]
    rows = [ROWS[key] for key in keys]
    colors = [
        plots.COLORS[5 if row.torch else 2 if row.library in ("jaxmp", "autocast", "unprepared") else 6] for row in rows
    ]
    times = {ROWS[key].label: results.figures("train", key).get("ms", (None, None))[1] for key in keys}
    memory = {ROWS[key].label: results.memory("train", key) for key in keys}
    sizes = {label: bytes_ and bytes_ / 2**30 for label, bytes_ in memory.items()}
    title = results.about["text"]
    return plots.Panel(title, "ms", times, colors=colors), plots.Panel(title, "peak, GiB", sizes, colors=colors)
