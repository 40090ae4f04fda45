"""Goals of a train step compared with torch.compile, code by hand and float32."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from experiments.benchmarks.train_step.results import Results
from experiments.benchmarks.train_step.rows import ROWS
from experiments.models.workloads import FULL
from experiments.report.goals import Goal, saved, share


class Limits(NamedTuple):
    """The goals of a model.

    Limits of ratios are upper limits. Limits of speed-ups and of the memory saved are lower limits. Times and peaks are
    relative to the fastest half-precision row of torch.compile AMP. The memory saved is compared with float32 by hand.
    ``remat_memory`` is None for ResNet-50.
    """

    time: float
    memory: float
    remat_memory: float | None
    over_fp32: float
    over_tf32: float
    saved: float


LIMITS = {
    "resnet50": Limits(0.93, 0.97, None, 6.5, 1.9, 0.50),
    "bert": Limits(0.94, 0.82, 0.62, 10, 2.6, 0.70),
    "gpt2": Limits(0.93, 0.82, 0.62, 10, 3.2, 0.75),
}
REMAT_TIME, SCALING, AUTOCAST, TENSOR_FLOPS = 1.08, 1.005, 1.01, 0.99
"""Limits for every model: time ratios of remat, loss scaling and autocast, and the share of FLOPs in half precision."""


class Recorded(NamedTuple):
    """Peaks in MiB, measured in one run on one NVIDIA H200.

    Attributes:
      torch: the peak of torch.compile under AMP in bfloat16, its fastest dtype.
      float32: the peak of JAX by hand in float32.
    """

    torch: int
    float32: int


RECORDED = {"resnet50": Recorded(10_908, 23_559), "bert": Recorded(13_938, 51_175), "gpt2": Recorded(8_648, 37_793)}


def goals(results: Results) -> list[Goal]:
    """Return the goals of the model.

    The goals apply to the full sizes on a GPU. Figures that were not measured are None.
    """
    limits = LIMITS[results.about["model"]]
    ours = results.fastest("train", "jaxmp-bf16", "jaxmp-fp16") or "jaxmp-bf16"
    torch = results.reference("train") or ""  # an empty name has no figures
    label, peer = ROWS[ours].label, ROWS[torch].label if torch else "torch.compile AMP"

    def time(row: str, other: str) -> float | None:
        ratio = results.ratio("train", row, other)
        return ratio[1] if ratio else None

    def memory(row: str, other: str) -> float | None:
        return share(results.memory("train", row), results.memory("train", other))

    def over(precision: str, name: str, limit: float) -> Goal:
        by_hand = time(f"hand-{precision}", ours)
        beside = f" ({by_hand:.2f} over {ROWS[f'hand-{precision}'].label})" if by_hand else ""
        name = f"speed-up over the same step in {name}{beside}"
        return Goal(f"over_{precision}", name, time(f"jaxmp-{precision}", ours), limit, least=True, form=".2f")

    remat, auto = "jaxmp-bf16-remat", "autocast-bf16"
    autocast, plain = "autocast of the float32 model, bf16 /", "unprepared-bf16"
    less = saved(memory(ours, "hand-fp32"))
    flops = results.figures("train", ours).get("flops") or {}
    half = share(flops.get("bfloat16", 0) + flops.get("float16", 0), sum(flops.values()))  # TF32 is not half
    judged = [
        Goal("time", f"step time of {label} / {peer}", time(ours, torch), limits.time),
        Goal("memory", f"peak memory of {label} / {peer}", memory(ours, torch), limits.memory),
        Goal("remat_memory", "peak memory with remat / torch.compile AMP", memory(remat, torch), limits.remat_memory),
        Goal("remat_time", "step time with remat / without", time(remat, "jaxmp-bf16"), REMAT_TIME),
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
