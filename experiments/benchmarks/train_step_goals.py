"""The goals of the train step against torch.compile, by hand and float32: met or not, with the figures."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from experiments.benchmarks.train_step_rows import ROWS
from experiments.benchmarks.workloads import FULL

if TYPE_CHECKING:
    from experiments.benchmarks.train_step_report import Results


@dataclasses.dataclass(frozen=True)
class Goals:
    """What a model is to reach; ratios of time and memory at most, speed-ups and savings at least.

    Attributes:
      time: step time over the fastest of torch.compile AMP's rows in half.
      memory: peak over the same row's of torch, of jaxmp's row of that time.
      remat_memory: the same with everything but attention computed again; None for ResNet-50.
      over_fp32: speed-up over the same step in float32 without tensor cores.
      over_tf32: over TF32.
      saved: memory saved against float32 by hand.
    """

    time: float
    memory: float
    remat_memory: float | None
    over_fp32: float
    over_tf32: float
    saved: float


GOALS = {
    "resnet50": Goals(0.93, 0.97, None, 6.5, 1.9, 0.50),
    "bert": Goals(0.94, 0.82, 0.62, 10, 2.6, 0.70),
    "gpt2": Goals(0.93, 0.82, 0.62, 10, 3.2, 0.75),
}
REMAT_TIME, SCALING, AUTOCAST, TENSOR_FLOPS = 1.08, 1.005, 1.01, 0.99
"""Of every model: the time that remat may cost, that loss scaling may, that autocast may; the share in half."""


def goals(results: Results) -> list[str]:
    """A sentence a goal: met, NOT MET, or not measured; goals are for the sizes of the field, on a GPU."""
    if results.about["sizes"] != dataclasses.asdict(FULL[results.about["model"]]):
        return ["The goals are for the sizes of the field: not judged here."]
    goal, lines = GOALS[results.about["model"]], []

    def at_most(what: str, value: float | None, limit: float) -> None:
        lines.append(_line(what, value, None if value is None else value <= limit, f"at most {limit:g}"))

    def at_least(what: str, value: float | None, limit: float, form: str = ".2f") -> None:
        lines.append(_line(what, value, None if value is None else value >= limit, f"at least {limit:g}", form))

    def time(row: str | None, other: str | None) -> float | None:
        ratio = results.ratio("train", row, other) if row and other else None
        return None if ratio is None else ratio[1]

    def memory(row: str | None, other: str | None) -> float | None:
        a, b = (results.memory("train", name) if name else None for name in (row, other))
        return a / b if a and b else None

    ours, torch = results.fastest("train", "jaxmp-bf16", "jaxmp-fp16"), results.reference("train")
    own, peer = (ROWS[name].label if name else "" for name in (ours, torch))
    at_most(f"step time of {own or 'jaxmp'} / {peer or 'torch.compile AMP'}", time(ours, torch), goal.time)
    at_most(f"peak memory of {own or 'jaxmp'} / {peer or 'torch.compile AMP'}", memory(ours, torch), goal.memory)
    if goal.remat_memory is not None:
        remat = "jaxmp-bf16-remat"
        at_most("peak memory with remat / torch.compile AMP", memory(remat, torch), goal.remat_memory)
        at_most("step time with remat / without", time(remat, "jaxmp-bf16"), REMAT_TIME)
    for precision, name, limit in (
        ("fp32", "fp32 without tensor cores", goal.over_fp32),
        ("tf32", "TF32", goal.over_tf32),
    ):
        slower = time(f"jaxmp-{precision}", ours)
        by_hand = time(f"hand-{precision}", ours)
        beside = f" ({by_hand:.2f} over {ROWS[f'hand-{precision}'].label})" if by_hand else ""
        at_least(f"speed-up over the same step in {name}{beside}", slower, limit)
    ratio = memory(ours, "hand-fp32")
    at_least("memory saved against float32 by hand", None if ratio is None else 1 - ratio, goal.saved)
    at_most("fp16 with dynamic scaling / without", time("jaxmp-fp16", "jaxmp-fp16-unscaled"), SCALING)
    autocast = "autocast of the float32 model, bf16 /"
    at_most(f"{autocast} by hand, another GELU and loss", time("autocast-bf16", "hand-bf16"), AUTOCAST)
    at_most(f"{autocast} the same model with a policy", time("autocast-bf16", "jaxmp-bf16"), AUTOCAST)
    share = half_share(results.figures("train", ours).get("flops")) if ours else None
    at_least("share of FLOPs on tensor cores in half", share, TENSOR_FLOPS, ".3f")
    return lines


def half_share(flops: dict[str, int] | None) -> float | None:
    """The share of a step's FLOPs, by dtype, that tensor cores do in half: TF32 is not."""
    if not flops:
        return None
    return (flops.get("bfloat16", 0) + flops.get("float16", 0)) / sum(flops.values())


def _line(what: str, value: float | None, met: bool | None, goal: str, form: str = ".3f") -> str:
    if value is None:
        return f"not measured: {what}, the goal {goal}"
    return f"{'met' if met else 'NOT MET'}: {what} is {value:{form}}, the goal {goal}"
