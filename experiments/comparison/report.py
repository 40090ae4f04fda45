"""The report of a comparison: tables, an acceptance rule, and a conclusion."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import numpy as np

from experiments.comparison.outcomes import Outcome
from experiments.measure import flops
from experiments.report.tables import Table, deviating

RESULT_COLUMNS = (
    "policy", "loss scale", "seeds", "held-out loss", "accuracy %", "Δ loss", "Δ points",
    "zero gradients %: activations", "params", "skipped", "final scale",
)  # fmt: skip
RULE_COLUMNS = (
    "policy", "loss scale", "ms/step", "step MiB", "speed-up > 2", "memory saved > 30 %", "accuracy loss < 0.5",
    "tensor-core FLOPs > 80 %", "no NaN", "accepted",
)  # fmt: skip
NOTES = {
    "result": "Mean ± standard deviation over the seeds. Δ: mean difference to {baseline} with the same seeds, in loss "
    "and in points of accuracy. Zero gradients: of the entries that are not zero in {baseline}, the share that is "
    "exactly zero here. They are counted for the first batch at the final params, with the final loss scale and the "
    "first seed. Activations are the results of matrix products, convolutions and embeddings. Skipped: skipped steps "
    "in all runs. Final scale: with the first seed.",
    "rule": "The acceptance rule, compared with {baseline}. ms/step: the mean over the steps of training. Step MiB: "
    "peak memory of the compiled step (arguments, results and temporaries). Accuracy loss: in points. FLOPs: the share "
    "of FLOPs in products and convolutions whose operands are float16, bfloat16, float8 or tensorfloat32, even if this "
    "device computes them in another dtype.",
    "no tensor cores": "Time and memory are not shown, because this device has no tensor cores. Without tensor cores "
    "half precision is slower and saves little memory. Run the comparison on a GPU or TPU to see them.",
}


class Criterion(NamedTuple):
    """A criterion of the acceptance rule: the measured figure as text, and whether it is met."""

    text: str
    met: bool

    def __str__(self) -> str:
        return f"{'✓' if self.met else '✗'} {self.text}".strip()


def mean(outcome: Outcome, metric: str) -> float:
    """Return a held-out metric, averaged over the seeds."""
    return statistics.fmean(run["test"][metric] for run in outcome.runs)


def difference(outcome: Outcome, baseline: Outcome, metric: str) -> float:
    """Return the difference to the baseline, averaged over the seeds that both have."""
    reference = {run["seed"]: run["test"][metric] for run in baseline.runs}
    gaps = [run["test"][metric] - reference[run["seed"]] for run in outcome.runs if run["seed"] in reference]
    return statistics.fmean(gaps) if gaps else math.nan


def criteria(outcome: Outcome, baseline: Outcome) -> list[Criterion]:
    """Return the criteria of the acceptance rule, in the order of :data:`RULE_COLUMNS`."""
    speed_up = baseline.of_first("ms") / outcome.of_first("ms")
    bytes_, reference = outcome.of_first("step_bytes"), baseline.of_first("step_bytes")
    saved = 1 - bytes_ / reference if bytes_ is not None and reference else math.nan
    lost = -100 * difference(outcome, baseline, "accuracy")
    share = flops.tensor_core_share(outcome.of_first("flops"))
    finite = not outcome.failure and math.isfinite(mean(outcome, "loss"))
    return [
        Criterion(f"{speed_up:.2f}×", speed_up > 2),
        Criterion("?" if math.isnan(saved) else f"{saved:.0%}", saved > 0.3),
        Criterion(f"{round(lost, 2) + 0.0:.2f}", lost < 0.5),
        Criterion(f"{share:.0%}", share > 0.8),
        Criterion("", finite),
    ]


def tables(title: str, outcomes: list[Outcome], tensor_cores: bool) -> list[Table]:
    """Return a table of results and, on a device with ``tensor_cores``, one of costs and the acceptance rule."""
    baseline = outcomes[0]
    notes = {name: note.format(baseline=baseline.policy) for name, note in NOTES.items()}
    results = [_result(outcome, baseline) for outcome in outcomes]
    if not tensor_cores:
        return [Table(f"{title}: result", RESULT_COLUMNS, results, 2, (notes["result"], notes["no tensor cores"]))]
    judged = [_rule(outcome, baseline) for outcome in outcomes]
    return [
        Table(f"{title}: result", RESULT_COLUMNS, results, 2, (notes["result"],)),
        Table(f"{title}: acceptance", RULE_COLUMNS, judged, 2, (notes["rule"],)),
    ]


def conclusion(title: str, outcomes: list[Outcome], metric: str) -> str:
    """Return sentences on the held-out results of a task."""
    baseline, *others = outcomes
    name = baseline.policy
    if not math.isfinite(mean(baseline, metric)):
        return f"On {title}, {name} itself did not stay finite."
    worse, near, failed = _verdicts(outcomes, metric)
    gaps = {outcome.label: _loss_of_quality(outcome, baseline, metric) for outcome in worse + near}
    if metric == "loss":
        reached, unit, side, least, digits = f"{mean(baseline, 'loss'):.2f}", "", "above", 0.001, ".3f"
    else:
        reached = f"{100 * mean(baseline, 'accuracy'):.1f} %"
        unit, side, least, digits = " points", "below", 0.01, ".2f"
    sentences = [f"On {title}, {name} ends at a held-out {metric} of {reached}."]
    if worse:
        ends, whose = ("ends", "its") if len(worse) == 1 else ("end", "their")
        by = _range([gaps[outcome.label] for outcome in worse], ".2f")
        sentences.append(f"{_and(map(_spoken, worse))} {ends} {by}{unit} {side} {name}.")
        zeros = _range([100 * outcome.of_first("zero_activations") for outcome in worse], ".0f")
        sentences.append(f"{zeros} % of {whose} activation gradients became zero.")
    if near:
        who = "All other variants" if len(near) == len(others) > 1 else _and(map(_spoken, near))
        ends = "ends" if len(near) == 1 else "end"
        largest = max(abs(gaps[outcome.label]) for outcome in near)
        steps = max(1, math.ceil(round(largest / least, 6)))  # rounded up, so that the sentence is true
        sentences.append(f"{who} {ends} within {steps * least:{digits}}{unit} of {name}.")
    if failed:
        sentences.append(f"{_and(map(_spoken, failed))} did not stay finite.")
    return " ".join(sentences)


def _verdicts(outcomes: list[Outcome], metric: str) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
    """Split the outcomes into worse than the baseline, near it, and not finite.

    An outcome is worse if the difference is more than two standard deviations over the baseline's seeds, and more than
    0.02 in loss or 0.5 points of accuracy.
    """
    baseline, *others = outcomes
    least, scale = (0.02, 1) if metric == "loss" else (0.5, 100)
    values = [run["test"][metric] for run in baseline.runs]
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    threshold = max(least, 2 * scale * deviation)
    worse, near, failed = [], [], []
    for outcome in others:
        if outcome.failure or not math.isfinite(mean(outcome, metric)):
            failed.append(outcome)
        elif _loss_of_quality(outcome, baseline, metric) > threshold:
            worse.append(outcome)
        else:
            near.append(outcome)
    return worse, near, failed


def _loss_of_quality(outcome: Outcome, baseline: Outcome, metric: str) -> float:
    """Return how much worse a result is than the baseline's.

    The unit is that of the loss, or points of accuracy.
    """
    change = difference(outcome, baseline, metric)
    return change if metric == "loss" else -100 * change


def _spoken(outcome: Outcome) -> str:
    if outcome.loss_scale != "none":
        return f"{outcome.policy} with {outcome.loss_scale} scaling"
    return f"{outcome.policy} without scaling" if "float16" in outcome.of_first("flops") else outcome.policy


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _signed(value: float, digits: int) -> str:
    """Return a number with its sign, but zero without a minus."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def _and(parts: Any) -> str:
    parts = list(parts)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


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


def _rule(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    bytes_ = outcome.of_first("step_bytes")
    cost = (f"{outcome.of_first('ms'):.4g}", "–" if bytes_ is None else f"{bytes_ / 2**20:.1f}")
    row = (outcome.policy, outcome.loss_scale, *cost)
    if outcome is baseline:
        return (*row, "reference", *[""] * (len(RULE_COLUMNS) - len(row) - 1))
    judged = criteria(outcome, baseline)
    return (*row, *map(str, judged), "yes" if all(criterion.met for criterion in judged) else "no")
