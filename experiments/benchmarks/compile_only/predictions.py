"""Compare recorded times of train steps on an H200 with predictions.

:func:`jaxmp.inspect.roofline` makes the predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.report.tables import Table

TIMES = {
    "resnet50-hand-fp32": 238.3, "resnet50-hand-tf32": 68.0, "resnet50-hand-fp16": 35.2, "resnet50-hand-bf16": 37.9,
    "gpt2-hand-fp32": 331.7, "gpt2-hand-tf32": 103.7, "gpt2-hand-fp16": 32.6, "gpt2-hand-bf16": 33.6,
    "bert-hand-tf32": 145.9, "bert-hand-fp16": 58.2, "bert-hand-bf16": 60.7,
    "resnet50-jmp-fp16": 36.18, "resnet50-flax-fp16": 36.31, "gpt2-jmp-fp16": 35.77, "gpt2-flax-fp16": 35.42,
}  # fmt: skip
"""Milliseconds per step, measured on one NVIDIA H200 with JAX 0.11.2 on 2026-11-20.

Each step was measured in one run.
"""


class Timed(NamedTuple):
    """A train step with its measured and its predicted milliseconds."""

    measured: float
    predicted: float
    name: str

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measured time."""
        return self.predicted / self.measured - 1


def on_record(results: Sequence[dict[str, Any]]) -> list[Timed]:
    """Return the steps with a recorded time, the fastest first."""
    return sorted(
        Timed(TIMES[f"{result['name']}-{key}"], row["predicted"], f"{result['name']}, {row['label']}")
        for result in results
        for key, row in result["variants"].items()
        if result["full"] and f"{result['name']}-{key}" in TIMES and row.get("predicted")
    )


def apart(first: Timed, other: Timed) -> float:
    """Return the difference of two predictions, as a share of the smaller one."""
    return max(first.predicted, other.predicted) / min(first.predicted, other.predicted) - 1


def reversed_pairs(timed: Sequence[Timed]) -> list[tuple[Timed, Timed]]:
    """Return the pairs of steps whose predicted order is not the measured one.

    ``timed`` must be sorted by measured time. Pairs with equal predictions are returned too. The pairs with the largest
    difference in predictions come first.
    """
    pairs = [pair for pair in itertools.combinations(timed, 2) if pair[0].predicted >= pair[1].predicted]
    return sorted(pairs, key=lambda pair: -apart(*pair))


def predictions(results: Sequence[dict[str, Any]]) -> list[Table]:
    """Return a table of recorded and predicted times.

    Its note counts the pairs that are predicted in the measured order.
    """
    timed = on_record(results)
    if len(timed) < 2:
        return []
    rows = [(step.name, f"{step.measured:.1f}", f"{step.predicted:.1f}", f"{step.error:+.1%}") for step in timed]
    largest = max(abs(step.error) for step in timed)
    pairs, ties = list(itertools.combinations(timed, 2)), reversed_pairs(timed)
    far = [pair for pair in pairs if apart(*pair) > largest]
    notes = [
        f"{len(pairs) - len(ties)} of {len(pairs)} pairs are ordered as measured. Of the {len(far)} pairs "
        f"whose predictions differ by more than the largest error ({largest:.1%}), {len(set(far) - set(ties))} are "
        "ordered as measured."
    ]
    if ties:
        named = "; ".join(f"{first.name} and {other.name} ({apart(first, other):.1%})" for first, other in ties)
        notes.append(f"pairs in another order than measured, with the difference of their predictions: {named}")
    return [Table("Predicted and measured", ("step", "measured ms", "predicted ms", "error"), rows, notes=tuple(notes))]
