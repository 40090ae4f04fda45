"""Compile train steps for a GPU or TPU that is not attached, and report their programs.

The report has the memory, products, kernels and bytes of each program.

python -m experiments.benchmarks.compile_only --models gpt2

XLA can compile for a GPU from its description alone, so any machine can find out everything but the time. The benchmark
compiles each model's train step (forward, backward, clipping, AdamW, loss scaling, donated state) by hand, under
jaxmp's policies and under autocast. Peaks are compared with the measured peak of torch.compile under AMP on an H200.
Times predicted by jaxmp.inspect.roofline are compared with recorded times. The run folder keeps the compiled rows for
the next command, and holds compile_only.md, .json and .png. The benchmark needs the packages of the extra compile-only.

python -m experiments.benchmarks.compile_only --models gpt2 --layers 2 --target v5e

This command compiles for a TPU. The table has the cycles that the compiler estimates, relative to bfloat16 by hand. A
step takes minutes to compile.

python -m experiments.benchmarks.compile_only --topology 1x1x8 --sizes 1558M 7B
python -m experiments.benchmarks.compile_only --topology v5e:4x4 --sizes 1558M

These commands compile GPT-2's sizes for several GPUs, or for a slice of TPUs, and report the memory and the traffic of
each device. --sizes llama-8B compiles Llama 3 with 8 billion params.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

import jax
import tyro

from experiments.benchmarks.compile_only import report, sharded, tpu_report
from experiments.benchmarks.measure import programs
from experiments.benchmarks.measure.sharded import Way
from experiments.benchmarks.models.workloads import FULL, NAMES, SMOKE, Name, Workload, workload
from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Row, rows_of
from experiments.measure import memory
from experiments.models import attention
from experiments.report.progress import Progress
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp import hardware
from jaxmp.inspect import audit
from jaxmp.inspect._roofline import roofline
from jaxmp.inspect.compiled import hlo, targets
from jaxmp.inspect.compiled.tpu_targets import TpuTarget

VARIANTS = (
    "hand-fp32", "hand-tf32", "hand-bf16", "jaxmp-fp32", "jaxmp-tf32", "jaxmp-bf16", "autocast-bf16",
    "jaxmp-bf16-remat", "jaxmp-bf16-remat-full", "jaxmp-fp16")  # fmt: skip
"""The rows of benchmarks.train_step that ``--variants`` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Small):
    """Flags of the benchmark."""

    models: tuple[Name, ...] = NAMES
    """Models to compile."""
    variants: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ()
    """Rows to compile, among hand-fp32, hand-tf32, hand-bf16, jaxmp-fp32, jaxmp-tf32, jaxmp-bf16, autocast-bf16,
    jaxmp-bf16-remat, jaxmp-bf16-remat-full and jaxmp-fp16. (default: all)"""
    target: str = "h200"
    """GPU or TPU to compile for: h200, a100, v5e, v5p, v6e, tpu7x and others. Only the H200 is compared with torch."""
    layers: int = 0
    """Blocks of a transformer; 0 for 12. With another number nothing is compared with torch."""
    topology: Annotated[tuple[str, ...], tyro.conf.arg(metavar="1x2x4", help_behavior_hint="")] = ()
    """Clusters to compile for: slices x hosts x GPUs per host, or a slice of TPUs such as v5e:4x4. --sizes, --ways and
    --mesh have an effect only with --topology. --models, --variants and --layers have an effect only without it."""
    sizes: tuple[sharded.Size, ...] = ("124M", "355M", "774M", "1558M", "7B")
    """Sizes of GPT-2 by number of params, or llama-8B. The batch has 8 sequences of 1,024 tokens for each device; with
    7B and llama-8B, 2 sequences of 2,048."""
    ways: tuple[Way, ...] = ("linen",)
    """linen, nnx: jaxmp's train step of the Linen or NNX model under a policy. autocast: jaxmp's train step of the
    Linen model under autocast."""
    mesh: str = ""
    """Axes of the mesh, as in data=2,fsdp=4. With llama-8B also tensor, which splits the products of each block, as in
    fsdp=16,tensor=4. (default: fsdp alone)"""


def case_of(name: Name, config: Config) -> Workload:
    """Return a model with the sizes of the flags."""
    layers = 0 if name == "resnet50" else config.layers
    return workload(name, (SMOKE if config.smoke else FULL)[name], layers=layers)


def measure(case: Workload, row: Row, target: str) -> dict[str, Any]:
    """Return the figures of a row's step, compiled for the GPU ``target``."""
    start, step = jax_steps.train_step(case, row)
    state = jax.eval_shape(start)
    with attention.implementation("portable"):  # a fused kernel hides its products
        half = audit(step, compile=False)(state, case.batch).half_flops
    compiled = memory.compiled(step, (state, case.batch), target)
    program = hlo.HloProgram(compiled.as_text())
    predicted = roofline.of_program(program, hardware.detect(target))
    return {
        "label": row.label,
        **programs.facts(compiled, program),
        "half": half,
        "predicted": predicted.milliseconds,
        "parts": predicted.parts,
        "cycles": sum(kernel.cycles or 0 for kernel in predicted.kernels),
        "kernels": sum(kernel.count for kernel in predicted.kernels),
    }


def main(config: Config) -> list[dict[str, Any]]:
    if config.topology:
        return sharded.main(config)
    with cli.bad_values_end_it():
        records.check(config)
        target = targets.target_of(config.target)
        is_tpu = isinstance(target, TpuTarget)
        known = tpu_report.VARIANTS if is_tpu else VARIANTS
        cases = {name: case_of(name, config) for name in config.models}
        chosen = {name: rows_of(name, config.variants or known, known, "--variants") for name in cases}
        if not any(chosen.values()):
            raise ValueError(
                f"--variants {' '.join(config.variants)} do not exist for --models {' '.join(config.models)}"
            )
        target.devices()
        folder = cli.run_folder(tpu_report.NAME if is_tpu else "compile_only", config.run_dir)
        saved = measurements.Measurements(folder, 0, environment(target=config.target), smoke=config.smoke)
        for name, case in cases.items():
            saved.require_alike(f"{name}-*.json", sizes=dataclasses.asdict(case.sizes))
    results = []
    with Progress("compile_only", sum(map(len, chosen.values()))) as progress:
        for name in sorted(cases, key=NAMES.index):
            case, rows = cases[name], {}
            for key, row in chosen[name].items():
                find = functools.partial(measure, case, row, config.target)
                rows[key] = saved.get(f"{name}-{key}", find, progress, sizes=dataclasses.asdict(case.sizes))
            full = case.sizes == FULL[name] and config.target == "h200"
            about = {"name": name, "model": case.text, "smoke": config.smoke, "full": full}
            results += [{**about, "variants": rows}] if rows else []
    write = tpu_report.write if is_tpu else report.write
    write(folder, measurements.joined(saved.environments), results)
    return results
