"""The report of a comparison: tables, an acceptance rule, and a conclusion."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import numpy as np

from experiments.comparison.outcomes import Outcome
from experiments.measure import flops
from experiments.measure.timing import quartiles
from experiments.report.tables import Table, deviating

RESULT_COLUMNS = (
    "policy", "loss scale", "held-out loss", "accuracy %", "Δ loss", "Δ points",
    "zero gradients %: activations", "params", "skipped", "final scale",
)  # fmt: skip
COST_COLUMNS = ("policy", "loss scale", "ms/step", "quartiles", "step MiB", "device MiB")
RULE_COLUMNS = (
    "policy", "loss scale", "speed-up > 2", "memory saved > 30 %", "accuracy loss < 0.5", "tensor-core FLOPs > 80 %",
    "no NaN", "accepted",
)  # fmt: skip

NOTES = {
    "result": "Mean ± standard deviation over the seeds. Δ: mean difference to float32 with the same seeds, in loss "
    "and in points of accuracy. Zero gradients: of the entries that are not zero in float32, the share that is "
    "exactly zero here. They are counted for one batch at float32's final params, with this variant's final loss "
    "scale. Activations are the results of matrix products, convolutions and embeddings. Skipped: skipped steps in all "
    "runs. Final scale: with the first seed.",
    "cost": "Time: median and quartiles of steps after warm-up, with all variants taking turns in one process. "
    "Step MiB: peak memory of the compiled step (arguments, results and temporaries). Device MiB: the peak that the "
    "device reports; ≤ if an earlier variant had the same peak, – if the device does not count its memory.",
    "rule": "The acceptance rule, compared with float32. Accuracy loss: in points. FLOPs: the share of FLOPs in "
    "products and convolutions whose operands are float16, bfloat16, float8 or tensorfloat32, even if this device "
    "computes them in another dtype.",
    "no tensor cores": "Time and memory are not shown, because this device has no tensor cores. Without tensor cores "
    "half precision is slower and saves little memory. Run the comparison on a GPU or TPU to see them.",
}


@dataclasses.dataclass(frozen=True)
class Criterion:
    """A criterion of the acceptance rule.

    Attributes:
      text: the measured figure as text.
      met: whether the criterion is met; None if it is not judged.
    """

    text: str
    met: bool | None

    def __str__(self) -> str:
        mark = {True: "✓ ", False: "✗ ", None: ""}[self.met]
        return f"{mark}{self.text}".strip()


def median_ms(outcome: Outcome) -> float:
    """Return the median milliseconds of a step."""
    return quartiles(outcome.milliseconds)[1]


def mean(outcome: Outcome, metric: str) -> float:
    """Return a held-out metric, averaged over the seeds."""
    return statistics.fmean(test[metric] for test in outcome.test)


def difference(outcome: Outcome, baseline: Outcome, metric: str) -> float:
    """Return the difference to the baseline, averaged over the seeds.

    Each run is compared with the baseline's run of the same seed.
    """
    pairs = zip(outcome.test, baseline.test, strict=True)
    return statistics.fmean(test[metric] - reference[metric] for test, reference in pairs)


def criteria(outcome: Outcome, baseline: Outcome, tensor_cores: bool) -> list[Criterion]:
    """Return the criteria of the acceptance rule.

    The criteria are in the order of :data:`RULE_COLUMNS`. Speed, memory and FLOPs are judged only on a device with
    ``tensor_cores``. Accuracy is judged on every device.
    """
    speed_up = median_ms(baseline) / median_ms(outcome)
    bytes_, reference = outcome.step_bytes, baseline.step_bytes
    saved = 1 - bytes_ / reference if bytes_ is not None and reference else math.nan
    lost = -100 * difference(outcome, baseline, "accuracy")
    share = flops.tensor_core_share(outcome.flops)
    finite = not outcome.failure and all(math.isfinite(test["loss"]) for test in outcome.test)
    return [
        Criterion(f"{speed_up:.2f}×", speed_up > 2 if tensor_cores else None),
        Criterion("?" if math.isnan(saved) else f"{saved:.0%}", saved > 0.3 if tensor_cores else None),
        Criterion(f"{round(lost, 2) + 0.0:.2f}", lost < 0.5),
        Criterion(f"{share:.0%}", share > 0.8 if tensor_cores else None),
        Criterion("", finite),
    ]


def tables(title: str, outcomes: list[Outcome], tensor_cores: bool) -> list[Table]:
    """Return tables of results, of costs and of the acceptance rule.

    Costs and the rule are shown only on a device with ``tensor_cores``.
    """
    baseline = outcomes[0]
    results = [_result(outcome, baseline) for outcome in outcomes]
    if not tensor_cores:
        return [Table(f"{title}: result", RESULT_COLUMNS, results, 2, (NOTES["result"], NOTES["no tensor cores"]))]
    costs = [_cost(outcome) for outcome in outcomes]
    judged = [_rule(outcome, baseline) for outcome in outcomes]
    return [
        Table(f"{title}: result", RESULT_COLUMNS, results, 2, (NOTES["result"],)),
        Table(f"{title}: cost", COST_COLUMNS, costs, 2, (NOTES["cost"],)),
        Table(f"{title}: acceptance", RULE_COLUMNS, judged, 2, (NOTES["rule"],)),
    ]


def as_json(outcome: Outcome, baseline: Outcome, tensor_cores: bool) -> dict[str, Any]:
    """Return all measurements and criteria as JSON values."""
    judged = zip(RULE_COLUMNS[2:-1], criteria(outcome, baseline, tensor_cores), strict=True)
    return {
        **dataclasses.asdict(outcome),
        "ms_per_step": median_ms(outcome),
        "tensor_core_share": flops.tensor_core_share(outcome.flops),
        "criteria": {name: {"measured": criterion.text, "met": criterion.met} for name, criterion in judged},
    }


def conclusion(title: str, outcomes: list[Outcome], metric: str) -> str:
    """Return sentences on the held-out results of a task."""
    baseline, *others = outcomes
    if not math.isfinite(mean(baseline, metric)):
        return f"On {title}, float32 itself did not stay finite."
    worse, near, failed = _verdicts(outcomes, metric)
    deltas = {id(o): _loss_of_quality(o, baseline, metric) for o in worse + near}
    if metric == "loss":
        reached = f"{mean(baseline, 'loss'):.2f}"
        unit, side, least, digits = "", "above", 0.001, ".3f"
    else:
        reached = f"{100 * mean(baseline, 'accuracy'):.1f} %"
        unit, side, least, digits = " points", "below", 0.01, ".2f"
    sentences = [f"On {title}, float32 ends at a held-out {metric} of {reached}."]
    if worse:
        ends, whose = ("ends", "its") if len(worse) == 1 else ("end", "their")
        gaps = _range([deltas[id(o)] for o in worse], ".2f")
        sentences.append(f"{_and([_spoken(o) for o in worse])} {ends} {gaps}{unit} {side} float32.")
        zeros = _range([100 * o.zero_activations for o in worse], ".0f")
        sentences.append(f"{zeros} % of {whose} activation gradients became zero.")
    if near:
        is_everyone = len(near) == len(others) > 1
        who = "All other variants" if is_everyone else _and([_spoken(o) for o in near])
        ends = "ends" if len(near) == 1 else "end"
        largest = max(abs(deltas[id(o)]) for o in near)
        steps = max(1, math.ceil(round(largest / least, 6)))  # rounded up, so that the sentence is true
        sentences.append(f"{who} {ends} within {steps * least:{digits}}{unit} of float32.")
    if failed:
        sentences.append(f"{_and([_spoken(o) for o in failed])} did not stay finite.")
    return " ".join(sentences)


def takeaway(results: dict[str, list[Outcome]], metrics: dict[str, str], tensor_cores: bool) -> str:
    """Return which policies are as good as float32 in all tasks, and which not."""
    names: dict[str, bool] = {}
    for task, outcomes in results.items():
        if not math.isfinite(mean(outcomes[0], metrics[task])):
            return f"float32 itself did not stay finite on {task}, so there is nothing to compare with."
        worse, near, failed = _verdicts(outcomes, metrics[task])
        for outcome in worse + near + failed:
            name = _spoken(outcome)
            names[name] = names.get(name, True) and outcome in near
    good, bad = ([name for name, is_good in names.items() if is_good == wanted] for wanted in (True, False))
    parts = []
    if good:
        parts.append(f"Safe here, as good as float32: {_and(good)}.")
    if bad:
        parts.append(f"Worse than float32, or not finite: {_and(bad)}.")
    if not tensor_cores:
        parts.append("Run it on a GPU to see the gains in time and memory.")
    return " ".join(parts)


def _verdicts(outcomes: list[Outcome], metric: str) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
    """Split the outcomes into worse than float32, near it, and not finite.

    An outcome is worse if the difference is more than two standard deviations over float32's seeds, and more than 0.02
    in loss or 0.5 points of accuracy.
    """
    baseline, *others = outcomes
    least, scale = (0.02, 1) if metric == "loss" else (0.5, 100)
    threshold = max(least, 2 * scale * _deviation(baseline, metric))
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
    """Return how much worse a result is than float32's.

    The unit is that of the loss, or points of accuracy.
    """
    change = difference(outcome, baseline, metric)
    return change if metric == "loss" else -100 * change


def _spoken(outcome: Outcome) -> str:
    if outcome.loss_scale != "none":
        return f"{outcome.policy} with {outcome.loss_scale} scaling"
    return f"{outcome.policy} without scaling" if "float16" in outcome.flops else outcome.policy


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _deviation(outcome: Outcome, metric: str) -> float:
    values = [test[metric] for test in outcome.test]
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _signed(value: float, digits: int) -> str:
    """Return a number with its sign, but zero without a minus."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _result(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    is_baseline = outcome is baseline
    return (
        outcome.policy,
        outcome.loss_scale,
        deviating([test["loss"] for test in outcome.test], ".3f"),
        deviating([100 * test["accuracy"] for test in outcome.test], ".2f"),
        "" if is_baseline else _signed(difference(outcome, baseline, "loss"), 3),
        "" if is_baseline else _signed(100 * difference(outcome, baseline, "accuracy"), 2),
        "" if is_baseline else f"{100 * outcome.zero_activations:.2f}",
        "" if is_baseline else f"{100 * outcome.zero_params:.2f}",
        str(sum(outcome.skipped)),
        f"{outcome.final_scale[0]:g}",
    )


def _cost(outcome: Outcome) -> tuple[str, ...]:
    low, middle, high = quartiles(outcome.milliseconds)
    bound = "≤ " if outcome.device_bytes_is_bound else ""
    return (
        outcome.policy,
        outcome.loss_scale,
        f"{middle:.4g}",
        f"{low:.4g} to {high:.4g}",
        "–" if outcome.step_bytes is None else f"{outcome.step_bytes / 2**20:.1f}",
        "–" if outcome.device_bytes is None else f"{bound}{outcome.device_bytes / 2**20:.1f}",
    )


def _rule(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    name = (outcome.policy, outcome.loss_scale)
    if outcome is baseline:
        return (*name, *["reference"], *[""] * (len(RULE_COLUMNS) - 3))
    judged = criteria(outcome, baseline, tensor_cores=True)
    accepted = "yes" if all(criterion.met for criterion in judged) else "no"
    return (*name, *map(str, judged), accepted)
