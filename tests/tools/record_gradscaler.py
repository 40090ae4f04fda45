"""Records what torch's GradScaler does, for the tests of loss scales to compare with.

Run by hand where torch is installed: ``python tests/record_gradscaler.py`` writes tests/gradscaler_traces.json. The
tests read that file, and need no torch.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

# Each run is a list of (finite?, number of steps).
Pattern = list[tuple[bool, int]]


def mixed(seed: int, steps: int, finite: float) -> Pattern:
    """Steps that are finite with the given probability."""
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
    """One run: the scale and the growth tracker after each step, and the scaler's state at the start and the end."""
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
    """``values`` as [first, length] of each run whose neighbours differ by ``stride``."""
    found: list[list[float]] = []
    for value in values:
        if found and value == found[-1][0] + stride * found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(record(*run))}" for name, run in RUNS.items()]
    text = f'{{\n "torch": {json.dumps(torch.__version__)},\n "runs": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    Path(__file__).with_name("gradscaler_traces.json").write_text(text)
