"""Memory, products, kernels and bytes of whole train steps on a GPU that is not there.

python -m experiments.benchmarks.compile_only --models gpt2

XLA compiles for a GPU that it is only told about, so that all but time can be known on any machine: of each model's
train step (forward, backward, clipping, AdamW, loss scaling, its state donated) by hand, under jaxmp's policies and
under autocast. Peaks are compared with the one that torch.compile under AMP had on an H200, and the times that
jaxmp.inspect.roofline predicts with those on record. What was compiled stays in the run folder, which holds
compile_only.md, .json and .png. It needs the packages of the extra compile-only.

python -m experiments.benchmarks.compile_only --topology 1x1x8 --sizes 1558M 7B

compiles GPT-2's sizes split over several GPUs instead, and tells of each its memory and what it sends.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

import jax
import tyro

from experiments import language_modeling
from experiments.benchmarks.compile_only import report, sharded
from experiments.benchmarks.shared import records
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Row, rows_of
from experiments.measure import flops, memory, programs
from experiments.measure.environment import environment
from experiments.measure.sharded import Way
from experiments.models import attention
from experiments.models.workloads import FULL, NAMES, SMOKE, Name, Workload, workload
from experiments.report.progress import Progress
from experiments.training import cli, kept
from experiments.training.run_folders import run_folder
from jaxmp import hardware
from jaxmp.inspect import prediction
from jaxmp.inspect.compiled import hlo
from jaxmp.inspect.program import targets

VARIANTS = (
    "hand-fp32", "hand-tf32", "hand-fp16", "hand-bf16", "jaxmp-fp32", "jaxmp-tf32", "jaxmp-bf16", "autocast-bf16",
    "jaxmp-bf16-remat", "jaxmp-bf16-remat-dots", "jaxmp-bf16-remat-full", "jaxmp-fp16-unscaled", "jaxmp-fp16",
    "jmp-fp16", "flax-fp16")  # fmt: skip
"""The rows of benchmarks.train_step that ``--variants`` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Small):
    """Flags of the benchmark."""

    models: tuple[Name, ...] = NAMES
    """Models to compile."""
    variants: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ()
    """Rows to compile, among hand-fp32, hand-tf32, hand-fp16, hand-bf16, jaxmp-fp32, jaxmp-tf32, jaxmp-bf16,
    autocast-bf16, jaxmp-bf16-remat, jaxmp-bf16-remat-dots, jaxmp-bf16-remat-full, jaxmp-fp16-unscaled, jaxmp-fp16,
    jmp-fp16 and flax-fp16. (default: all)"""
    target: str = "h200"
    """GPU to compile for, as in jaxmp/inspect/program/targets.py. Only the H200 is compared with torch."""
    layers: int = 0
    """Blocks of a transformer; 0 for 12. With fewer nothing is compared with torch."""
    topology: Annotated[tuple[str, ...], tyro.conf.arg(metavar="1x2x4", help_behavior_hint="")] = ()
    """Clusters of the GPU, slices x hosts x GPUs of each host: of them are --sizes, --ways and --mesh, and no other
    flag."""
    sizes: tuple[language_modeling.Size, ...] = ("124M", "355M", "774M", "1558M", "7B")
    """Params of GPT-2, with 8 sequences of 1,024 tokens a GPU, or 2 of 2,048."""
    ways: tuple[Way, ...] = ("linen",)
    """The library's step of the model in Linen or NNX under a policy, or in Linen under autocast; or one by hand."""
    mesh: str = ""
    """Axes of the mesh, as in data=2,fsdp=4. (default: fsdp alone)"""


def case_of(name: Name, config: Config) -> Workload:
    """A model in the sizes of the flags."""
    layers = 0 if name == "resnet50" else config.layers
    return workload(name, (SMOKE if config.smoke else FULL)[name], layers=layers)


def measure(case: Workload, row: Row, target: str) -> dict[str, Any]:
    """Return the figures of a row's step on the target of that name."""
    start, step = jax_steps.train_step(case, row)
    state = jax.eval_shape(start)
    with attention.implementation("cudnn"), targets.with_cudnn(targets.target_of(target).cudnn):
        counted = flops.count(step, state, case.batch)
    compiled = memory.compiled(step, (state, case.batch), target)
    program = hlo.HloProgram(compiled.as_text())
    for name, attended in programs.attention_flops(program).items():
        counted[name] = counted.get(name, 0) + attended
    return {
        "label": row.label,
        **programs.facts(compiled, program),
        "flops": counted,
        "half": sum(counted.get(name, 0) for name in ("bfloat16", "float16")) / sum(counted.values()),
        "predicted": prediction.of_program(program, hardware.detect(target)).milliseconds,
    }


def main(config: Config) -> list[dict[str, Any]]:
    if config.topology:
        return sharded.main(config)
    with cli.bad_values_end_it():
        records.check(config)
        cases = {name: case_of(name, config) for name in config.models}
        chosen = {name: rows_of(name, config.variants, VARIANTS, "--variants") for name in cases}
        if not any(chosen.values()):
            raise ValueError(f"--variants {' '.join(config.variants)} are not of --models {' '.join(config.models)}")
        targets.device_of(targets.target_of(config.target).text())
        folder = run_folder("compile_only", config.run_dir)
        has = kept.Kept(folder, 0, environment(target=config.target), smoke=config.smoke)
        for name, case in cases.items():
            has.require_alike(f"{name}-*.json", sizes=dataclasses.asdict(case.sizes))
    results = []
    with Progress("compile_only", sum(map(len, chosen.values()))) as progress:
        for name in sorted(cases, key=NAMES.index):
            case, rows = cases[name], {}
            for key, row in chosen[name].items():
                find = functools.partial(measure, case, row, config.target)
                rows[key] = has.get(f"{name}-{key}", find, progress, sizes=dataclasses.asdict(case.sizes))
            full = case.sizes == FULL[name] and config.target == "h200"
            about = {"name": name, "model": case.text, "smoke": config.smoke, "full": full}
            results += [{**about, "variants": rows}] if rows else []
    report.write(folder, kept.joined(has.environments), results)
    return results
