"""Report the accuracy benchmark: differences to float32, goals and a picture."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.shared.goals import Goal, share
from experiments.comparison.outcomes import BASELINE, label
from experiments.report import plots
from experiments.report.tables import Table, deviating, titled

METRICS = {"images": "accuracy", "gpt2": "loss", "bert": "loss"}
UNITS = {"accuracy": "points of accuracy", "loss": "% of the loss"}
POINTS_LOST, POINTS_AIM, LOSS_PERCENT, LOW_PERCENT, FLOAT8_PERCENT, SEEDS = 0.5, 0.1, 0.5, 0.1, 0.3, 3
BFLOAT16 = ("mixed_bfloat16", "none")  # the policy that float8 products are compared with
TENSORFLOAT32 = ("tensorfloat32", "none")
HALF = (BFLOAT16, ("mixed_float16", "dynamic"))
TIME, MEMORY = 0.35, 0.50
"""The limits of ResNet-50's time and memory in half precision, relative to float32."""
COLUMNS = (
    "policy", "loss scale", "seeds", "accuracy %", "loss", "Δ", "minutes", "× faster", "memory", "memory saved",
    "skipped")  # fmt: skip
NOTE = (
    "Accuracy and loss are of held-out data. All metrics are the mean ± standard deviation over the seeds. Δ: "
    "difference to {reference} with the same seed, {unit}. Minutes: training time without compilation and evaluation. "
    "A row without accuracy trained for a few hundred steps only. Its minutes are those of all steps at that speed. "
    "Faster and memory saved: relative to float32. Memory: peak of the compiled step (arguments, results and "
    "temporaries). Skipped: skipped steps in all runs."
)
_POINTS = 100  # the number of points of a training curve in a record; each is the mean over a span of steps

Record = dict[str, Any]
Variants = dict[tuple[str, str], list[Record]]
"""The runs of all seeds, by policy and loss scale."""


def outcome(metrics: Path, summary: dict[str, Any], failure: str, steps: int) -> Record:
    """Return the curves and the result of a run, from its files."""
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    ms = summary.get("ms_per_step")
    return {
        "train": _curve(train, _POINTS),
        "test": _curve(test, len(test)),
        "final": {name: summary.get(f"test_{name}", math.nan) for name in ("loss", "accuracy")},
        "skipped": summary.get("skipped", sum(int(row["skipped"]) for row in train)),
        "minutes": math.nan if ms is None else ms * steps / 60_000,
        "final_scale": summary.get("loss_scale", math.nan),
        "failure": failure,
    }


def _curve(rows: list[dict[str, str]], points: int) -> dict[str, list[float]]:
    """Return the curves of the metrics in ``rows``, with at most ``points`` points.

    Each point is the mean over a span of steps.
    """
    names = [name for name in ("step", "loss", "accuracy") if rows and rows[0][name]]
    values = [[float(row[name]) for name in names] for row in rows]
    spans = np.array_split(values, min(points, len(rows))) if rows else []
    return {name: [float(f"{span[:, i].mean():.6g}") for span in spans] for i, name in enumerate(names)}


def by_variant(recorded: list[Record]) -> dict[str, Variants]:
    """Group the records by task, then by policy and loss scale.

    The order of the records is kept.
    """
    tasks: dict[str, Variants] = {}
    for record in recorded:
        tasks.setdefault(record["task"], {}).setdefault((record["policy"], record["loss_scale"]), []).append(record)
    return tasks


def complete(runs: list[Record]) -> list[Record]:
    """Return the runs that trained all their steps, not only enough of them to be timed."""
    return [run for run in runs if not run.get("brief")]


def reference_of(variants: Variants) -> tuple[str, str]:
    """Return the policy and the loss scale that accuracies are compared with.

    The policy is float32. If float32 was only timed, the policy is tensorfloat32.
    """
    is_timed_only = not complete(variants.get(BASELINE, []))
    return TENSORFLOAT32 if is_timed_only and complete(variants.get(TENSORFLOAT32, [])) else BASELINE


