"""Write the main table of the README, on mixed precision on a GPU.

The table compares mixed precision for ResNet-50, BERT-Base and GPT-2 on a GPU. The figures come from the newest result
of each kind in experiments/results:

- train_step*: measured train steps
- compile_only*: train steps compiled for a GPU that was not attached
- remat*: the largest batch with and without rematerialisation
- accuracy*: accuracies

Figures that nobody has measured are left out, and a line says which command measures them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benchmarks.accuracy import report as accuracy_report
from experiments.benchmarks.compile_only import report as compile_only_report
from experiments.benchmarks.train_step import goals as train_step_goals
from experiments.benchmarks.train_step.goals import RECORDED
from experiments.benchmarks.train_step.results import Results
from experiments.models.workloads import FULL, Name
from experiments.report.goals import Goal
from experiments.report.tables import Table, deviating

MODELS = {"resnet50": "ResNet-50, 256×224×224", "bert": "BERT-Base, 64×512", "gpt2": "GPT-2 124M, 16×1024"}
TASKS = {"resnet50": "images", "bert": "bert", "gpt2": "gpt2"}
COMPILED, TYPED = "ᶜ", "ʳ"
_GOALS = "The goal of each figure is in brackets. ✓ means that the figure meets its goal, ✗ that it does not."
_MISSING = "`make gpu` measures what is missing."
NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of results, with the device, versions, date and command behind it."""

    path: Path
    data: dict[str, Any]
    where: dict[str, str]

    def line(self, root: Path) -> str:
        """Return the device, versions, date and command, after a link to the result."""
        link = f"[{self.path.parent.name}]({self.path.with_suffix('.md').relative_to(root)})"
        device = self.where["device"]
        if "target" in self.where:
            device = f"compiled for {self.where['target']} on {device}, not run"
        return f"{link}: {device}; {self.where['versions']}; {self.where['date'][:10]}; `{self.where['command']}`"


@dataclasses.dataclass(frozen=True)
class Row:
    """A table row: its name, and a function that returns the text of a model's cell."""

    name: str
    cell: Callable[[Sources, str], str]


def newest(results: Path, name: str, holds: Callable[[dict[str, Any]], bool]) -> Source | None:
    """Return the newest result of :func:`all_of`, or None."""
    candidates = all_of(results, name, holds)
    return max(candidates, key=lambda source: (source.where["date"], str(source.path)), default=None)


def all_of(results: Path, name: str, holds: Callable[[dict[str, Any]], bool]) -> list[Source]:
    """Return the files ``results/NAME*/NAME.json`` that fit.

    A result fits if ``holds`` is true for it. ``holds`` leaves out smoke tests and runs of small models.

    Raises:
      ValueError: one of the files is not JSON.
    """
    candidates = []
    for path in results.glob(f"{name}*/{name}.json"):
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not a result of a run ({error}); write it again, or remove it") from error
        where = data.get("environment") or next((m["environment"] for m in data.get("models", {}).values()), None)
        if where and holds(data):
            candidates.append(Source(path, data, where))
    return candidates


def gradient_sums(results: Path) -> Source | None:
    """Return the newest result of the benchmark gradient_sums."""
    return newest(results, "gradient_sums", lambda run: not run["smoke"])


def full(model: Name, rows: dict[str, Any] | None) -> bool:
    """Return whether the rows of a result are those of the model in its full size."""
    return rows is not None and rows["sizes"] == dataclasses.asdict(FULL[model])


def steps_of(source: Source | None, model: Name) -> Results:
    """Return the measurements of a model's train step in full size, if the source has them."""
    rows = source.data["models"].get(model) if source else None
    if not rows or not full(model, rows):
        return Results({"model": model}, {}, {}, {})
    alone = {key: {"train": row} for key, row in rows.get("train", {}).items()}
    return Results({"model": model}, alone, rows.get("turns", {}), {})


def _has_steps_of(model: Name, data: dict[str, Any]) -> bool:
    return full(model, data["models"].get(model))


def _whole(run: dict[str, Any]) -> bool:
    return run["setting"].get("whole", False)


class Sources:
    """The newest results of each kind.

    Args:
      results: the folder of results.

    Attributes:
      train_steps: by model, the newest train steps that were measured on a device.
    """

    def __init__(self, results: Path) -> None:
        self.train_steps = {model: newest(results, "train_step", partial(_has_steps_of, model)) for model in MODELS}
        self.compiled = newest(results, "compile_only", lambda data: any(r["full"] for r in data["results"]))
        self.accuracy = newest(results, "accuracy", lambda data: any(_whole(run) for run in data["runs"]))
        self.remat = newest(
            results, "remat", lambda data: any(full(group["model"], group["setting"]) for group in data["groups"])
        )

    def all(self) -> list[Source]:
        """Return the results that exist, each once."""
        sources = (*self.train_steps.values(), self.compiled, self.remat, self.accuracy)
        return list({source.path: source for source in sources if source}.values())

    def goals(self, model: str) -> dict[str, tuple[Goal, str]]:
        """Return a model's goals by key, each with the mark for its table cell.

        A measured figure has no mark. Where no figure was measured, the figure of the compiled step is used.
        """
        steps = steps_of(self.train_steps[model], model)
        goals = {goal.key: (goal, "") for goal in train_step_goals.goals(steps)}
        torch, float32 = (steps.memory("train", key) for key in (steps.reference("train") or "", "hand-fp32"))
        typed = {key for key, peak in (("memory", torch), ("remat_memory", torch), ("saved", float32)) if not peak}
        for result in self.compiled.data["results"] if self.compiled else []:
            if result["name"] == model and result["full"]:
                for goal in compile_only_report.goals(result, torch, float32):
                    if goal.key not in goals or goals[goal.key][0].value is None:
                        goals[goal.key] = goal, COMPILED + (TYPED if goal.key in typed else "")
        return goals


