"""The table of a comparison."""

from __future__ import annotations

import math
import statistics

from experiments.comparison.outcomes import Outcome
from experiments.report.tables import Table, cell, deviating

COLUMNS = (
    "policy", "loss scale", "seeds", "held-out loss", "accuracy %", "Δ loss", "Δ points",
    "zero gradients %: activations", "params", "skipped", "final scale",
)  # fmt: skip
COSTS = ("ms/step", "speed-up", "step MiB", "memory saved")
"""Columns of devices with tensor cores. Without them half precision is slower and saves little memory."""
RESULT_NOTE = (
    "Mean ± standard deviation over the seeds. Δ: mean difference to {baseline} with the same seeds, in loss and in "
    "points of accuracy. Zero gradients: of the entries that are not zero in {baseline}, the share that is exactly "
    "zero here. They are counted for the first batch at the final params, with the final loss scale and first seed. "
    "Activations are the results of matrix products, convolutions and embeddings. Skipped: skipped steps in all runs. "
    "Final scale: with the first seed."
)
COSTS_NOTE = (
    "ms/step: the mean over the steps of training. Step MiB: peak memory of the compiled step (arguments, results and "
    "temporaries). Speed-up and memory saved: compared with {baseline}."
)
NO_COSTS_NOTE = (
    "Time and memory are not shown, because this device has no tensor cores. Run the comparison on a GPU or TPU to see "
    "them."
)


def mean(outcome: Outcome, metric: str) -> float:
    """Return a held-out metric, averaged over the seeds."""
    return statistics.fmean(run["test"][metric] for run in outcome.runs)


def difference(outcome: Outcome, baseline: Outcome, metric: str) -> float:
    """Return the difference to the baseline, averaged over the seeds that both have."""
    reference = {run["seed"]: run["test"][metric] for run in baseline.runs}
    gaps = [run["test"][metric] - reference[run["seed"]] for run in outcome.runs if run["seed"] in reference]
    return statistics.fmean(gaps) if gaps else math.nan


def table(title: str, outcomes: list[Outcome], tensor_cores: bool) -> Table:
    """Return the table of a task, with the costs of a step on a device with ``tensor_cores``."""
    baseline = outcomes[0]
    columns = (*COLUMNS, *COSTS) if tensor_cores else COLUMNS
    rows = []
    for outcome in outcomes:
        costs = _costs(outcome, baseline) if tensor_cores else ()
        rows.append((*_result(outcome, baseline), *costs))
    notes = (RESULT_NOTE, COSTS_NOTE if tensor_cores else NO_COSTS_NOTE)
    return Table(title, columns, rows, 2, tuple(note.format(baseline=baseline.policy) for note in notes))


def _result(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    is_baseline = outcome is baseline
    return (
        outcome.policy,
        outcome.loss_scale,
        f"{len(outcome.runs)}",
        deviating([run["test"]["loss"] for run in outcome.runs], ".3f"),
        deviating([100 * run["test"]["accuracy"] for run in outcome.runs], ".2f"),
        "" if is_baseline else _signed(difference(outcome, baseline, "loss"), 3),
        "" if is_baseline else _signed(100 * difference(outcome, baseline, "accuracy"), 2),
        "" if is_baseline else f"{100 * outcome.of_first('zero_activations'):.2f}",
        "" if is_baseline else f"{100 * outcome.of_first('zero_params'):.2f}",
        f"{sum(run['skipped'] for run in outcome.runs)}",
        f"{outcome.of_first('final_scale'):g}",
    )


def _costs(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    ms, bytes_, reference = outcome.of_first("ms"), outcome.of_first("step_bytes"), baseline.of_first("step_bytes")
    saved = 1 - bytes_ / reference if bytes_ is not None and reference else None
    return (
        cell(ms, ".4g"),
        cell(baseline.of_first("ms") / ms, ".2f"),
        cell(bytes_ and bytes_ / 2**20, ".1f"),
        cell(saved, ".0%"),
    )


def _signed(value: float, digits: int) -> str:
    """Return a number with its sign, but zero without a minus."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"