def differences(task: str, runs: list[Record], baseline: list[Record]) -> list[float]:
    """Return the difference to the baseline of each seed.

    The unit is points of accuracy, or % of the loss.
    """
    reference = {run["seed"]: run["final"] for run in complete(baseline)}
    pairs = [(run["final"], reference[run["seed"]]) for run in complete(runs) if run["seed"] in reference]
    if METRICS[task] == "accuracy":
        return [100 * (run["accuracy"] - other["accuracy"]) for run, other in pairs]
    return [100 * (run["loss"] / other["loss"] - 1) for run, other in pairs]


def goal(
    task: str, name: str, runs: list[Record], baseline: list[Record], reference: str = "float32"
) -> tuple[bool | None, str]:
    """Return whether a policy reaches the task's goal, and a sentence that says so.

    The goal limits the difference to ``baseline``, the runs of the policy ``reference``. A run that stopped early
    misses the goal. Otherwise the first result is None (open) until there are ``SEEDS`` seeds.
    """
    gains = differences(task, runs, baseline)
    if failed := [run for run in runs if run["failure"]]:
        return False, f"NOT MET: {name} stopped with seed {failed[0]['seed']}: {failed[0]['failure']}"
    if not gains:
        return None, f"open: {name} has no seed in common with {reference}"
    mean, seeds = statistics.fmean(gains), f"{len(gains)} seed{'s' * (len(gains) > 1)}"
    few = "" if len(gains) >= SEEDS else f", of {SEEDS} that are needed"
    if METRICS[task] == "accuracy":
        met, reached = mean >= -POINTS_LOST, "reached" if mean >= -POINTS_AIM else "not reached"
        rule = f"the goal at most {POINTS_LOST} lost (aim {POINTS_AIM}: {reached})"
    else:
        most = _most(name)
        met, rule = mean <= most, f"the goal at most {most} gained"
    far = f"{deviating(gains, '+.2f')} {UNITS[METRICS[task]]}"
    word = "open" if few else "met" if met else "NOT MET"
    return None if few else met, f"{word}: {name} is {far} from {reference} over {seeds}{few}, {rule}"


def title(runs: list[Record]) -> str:
    """Return a description of the training."""
    setting = runs[0]["setting"]
    size = f" at {size}×{size}" if (size := setting.get("image_size")) else ""
    deep = f" of {setting['layers']} layers" if "layers" in setting else ""
    return titled(f"{setting.get('model', runs[0]['task'])}{deep} on {setting['dataset']}{size}", setting["smoke"])


def _most(name: str) -> float:
    """Return how many percent the loss may be above the baseline's.

    The limit is lower for float8 products and for params without float32 copies.
    """
    return LOW_PERCENT if "+" in name else FLOAT8_PERCENT if "float8" in name else LOSS_PERCENT


def goals(task: str, variants: Variants) -> dict[str, tuple[bool | None, str]]:
    """Judge every policy but the reference by :func:`goal`.

    Policies with float8 products are compared with mixed_bfloat16 if it was trained, all others with
    :func:`reference_of`.
    """
    reference = reference_of(variants)
    judged = {
        label(*variant): runs
        for variant, runs in variants.items()
        if variant not in (BASELINE, reference) and (complete(runs) or any(run["failure"] for run in runs))
    }
    against = {
        name: BFLOAT16 if _most(name) == FLOAT8_PERCENT and BFLOAT16 in variants else reference for name in judged
    }
    return {
        name: goal(task, name, runs, variants.get(against[name], []), against[name][0]) for name, runs in judged.items()
    }


def savings(task: str, variants: Variants) -> list[Goal]:
    """Return the goals of ResNet-50's time and memory in half precision, relative to float32.

    They apply to the task's preset only.
    """
    baseline = variants.get(BASELINE, [])
    is_preset = bool(baseline) and all(run["setting"].get("whole") for run in baseline)
    if METRICS[task] != "accuracy" or not is_preset:
        return []
    judged = list[Goal]()
    for variant in HALF:
        if runs := variants.get(variant):
            name = label(*variant)
            time = share(_mean(runs, "minutes"), _mean(baseline, "minutes"))
            memory = share(_mean(runs, "step_bytes"), _mean(baseline, "step_bytes"))
            judged.append(Goal("time", f"training time of {name} / float32", time, TIME))
            judged.append(Goal("memory", f"memory of {name} / float32", memory, MEMORY))
    return judged