def goal(key: str, form: str = "") -> Callable[[Sources, str], str]:
    """Return a function that writes the cell of a goal.

    The cell is a dash for a model that has no such goal.
    """

    def cell(sources: Sources, model: str) -> str:
        judged, mark = sources.goals(model).get(key, (None, ""))
        return judged.cell(form, mark) if judged else "–"

    return cell


def largest(sources: Sources, model: str) -> str:
    """Return the largest batch without remat and with it.

    With remat, everything except attention is recomputed.
    """
    if model == "resnet50":
        return "–"
    for group in sources.remat.data["groups"] if sources.remat else []:
        if (group["model"], group["policy"]) == (model, "mixed_bfloat16") and full(model, group["setting"]):
            batches = [group["rows"].get(kind, {}).get("largest", {}).get("batch") for kind in ("none", "attention")]
            mark = COMPILED if "target" in group["setting"] else ""
            return f"{batches[0]} → {batches[1]}{mark}" if all(batches) else ""
    return ""


def accuracy(policy: str, loss_scale: str) -> Callable[[Sources, str], str]:
    """Return a function that writes the difference to float32.

    The difference is averaged over the seeds.
    """

    def cell(sources: Sources, model: str) -> str:
        runs = sources.accuracy.data["runs"] if sources.accuracy else []
        runs = [{**run, "final": {k: float(v) for k, v in run["final"].items()}} for run in runs if _whole(run)]
        variants = accuracy_report.by_variant(runs).get(TASKS[model], {})
        reference = accuracy_report.reference_of(variants)
        runs, baseline = (variants.get(key, []) for key in ((policy, loss_scale), reference))
        differences = accuracy_report.differences(TASKS[model], runs, baseline)
        if not differences:
            return ""
        if any(run["failure"] for run in runs):
            return "✗ stopped"
        met = accuracy_report.goal(TASKS[model], policy, runs, baseline)[0]
        unit = "points" if TASKS[model] == "images" else "% loss"
        seeds = f"{len(differences)} of {accuracy_report.SEEDS} seeds"
        mark, few = ("", f", {seeds}") if met is None else ("✓ " if met else "✗ ", "")
        return f"{mark}{deviating(differences, '+.2f')} {unit}{few}"

    return cell


ROWS = (
    Row("step time, relative to torch.compile AMP", goal("time")),
    Row("peak memory, relative to torch.compile AMP", goal("memory")),
    Row("peak memory with remat, relative to torch.compile AMP", goal("remat_memory")),
    Row("step time with remat, relative to torch.compile AMP", goal("remat_time")),
    Row("speed-up over float32 without tensor cores", goal("over_fp32")),
    Row("speed-up over TF32", goal("over_tf32")),
    Row("memory saved, relative to float32", goal("saved", ".0%")),
    Row("step time of fp16 with dynamic scaling, relative to a constant scale", goal("scaling")),
    Row("step time of autocast, relative to code by hand", goal("autocast_by_hand")),
    Row("step time of autocast, relative to a policy", goal("autocast")),
    Row("FLOPs of products in half on tensor cores", goal("half", ".1%")),
    Row("largest batch, without → with remat", largest),
    Row("accuracy of mixed_float16, relative to float32", accuracy("mixed_float16", "dynamic")),
    Row("accuracy of mixed_bfloat16, relative to float32", accuracy("mixed_bfloat16", "none")),
)


def _filled_table(sources: Sources) -> list[str]:
    """Return the table in lines of Markdown, without the rows that have no figure."""
    rows = []
    for row in ROWS:
        cells = [row.cell(sources, model) for model in MODELS]
        if not set(cells) <= {"", "–"}:
            rows.append((row.name, *(cell or NOT_MEASURED for cell in cells)))
    markdown = Table("", ("", *MODELS.values()), rows).markdown()
    return [line for line in markdown.splitlines() if line.startswith("|")]


def lines(results: Path, root: Path) -> tuple[list[str], list[str]]:
    """Return the filled rows in Markdown, and lines on the figures' origin.

    Args:
      results: the folder of results.
      root: the folder that links are relative to.
    """
    sources = Sources(results)
    table = _filled_table(sources)
    text = "".join(table)
    notes = [source.line(root) for source in sources.all()]
    shares = list[str]()
    if TYPED in text:
        peaks = ", ".join(
            f"{name.split(',')[0]} {RECORDED[model].torch:,} and {RECORDED[model].float32:,}"
            for column, (model, name) in enumerate(MODELS.items(), 2)  # after an empty text and the row's name
            if any(TYPED in line.split("|")[column] for line in table)
        )
        notes.insert(
            0,
            f"{TYPED} relative to peaks that were measured once on one H200 with torch 2.11.0+cu130, in MiB for "
            f"torch.compile AMP and for float32 in plain JAX: {peaks}. If you run "
            "`python -m experiments.benchmarks.train_step`, its peaks are used in their place.",
        )
        alike = {name: sources.goals(model).get("saved_compiled") for model, name in MODELS.items()}
        shares = [f"{name.split(',')[0]} {figures[0].value:.0%}" for name, figures in alike.items() if figures]
    if COMPILED in text:
        notes.insert(0, f"{COMPILED} compiled for an H200; no GPU was used.")
    shown = [_GOALS, "", *table, ""]
    if shares:
        shown += [
            f"If float32 is compiled too, without cuDNN's workspaces, the memory saved is {', '.join(shares)}.",
            "",
        ]
    if len(table) - 2 < len(ROWS) or NOT_MEASURED in text:  # the first two lines are headings
        shown += [f"{_MISSING} It also measures rows without any figure, which are not shown.", ""]
    return shown, [f"{note}\n" for note in notes]
