"""What the runs of the accuracy benchmark say: differences to float32, goals, tables, curves."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import rich.console

from experiments.comparison.outcomes import BASELINE
from experiments.report import plots
from experiments.report.tables import Table
from experiments.training.runs import write_json

METRICS = {"images": "accuracy", "gpt2": "loss", "bert": "loss"}
UNITS = {"accuracy": "points of accuracy", "loss": "% of the loss"}
POINTS_LOST, POINTS_AIM, LOSS_PERCENT, SEEDS = 0.5, 0.1, 0.5, 3
COLUMNS = (
    "policy", "loss scale", "seeds", "accuracy %", "loss", "Δ", "minutes", "× faster", "memory", "memory saved",
    "skipped",
)  # fmt: skip
NOTE = (
    "Held out: mean ± standard deviation over the seeds. Δ: to float32 with the same seed, mean ± standard deviation "
    "over the seeds, {unit}. Minutes: of training, without compilation and evaluation. Memory: what the compiled step "
    "needs at most (arguments, results and temporaries). Skipped: steps in all runs."
)
_POINTS = 100  # of a curve in a record: the mean over so many spans of steps

Record = dict[str, Any]


def outcome(metrics: Path, summary: dict[str, Any], failure: str, steps: int) -> Record:
    """What came out of a run: its curves and its end, of ``metrics.csv`` and, unless it failed, of its summary."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    ms = summary.get("ms_per_step")
    return {
        "train": _curve(train, _POINTS),
        "test": _curve(test, len(test)),
        "final": {name: summary.get(f"test_{name}", math.nan) for name in ("loss", "accuracy")},
        "skipped": summary.get("skipped", sum(int(row["skipped"]) for row in train)),
        "ms_per_step": math.nan if ms is None else ms,
        "minutes": math.nan if ms is None else ms * steps / 60_000,
        "first_step_s": summary.get("first_step_s", math.nan),
        "final_scale": summary.get("loss_scale", math.nan),
        "failure": failure,
    }


def _curve(rows: list[dict[str, str]], points: int) -> dict[str, list[float]]:
    """Steps and metrics, each value the mean over a span of steps; without a metric that the rows do not have."""
    names = [name for name in ("step", "loss", "accuracy") if rows and rows[0][name]]
    spans = (
        np.array_split([[float(row[name]) for name in names] for row in rows], min(points, len(rows))) if rows else []
    )
    return {name: [float(f"{span[:, i].mean():.6g}") for span in spans] for i, name in enumerate(names)}


def read(path: Path) -> Record:
    """A run's record as :func:`experiments.training.runs.write_json` wrote it, its numbers numbers again."""
    record = json.loads(path.read_text())
    for name in ("minutes", "ms_per_step", "first_step_s", "final_scale"):
        record[name] = float(record[name])
    for curve in (record["train"], record["test"]):
        curve.update({name: [float(value) for value in values] for name, values in curve.items()})
    record["final"] = {name: float(record["final"][name]) for name in ("loss", "accuracy")}
    return record


def by_variant(records: list[Record]) -> dict[str, dict[tuple[str, str], list[Record]]]:
    """Task to policy and loss scale to the runs of each seed, in the order of ``records``."""
    found: dict[str, dict[tuple[str, str], list[Record]]] = {}
    for record in records:
        found.setdefault(record["task"], {}).setdefault((record["policy"], record["loss_scale"]), []).append(record)
    return found


def label(policy: str, loss_scale: str) -> str:
    """The policy, and the loss scale if there is one."""
    return policy if loss_scale == "none" else f"{policy}, {loss_scale}"


def difference(task: str, own: dict[str, Any], other: dict[str, Any]) -> Any:
    """Of a run's metrics to float32's: points of accuracy for images, percent of the loss for text."""
    if METRICS[task] == "accuracy":
        return 100 * (np.asarray(own["accuracy"]) - np.asarray(other["accuracy"]))
    return 100 * (np.asarray(own["loss"]) / np.asarray(other["loss"]) - 1)


def differences(task: str, runs: list[Record], baseline: list[Record]) -> list[float]:
    """Of the final metrics, to float32 with the same seed."""
    reference = {run["seed"]: run["final"] for run in baseline}
    return [float(difference(task, run["final"], reference[run["seed"]])) for run in runs if run["seed"] in reference]


