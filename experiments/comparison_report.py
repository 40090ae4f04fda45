"""What a comparison says: tables, the users' acceptance rule, one sentence."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from experiments import flops
from experiments.comparison import Outcome
from experiments.report import Table
from experiments.timing import quartiles

RESULT_COLUMNS = (
    "policy", "loss scale", "held-out loss", "accuracy %", "Δ loss", "Δ points", "zero gradients %: activations", "params",
    "skipped", "final scale",
)  # fmt: skip
COST_COLUMNS = ("policy", "loss scale", "ms/step", "quartiles", "step MiB", "device MiB")
RULE_COLUMNS = (
    "policy", "loss scale", "speed-up > 2", "memory saved > 30 %", "accuracy loss < 0.5", "tensor-core FLOPs > 80 %",
    "no NaN", "accepted",
)  # fmt: skip

NOTES = {
    "result": "Mean ± standard deviation over the seeds. Δ: the mean difference to float32 with the same seeds; points of "
    "accuracy. Zero gradients: of the entries that are not zero in float32, the share that is exactly zero here, for the "
    "same batch at the params where float32 ended, with the loss scale that this run ended with; activations are the "
    "outputs of the layers, params the params. Skipped: steps in all runs. Final scale: of the first seed.",
    "cost": "Time: median and quartiles of warm steps, all variants in turn in one process. Step MiB: what the compiled "
    "step needs at most (arguments, results and temporaries). Device MiB: the device's own peak; ≤ where another variant had "
    "set it before, – where the device does not count.",
    "rule": "The rule that users apply, against float32. FLOPs: those of a step's products and convolutions whose operands "
    "are float16, bfloat16, float8 or tensorfloat32, whatever the device at hand makes of them.",
}


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One part of the acceptance rule: what was measured, as text, and whether it suffices."""

    text: str
    met: bool


def median_ms(outcome: Outcome) -> float:
    """Median milliseconds a step."""
    return quartiles(outcome.milliseconds)[1]


def mean(outcome: Outcome, metric: str) -> float:
    """Held-out metric, mean over the seeds."""
    return statistics.fmean(test[metric] for test in outcome.test)


def difference(outcome: Outcome, baseline: Outcome, metric: str) -> float:
    """Mean over the seeds of the difference to the baseline with the same seed."""
    return statistics.fmean(
        own[metric] - other[metric] for own, other in zip(outcome.test, baseline.test, strict=True)
    )


def criteria(outcome: Outcome, baseline: Outcome) -> list[Criterion]:
    """The acceptance rule, criterion by criterion, in the order of :data:`RULE_COLUMNS`."""
    speed_up = median_ms(baseline) / median_ms(outcome)
    known = outcome.step_bytes is not None and baseline.step_bytes
    saved = 1 - outcome.step_bytes / baseline.step_bytes if known else math.nan
    lost = -100 * difference(outcome, baseline, "accuracy")
    share = flops.tensor_core_share(outcome.flops)
    finite = not outcome.failure and all(math.isfinite(test["loss"]) for test in outcome.test)
    return [
        Criterion(f"{speed_up:.2f}×", speed_up > 2),
        Criterion(f"{saved:.0%}" if known else "?", saved > 0.3),
        Criterion(f"{lost:.2f}", lost < 0.5),
        Criterion(f"{share:.0%}", share > 0.8),
        Criterion("", finite),
    ]


def tables(title: str, outcomes: list[Outcome]) -> list[Table]:
    """What came out, what it cost, and how the acceptance rule judges it."""
    baseline = outcomes[0]
    return [
        Table(f"{title}: result", RESULT_COLUMNS, [_result(o, baseline) for o in outcomes], 2, (NOTES["result"],)),
        Table(f"{title}: cost", COST_COLUMNS, [_cost(o) for o in outcomes], 2, (NOTES["cost"],)),
        Table(f"{title}: acceptance", RULE_COLUMNS, [_rule(o, baseline) for o in outcomes], 2, (NOTES["rule"],)),
    ]


def as_json(outcome: Outcome, baseline: Outcome) -> dict[str, Any]:
    """Everything that was measured, and the verdict."""
    judged = zip(RULE_COLUMNS[2:-1], criteria(outcome, baseline), strict=True)
    return {
        **dataclasses.asdict(outcome),
        "ms_per_step": median_ms(outcome),
        "tensor_core_share": flops.tensor_core_share(outcome.flops),
        "criteria": {name: {"measured": criterion.text, "met": criterion.met} for name, criterion in judged},
    }


def sentence(title: str, outcomes: list[Outcome]) -> str:
    """One sentence, made from the numbers: what the formats did to the held-out result of this task."""
    baseline, *others = outcomes
    failed = [o.label for o in others if o.failure or not math.isfinite(mean(o, "loss"))]
    deltas = {o.label: difference(o, baseline, "loss") for o in others if o.label not in failed}
    spread = max(0.02, 2 * _deviation(baseline, "loss"))  # a held-out loss moves by that much for no reason
    worse = {label: delta for label, delta in deltas.items() if delta > spread}
    start = f"on {title} float32 ends at a held-out loss of {mean(baseline, 'loss'):.2f}"
    parts = []
    if worse:
        zeros = {o.label: o.zero_activations for o in others}
        listed = [f"{label} {delta:.2f} above ({zeros[label]:.0%} of its activation gradients are zero)" for label, delta in worse.items()]
        parts.append(f"{_and(listed)}")
    near = [delta for label, delta in deltas.items() if label not in worse]
    if near:
        who = "the others" if worse else "every other policy"
        parts.append(f"{who} within {max(abs(delta) for delta in near):.3f} of it")
    if failed:
        parts.append(f"{_and(failed)} nowhere, for it was not finite")
    return f"{start}, {_and(parts)}"


def _deviation(outcome: Outcome, metric: str) -> float:
    values = [test[metric] for test in outcome.test]
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _result(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    def spread(metric: str, factor: float, digits: int) -> str:
        text = f"{factor * mean(outcome, metric):.{digits}f}"
        return f"{text} ± {factor * _deviation(outcome, metric):.{digits}f}" if len(outcome.test) > 1 else text

    is_baseline = outcome is baseline
    return (
        outcome.policy,
        outcome.loss_scale,
        spread("loss", 1, 3),
        spread("accuracy", 100, 2),
        "" if is_baseline else f"{difference(outcome, baseline, 'loss'):+.3f}",
        "" if is_baseline else f"{100 * difference(outcome, baseline, 'accuracy'):+.2f}",
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
    judged = criteria(outcome, baseline)
    cells = [f"{'✓' if criterion.met else '✗'} {criterion.text}".strip() for criterion in judged]
    return (*name, *cells, "yes" if all(criterion.met for criterion in judged) else "no")
