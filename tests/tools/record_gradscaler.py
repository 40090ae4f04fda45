"""Record what torch's GradScaler does, as the oracle for tests of loss scales.

Run it by hand in an environment with torch: ``python tests/tools/record_gradscaler.py`` writes gradscaler_traces.json
beside this file. The tests only read that file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

# A run as pairs of a bool and a number: whether the next steps are finite, and the number of these steps.
Pattern = list[tuple[bool, int]]


def mixed(seed: int, steps: int, finite: float) -> Pattern:
    """Return steps that are finite with the probability ``finite``."""
    rng = random.Random(seed)
    return [(rng.random() < finite, 1) for _ in range(steps)]


RUNS: dict[str, tuple[dict[str, float], Pattern]] = {
    "torch's defaults": ({}, [(True, 1999), (False, 1), (True, 2000), (False, 2), (True, 4001)]),
    "a short interval": ({"init_scale": 2.0**15, "growth_interval": 3}, mixed(0, 200, 0.8)),
    "growth at every finite step": ({"init_scale": 1.0, "growth_interval": 1}, mixed(1, 60, 0.6)),
    "backoff slower than growth": (
        {"init_scale": 2.0**20, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 4},
        mixed(2, 200, 0.75),
    ),
    "backoff faster than growth": (
        {"init_scale": 2.0**24, "growth_factor": 2.0, "backoff_factor": 0.125, "growth_interval": 2},
        mixed(3, 120, 0.85),
    ),
    "factors that are no powers of two": (
        {"init_scale": 1000.0, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 2},
        mixed(4, 200, 0.65),
    ),
    "factors that float32 rounds": (
        {"init_scale": 3000.0, "growth_factor": 1.1, "backoff_factor": 0.9, "growth_interval": 1},
        mixed(5, 100, 0.5),
    ),
    "growth up to float32's largest number": (
        {"init_scale": 2.0**120, "growth_interval": 2},
        [(True, 30), (False, 3), (True, 5), (False, 1), (True, 9)],
    ),
    "growth up to float32's largest number by 3": (
        {"init_scale": 2.0**124, "growth_factor": 3.0, "growth_interval": 1},
        [(True, 5), (False, 2), (True, 4)],
    ),
    "backoff to nothing": ({"init_scale": 2.0**-120, "growth_interval": 1}, [(False, 40), (True, 5)]),
}


def record(arguments: dict[str, float], pattern: Pattern) -> dict[str, object]:
    """Return the first state, and the scale and growth tracker after each step."""
    scaler = torch.amp.GradScaler("cpu", **arguments)
    param = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.zeros(1))  # makes the scaler's tensors
    start = scaler.state_dict()
    scales, trackers = [], []
    for finite, steps in pattern:
        for _ in range(steps):
            param.grad = torch.tensor([0.0 if finite else float("inf")])
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            trackers.append(scaler.state_dict()["_growth_tracker"])
    return {"start": start, "pattern": pattern, "scales": runs(scales), "trackers": runs(trackers, stride=1)}


def runs(values: list[float], stride: int = 0) -> list[list[float]]:
    """Split ``values`` into runs whose neighbours differ by ``stride``.

    Return the first value and the length of each run.
    """
    pairs: list[list[float]] = []
    for value in values:
        if pairs and value == pairs[-1][0] + stride * pairs[-1][1]:
            pairs[-1][1] += 1
        else:
            pairs.append([value, 1])
    return pairs


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(record(*run))}" for name, run in RUNS.items()]
    text = f'{{\n "torch": {json.dumps(torch.__version__)},\n "runs": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    Path(__file__).with_name("gradscaler_traces.json").write_text(text)