def goal(task: str, name: str, runs: list[Record], baseline: list[Record]) -> tuple[bool | None, str]:
    """Whether a policy reaches the task's goal, None while that is open, and a sentence that says so.

    Runs that stopped decide it at once, all others together only when there are ``SEEDS`` of them.
    """
    found = differences(task, runs, baseline)
    if failed := [run for run in runs if run["failure"]]:
        return False, f"NOT MET: {name} stopped with seed {failed[0]['seed']}: {failed[0]['failure']}"
    if not found:
        return None, f"open: {name} has no seed in common with float32"
    mean, seeds = statistics.fmean(found), f"{len(found)} seed{'s' * (len(found) > 1)}"
    few = "" if len(found) >= SEEDS else f", of {SEEDS} that are wanted"
    if METRICS[task] == "accuracy":
        met, reached = mean >= -POINTS_LOST, "reached" if mean >= -POINTS_AIM else "not reached"
        rule = f"the goal at most {POINTS_LOST} lost (aim {POINTS_AIM}: {reached})"
    else:
        met, rule = mean <= LOSS_PERCENT, f"the goal at most {LOSS_PERCENT} gained"
    far = f"{spread(found, '+.2f')} {UNITS[METRICS[task]]}"
    word = "open" if few else "met" if met else "NOT MET"
    return None if few else met, f"{word}: {name} is {far} from float32 over {seeds}{few}, {rule}"


def spread(values: list[float], form: str) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    if not values:
        return ""
    text = format(statistics.fmean(values), form)
    return f"{text} ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else text


def title(runs: list[Record]) -> str:
    """What was trained, in words."""
    setting = runs[0]["setting"]
    size = f" at {size}×{size}" if (size := setting.get("image_size")) else ""
    smoke = "SMOKE TEST, no result: " if setting["smoke"] else ""
    deep = f" of {setting['layers']} layers" if "layers" in setting else ""
    return f"{smoke}{setting.get('model', runs[0]['task'])}{deep} on {setting['dataset']}{size}"


def table(task: str, variants: dict[tuple[str, str], list[Record]]) -> Table:
    """A row a policy, and the goals below."""
    baseline = variants.get(BASELINE, [])
    rows = [_row(task, *variant, runs, baseline) for variant, runs in variants.items()]
    notes = [NOTE.format(unit=UNITS[METRICS[task]])]
    notes += [judged[1] for judged in goals(task, variants).values()]
    first = next(iter(variants.values()))
    what = f"{title(first)}, {first[0]['steps']} steps of {first[0]['batch_size']} {first[0]['unit']}"
    return Table(what, COLUMNS, rows, 2, tuple(notes))


def goals(task: str, variants: dict[tuple[str, str], list[Record]]) -> dict[str, tuple[bool | None, str]]:
    """Every policy but float32 to :func:`goal` of it."""
    baseline = variants.get(BASELINE, [])
    return {
        label(*variant): goal(task, label(*variant), runs, baseline)
        for variant, runs in variants.items()
        if variant != BASELINE
    }


def _row(task: str, policy: str, loss_scale: str, runs: list[Record], baseline: list[Record]) -> tuple[str, ...]:
    def mean(of: list[Record], name: str) -> float:
        values = [run[name] for run in of if run[name] is not None]
        return statistics.fmean(values) if values else math.nan

    minutes, bytes_ = mean(runs, "minutes"), mean(runs, "step_bytes")
    faster = mean(baseline, "minutes") / minutes if minutes else math.nan
    saved = 1 - bytes_ / mean(baseline, "step_bytes") if bytes_ else math.nan
    own = runs is baseline
    return (
        policy,
        loss_scale,
        str(len(runs)),
        spread([100 * run["final"]["accuracy"] for run in runs], ".2f"),
        spread([run["final"]["loss"] for run in runs], ".4f"),
        "" if own else spread(differences(task, runs, baseline), "+.2f"),
        "" if math.isnan(minutes) else f"{minutes:.3g}",
        "" if own or math.isnan(faster) else f"{faster:.2f}",
        "" if math.isnan(bytes_) else f"{bytes_ / 2**20:.0f} MiB",
        "" if own or math.isnan(saved) else f"{100 * saved:.0f} %",
        str(sum(run["skipped"] for run in runs)),
    )


def facts(records: list[Record]) -> dict[str, str]:
    """Device, versions, dates, commands and data of all runs; what differs among them side by side."""
    environments = [record["environment"] for record in records]

    def distinct(values: Any) -> str:
        return "; ".join(dict.fromkeys(sorted(values)))

    dates = sorted(environment["date"] for environment in environments)
    return {
        "device": distinct(environment["device"] for environment in environments),
        "versions": distinct(environment["versions"] for environment in environments),
        "date": dates[0] if dates[0][:10] == dates[-1][:10] else f"{dates[0][:10]} to {dates[-1][:10]}",
        "command": distinct(environment["command"] for environment in environments),
        "data": distinct(record["data"] for record in records),
    }


