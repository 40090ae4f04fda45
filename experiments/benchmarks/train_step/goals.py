"""Goals of a train step compared with torch.compile, code by hand and float32."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from experiments.benchmarks.models.workloads import FULL
from experiments.benchmarks.shared.goals import Goal, saved, share
from experiments.benchmarks.train_step.results import Results
from experiments.benchmarks.train_step.rows import REMAT, ROWS, SETTINGS


class Limits(NamedTuple):
    """The goals of a model.

    Limits of speed-ups and of the memory saved are lower limits. The memory saved is compared with float32 by hand.
    ``remat_memory`` is an upper limit, relative to torch.compile AMP; it is None for ResNet-50.
    """

    remat_memory: float | None
    over_fp32: float
    over_tf32: float
    saved: float


LIMITS = {
    "resnet50": Limits(None, 6.5, 1.9, 0.50),
    "bert": Limits(0.45, 10, 2.6, 0.70),
    "gpt2": Limits(0.45, 10, 3.2, 0.75),
}
TIME, MEMORY, REMAT_TIME = 0.93, 1.0, 1.08
"""Limits for every model, relative to the fastest half-precision row of torch.compile AMP. One setting should be faster
in at most as much memory. Another setting, with remat, may take a little more time."""
SCALING, AUTOCAST, TENSOR_FLOPS = 1.01, 1.01, 0.99
"""Limits for every model: time ratios of loss scaling and autocast, and the share of FLOPs in half precision."""


class Recorded(NamedTuple):
    """Peaks in MiB, measured in one run on one NVIDIA H200.

    Attributes:
      torch: the peak of torch.compile under AMP in bfloat16, its fastest dtype.
      float32: the peak of JAX by hand in float32.
    """

    torch: int
    float32: int


RECORDED = {"resnet50": Recorded(10_908, 23_559), "bert": Recorded(13_938, 51_175), "gpt2": Recorded(8_648, 37_793)}


def fastest_setting(results: Results) -> str:
    """Return the fastest row of ``SETTINGS`` that needs at most as much memory as torch.compile.

    If no row is known to do so, the fastest row is returned. If no row was compared with torch.compile, the row with
    the shortest time is returned.
    """
    ratios, within = dict[str, float](), dict[str, float]()
    for row in SETTINGS:
        torch = results.reference(row)
        ratio = results.ratio(row, torch) if torch else None
        if ratio is None:
            continue
        ratios[row] = ratio[1]
        memory = share(results.memory(row), results.memory(torch or ""))
        if memory is not None and memory <= MEMORY:
            within[row] = ratio[1]
    if known := within or ratios:
        return min(known, key=known.__getitem__)
    return results.fastest(*SETTINGS) or SETTINGS[0]


def goals(results: Results) -> list[Goal]:
    """Return the goals of the model.

    The goals apply to the full sizes on a GPU. Figures that were not measured are None.
    """
    limits = LIMITS[results.about["model"]]
    ours, remat = fastest_setting(results), results.fastest(*REMAT) or REMAT[0]
    auto = "autocast-bf16"

    def time(row: str, other: str | None) -> float | None:
        ratio = results.ratio(row, other) if other else None
        return ratio[1] if ratio else None

    def torch(row: str) -> str | None:
        return results.reference(row) or results.reference()

    def memory(row: str, other: str | None) -> float | None:
        return share(results.memory(row), results.memory(other)) if other else None

    def over(precision: str, name: str, limit: float) -> Goal:
        half = next((row for row in (ours, *SETTINGS) if time(f"jaxmp-{precision}", row)), ours)
        by_hand = time(f"hand-{precision}", half)
        beside = f" ({by_hand:.2f} over {ROWS[f'hand-{precision}'].label})" if by_hand else ""
        name = f"speed-up of {ROWS[half].label} over the same step in {name}{beside}"
        return Goal(f"over_{precision}", name, time(f"jaxmp-{precision}", half), limit, least=True, form=".2f")

    label, peer = ROWS[ours].label, ROWS[against].label if (against := torch(ours)) else "torch.compile AMP"
    autocast, plain = "autocast of the float32 model, bf16 /", "unprepared-bf16"
    less = saved(memory(ours, "hand-fp32"))
    flops = results.figures(ours).get("flops") or {}
    half = share(flops.get("bfloat16", 0) + flops.get("float16", 0), sum(flops.values()))  # TF32 is not half
    judged = [
        Goal("time", f"step time of {label} / {peer}", time(ours, torch(ours)), TIME),
        Goal("memory", f"peak memory of {label} / {peer}", memory(ours, torch(ours)), MEMORY),
        Goal(
            "remat_memory",
            "peak memory with remat / torch.compile AMP",
            memory(remat, torch(remat)),
            limits.remat_memory,
        ),
        Goal("remat_time", "step time with remat / torch.compile AMP", time(remat, torch(remat)), REMAT_TIME),
        over("fp32", "fp32 without tensor cores", limits.over_fp32),
        over("tf32", "TF32", limits.over_tf32),
        Goal("saved", "memory saved against float32 by hand", less, limits.saved, least=True, form=".2f"),
        Goal(
            "scaling",
            "fp16 with dynamic scaling / with a constant scale, unchecked",
            time("jaxmp-fp16", "jaxmp-fp16-constant"),
            SCALING,
        ),
        Goal("autocast_by_hand", f"{autocast} the same code by hand", time(plain, "hand-bf16"), AUTOCAST),
        Goal("autocast", f"{autocast} the same model with a policy", time(auto, "jaxmp-bf16"), AUTOCAST),
        Goal("half", "share of FLOPs on tensor cores in half", half, TENSOR_FLOPS, least=True),
    ]
    return [goal for goal in judged if limits.remat_memory is not None or "remat" not in goal.key]


def sentences(results: Results) -> list[str]:
    """Return a sentence for each goal, if the model has its full size."""
    if results.about["sizes"] != dataclasses.asdict(FULL[results.about["model"]]):
        return ["The goals are for the full sizes, so they are not judged here."]
    return [goal.sentence() for goal in goals(results)]