def _mean(runs: list[Record], name: str) -> float:
    return statistics.fmean([math.nan if run[name] is None else run[name] for run in runs] or [math.nan])


def table(task: str, variants: Variants) -> Table:
    """Return a table with a row for each policy, and the goals below."""
    reference = reference_of(variants)
    rows = [_row(task, *variant, runs, variants, variant == reference) for variant, runs in variants.items()]
    notes = [NOTE.format(unit=UNITS[METRICS[task]], reference=reference[0])]
    notes += [text for _, text in goals(task, variants).values()]
    notes += [goal.sentence() for goal in savings(task, variants)]
    first = next(iter(variants.values()))
    what = f"{title(first)}, {first[0]['steps']} steps of {first[0]['batch_size']} {first[0]['unit']}"
    return Table(what, COLUMNS, rows, 2, tuple(notes))


def _row(
    task: str, policy: str, loss_scale: str, runs: list[Record], variants: Variants, is_reference: bool
) -> tuple[str, ...]:
    def shown(value: float, form: str, hidden: bool = False) -> str:
        return "" if hidden or math.isnan(value) else form.format(value)

    baseline, reference = variants.get(BASELINE, []), variants.get(reference_of(variants), [])
    minutes, bytes_, is_baseline = _mean(runs, "minutes"), _mean(runs, "step_bytes"), runs is baseline
    return (
        policy,
        loss_scale,
        str(len(runs)),
        deviating([100 * run["final"]["accuracy"] for run in complete(runs)], ".2f"),
        deviating([run["final"]["loss"] for run in complete(runs)], ".4f"),
        "" if is_reference else deviating(differences(task, runs, reference), "+.2f"),
        shown(minutes, "{:.3g}"),
        shown(_mean(baseline, "minutes") / minutes if minutes else math.nan, "{:.2f}", is_baseline),
        shown(bytes_ / 2**20, "{:.0f} MiB"),
        shown(100 - 100 * bytes_ / _mean(baseline, "step_bytes"), "{:.0f} %", is_baseline),
        str(sum(run["skipped"] for run in runs)),
    )


def write(recorded: list[Record], folder: Path) -> None:
    """Write accuracy.md, accuracy.json and accuracy.png, and print the tables."""
    tasks = by_variant(recorded)
    where = measurements.joined([record["environment"] for record in recorded])
    where["data"] = "; ".join(sorted({record["data"] for record in recorded}))
    judged = {
        task: {name: {"met": met, "text": text} for name, (met, text) in goals(task, variants).items()}
        for task, variants in tasks.items()
    }
    tables, panels = ([make(*task) for task in tasks.items()] for make in (table, pictures))
    data = {"goals": judged, "runs": recorded}
    shows = "held-out metric, and its difference to float32"
    records.record(folder, "accuracy", "Accuracy under every policy", where, tables, data, (), shows, panels)


def pictures(task: str, variants: Variants) -> tuple[plots.Panel, plots.Panel]:
    """Draw each policy's held-out metric and its difference to float32.

    Each figure is drawn as its mean and its range over the seeds.
    """
    metric, baseline = METRICS[task], variants.get(reference_of(variants), [])
    held_out = {label(*variant): _range([run["final"][metric] for run in runs]) for variant, runs in variants.items()}
    far = {label(*variant): _range(differences(task, runs, baseline)) for variant, runs in variants.items()}
    most = min((_most(label(*variant)) for variant in variants if variant != BASELINE), default=LOSS_PERCENT)
    most = -POINTS_LOST if metric == "accuracy" else most
    left, right = ({"": {name: of for name, of in ranges.items() if of}} for ranges in (held_out, far))
    name, rows = title(next(iter(variants.values()))), dict.fromkeys(held_out)
    return (
        plots.Panel(name, f"held-out {metric}", rows, left, form=".4g"),
        plots.Panel(
            "", f"{UNITS[metric]} from {reference_of(variants)[0]}", rows, right, line=(most, "goal"), form="+.2f"
        ),
    )


def _range(values: list[float]) -> tuple[float, float, float] | None:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), statistics.fmean(finite), max(finite)) if finite else None