def write(records: list[Record], folder: Path) -> None:
    """Writes accuracy.md, accuracy.json and accuracy.png."""
    where, tasks = facts(records), by_variant(records)
    lines = ["# Accuracy under every policy", "", "![curves](accuracy.png)", ""]
    lines += [f"- {name}: {value}" for name, value in where.items()]
    tables = [table(task, variants).markdown() for task, variants in tasks.items()]
    (folder / "accuracy.md").write_text("\n".join([*lines, "", *tables]))
    judged = {
        task: {name: {"met": met, "text": text} for name, (met, text) in goals(task, variants).items()}
        for task, variants in tasks.items()
    }
    write_json(folder / "accuracy.json", {"environment": where, "goals": judged, "runs": records})
    drawn = {
        title(next(iter(variants.values()))): {
            "runs": {label(*variant): runs for variant, runs in variants.items()},
            "differences": {
                label(*variant): _difference_curves(task, runs, variants.get(BASELINE, []))
                for variant, runs in variants.items()
                if variant != BASELINE
            },
            "unit": UNITS[METRICS[task]],
            "goal": POINTS_LOST if METRICS[task] == "accuracy" else LOSS_PERCENT,
        }
        for task, variants in tasks.items()
    }
    picture(drawn, folder / "accuracy.png", f"{where['device']}, {where['date'][:10]}")


def _difference_curves(task: str, runs: list[Record], baseline: list[Record]) -> list[dict[str, Any]]:
    """Of the held-out curves, to float32 with the same seed, as far as both go."""
    reference = {run["seed"]: run["test"] for run in baseline}
    found = []
    for own, other in ((run["test"], reference[run["seed"]]) for run in runs if run["seed"] in reference):
        both = min(len(own["step"]), len(other["step"]))
        ends = ({name: values[:both] for name, values in curve.items()} for curve in (own, other))
        found.append({"step": own["step"][:both], "difference": difference(task, *ends)})
    return found


@plots.drawn
def picture(tasks: dict[str, dict[str, Any]], path: Path, caption: str) -> None:
    """A row a task: loss and accuracy against steps, and the held-out difference to float32; mean over the seeds.

    Args:
      tasks: title to ``runs`` (policy to records of runs, each with curves ``train`` and ``test``), ``differences``
        (policy to curves of a ``difference``), ``unit`` (its own) and ``goal`` (the largest that counts as met).
      path: of the picture.
      caption: below it.
    """
    figure = plots.figure(14, 0.6 + 3.2 * len(tasks))
    grid = figure.subplots(len(tasks), 3, squeeze=False)
    for (title, task), row in zip(tasks.items(), grid, strict=True):
        others = [label for label in task["runs"] if label != "float32"]
        colors = {label: plots.COLORS[1 + i % (len(plots.COLORS) - 1)] for i, label in enumerate(others)} | {
            "float32": "#9A9A9A"
        }
        for axes, name in zip(row, ("loss", "accuracy"), strict=False):
            plots.style(axes, f"{title}: {name}" if name == "loss" else name, "step")
            for label, runs in task["runs"].items():
                for split, width in (("train", 0.8), ("test", 2.2)):
                    wide = width * (3 if label == "float32" else 1)  # it lies beneath the others
                    _mean_line(axes, [run[split] for run in runs], name, color=colors[label], linewidth=wide, alpha=0.8,
                               label=label if split == "test" else None)  # fmt: skip
        plots.style(row[2], f"held out, {task['unit']} from float32; grey: goal", "step")
        row[2].axhspan(-task["goal"], task["goal"], color="#F0F0F0", zorder=0)
        row[2].axhline(0, color=colors["float32"], linewidth=2)
        for label, found in task["differences"].items():
            _mean_line(row[2], found, "difference", color=colors[label], linewidth=2.2, alpha=0.8)
        row[1].legend(frameon=False, fontsize=7.5, title="thin: training, thick: held out", title_fontsize=7.5)
    plots.save(figure, path, caption, dpi=100)


def _mean_line(axes: Any, curves: list[dict[str, list[float]]], name: str, **look: Any) -> None:
    """The mean of curves over the steps that all of them have."""
    length = min((len(curve.get(name, ())) for curve in curves), default=0)
    if length:
        axes.plot(curves[0]["step"][:length], np.mean([curve[name][:length] for curve in curves], axis=0), **look)


def show(records: list[Record], folder: Path) -> None:
    """Prints the tables and where they are."""
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=180)
    for task, variants in by_variant(records).items():
        table(task, variants).show(console)
        console.print()
    for name, value in facts(records).items():
        console.print(f"- {name}: {value}", markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
