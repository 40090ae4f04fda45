"""Train a task under several policies and loss scales.

The results, time and memory of the runs are compared.

python -m experiments.compare --task pysource --policies mixed_float16 --loss-scales none static:4096 dynamic headroom

python -m experiments.compare --task cifar10 --steps 300 --flags model=resnet18 optimizer=sgd learning-rate=0.1 flip

python -m experiments.compare --demo

Every policy is trained with every seed. A policy that computes in float16 is trained with each of the loss scales,
other policies without one. A policy may name its loss scale, as in float16@static:4096. autocast:mixed_bfloat16 leaves
the model in float32 and runs the loss function under autocast. float32 is always trained too, and the others are
compared with it. The run folder holds compare.md, compare.json and compare.png.

The demo (--demo) compares policies on digits and on pysource, in 3 to 6 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

if not __package__:  # started as a file, so add the folder with the packages to the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax.numpy as jnp
import rich.console
import tyro

import jaxmp
from experiments import data, image_classification, language_modeling, masked_lm
from experiments.comparison import report as comparison_report
from experiments.comparison.outcomes import BASELINE, RESERVED, Outcome, Task, compare, read_variant
from experiments.comparison.picture import picture
from experiments.report.json_files import write_json
from experiments.report.progress import Progress
from experiments.training import cli
from experiments.training.environment import environment
from experiments.training.experiment import Experiment
from experiments.training.precision import compute_dtype, read_policy
from experiments.training.run_folders import run_folder

TASKS = {
    **{name: Task(image_classification, {"dataset": name}) for name in data.IMAGES},
    "pysource": Task(language_modeling, {"dataset": "pysource"}),
    "gpt2": Task(language_modeling, {"model": "gpt2"}),
    "bert": Task(masked_lm, {}),
}
# The metric that the picture and the conclusion show for each task.
METRICS = {name: "accuracy" if name in data.IMAGES else "loss" for name in TASKS}
_DEMO_POLICIES = ("mixed_float16@none", "mixed_float16@dynamic", "mixed_bfloat16", "float16@none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the comparison."""

    task: Literal[tuple(TASKS)] = "digits"
    """The task. pysource is next-token prediction by a small model. gpt2 and bert train a transformer on the text of
    --flags dataset=PATH, by default pysource. All other tasks are image classification."""
    flags: Annotated[
        tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FLAG[=VALUE] ...")
    ] = ()
    """Flags of the task's script, as in 'model=resnet18 flip'; see the --help of that script."""
    policies: Annotated[tuple[str, ...], tyro.conf.arg(metavar="POLICY[@SCALE]")] = ("mixed_float16", "mixed_bfloat16")
    """Policies to compare with float32. A loss scale may follow after an @. autocast:mixed_bfloat16 leaves the model in
    float32 and runs the loss function under jaxmp.autocast. bfloat16_sr+float8 is bfloat16_sr with --low-precision
    float8."""
    loss_scales: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SCALE")] = ("none", "dynamic")
    """Loss scales for policies that compute in float16, unless they name one: none, static:4096, dynamic, headroom."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED")] = (0, 1, 2)
    """Seeds to train with."""
    steps: int = 0
    """Steps to train; 0 for the task's default."""
    batch_size: int = 0
    """Examples per step; 0 for the task's default."""
    override: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN=POLICY")] = ()
    """Another policy for the modules whose path matches PATTERN, in all variants but float32."""
    remat: str = "none"
    """Recomputation in the backward pass, in all variants: none, full, dots or dots_no_batch; gpt2 and bert also have
    attention."""
    rounds: int = 7
    """Rounds of timing."""
    demo: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compare five variants on digits and on pysource: float32, mixed_float16 with loss scaling, mixed_float16 without
    it, mixed_bfloat16, and float16 without loss scaling."""
    data_dir: cli.Folder = None
    """Folder of the prepared data sets. (default: ~/.cache/jaxmp/data)"""
    run_dir: cli.Folder = None
    """Folder to write tables and picture to. (default: runs/compare-TIME)"""


def variants(policies: tuple[str, ...], loss_scales: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the policies with their loss scales, the baseline first.

    Raises:
      ValueError: a policy or a loss scale is unknown.
    """
    pairs = [BASELINE]
    for text in policies:
        policy, at, scale_text = text.partition("@")
        half = compute_dtype(read_policy(read_variant(policy)[0], scale_text or "none")[0]) == jnp.float16
        pairs += [(policy, scale) for scale in ([scale_text] if at else loss_scales if half else ["none"])]
    for policy, scale in pairs:
        read_policy(read_variant(policy)[0], scale)
    return list(dict.fromkeys(pairs))


def plan(config: Config) -> list[Config]:
    """Return the comparisons to make: a single one, or the demo's two."""
    if not config.demo:
        return [config]
    for field in dataclasses.fields(config):
        set_by_demo = ("task", "flags", "policies", "loss_scales", "seeds")
        if field.name in set_by_demo and getattr(config, field.name) != field.default:
            raise ValueError(f"--demo sets the tasks, policies and seeds, got --{field.name.replace('_', '-')} too")
    both = dataclasses.replace(config, policies=_DEMO_POLICIES)
    text = dataclasses.replace(both, task="pysource", seeds=(0,), rounds=min(config.rounds, 5))
    return [text, dataclasses.replace(both, task="digits", seeds=(0, 1, 2))]


def prepare(config: Config) -> dict[tuple[str, str], Experiment]:
    """Return the task of ``config`` under each policy and loss scale.

    Raises:
      ValueError: the value of a flag is invalid.
      DataError: the data are not available.
    """
    for flag, value in (("--steps", config.steps), ("--batch-size", config.batch_size)):
        cli.require(flag, value, 0)
    cli.require("--rounds", config.rounds, 1)
    cli.require("the number of --seeds", len(config.seeds), 1)
    for seed in config.seeds:
        cli.require("--seeds", seed, 0, 2**31)
    flags = task_flags(config)
    experiments = {}
    for variant in variants(config.policies, config.loss_scales):
        variant_flags = dataclasses.replace(flags, override=() if variant == BASELINE else config.override)
        experiments[variant] = TASKS[config.task].prepare(variant_flags, *variant)
    return experiments


def task_flags(config: Config) -> Any:
    """Return the flags that all variants share.

    Raises:
      ValueError: ``--flags`` names a flag that the comparison sets.
    """
    task, names = TASKS[config.task], {field.name for field in dataclasses.fields(config)}
    flags = task.flags(config.flags, RESERVED | names | task.preset.keys() | {"evaluate_every"}, "comparison")
    changes = {name: value for name in ("steps", "batch_size") if (value := getattr(config, name))}
    return dataclasses.replace(flags, remat=config.remat, data_dir=config.data_dir, **changes)


def main(config: Config) -> dict[str, list[Outcome]]:
    started = time.perf_counter()
    print("preparing data and models", file=sys.stderr, flush=True)
    with cli.bad_values_end_it():
        prepared = [(part, prepare(part)) for part in plan(config)]
        folder = run_folder("compare", config.run_dir)
    total = sum(
        len(part.seeds) * sum(experiment.steps for experiment in experiments.values()) + part.rounds
        for part, experiments in prepared
    )
    with Progress("compare", total) as progress:
        results: dict[str, list[Outcome]] = {
            part.task: compare(experiments, list(part.seeds), part.rounds, progress, part.task)
            for part, experiments in prepared
        }
    data = {part.task: next(iter(all_.values())).precision.get("data") for part, all_ in prepared}
    report(results, folder, time.perf_counter() - started, [origin for origin in data.values() if origin])
    return results


def report(results: dict[str, list[Outcome]], folder: Path, seconds: float, data: list[str]) -> None:
    """Print and write the tables and a conclusion, and write the picture and numbers."""
    where = environment()
    cores = bool(jaxmp.hardware.detect().tensor_cores)
    tables = [table for task, outcomes in results.items() for table in comparison_report.tables(task, outcomes, cores)]
    conclusion = " ".join(
        comparison_report.conclusion(task, outcomes, METRICS[task]) for task, outcomes in results.items()
    )
    picture(results, METRICS, folder / "compare.png", f"{where['device']}, {where['date'][:10]}")

    lines = ["# Comparison", "", conclusion, "", "![comparison](compare.png)", ""]
    lines += [f"- {name}: {value}" for name, value in where.items()]
    lines += [*(f"- data: {origin}" for origin in data), f"- duration: {seconds:.0f} s", ""]
    (folder / "compare.md").write_text("\n".join([*lines, *(table.markdown() for table in tables)]))
    write_json(
        folder / "compare.json",
        {
            "environment": where,
            "data": data,
            "seconds": seconds,
            "conclusion": conclusion,
            "tasks": {
                task: [comparison_report.as_json(outcome, outcomes[0], cores) for outcome in outcomes]
                for task, outcomes in results.items()
            },
        },
    )
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=140)
    for table in tables:
        table.show(console)
        console.print()
    for outcome in [o for all_ in results.values() for o in all_ if o.failure]:
        console.print(f"{outcome.label} stopped: {outcome.failure}", markup=False, highlight=False)
    console.print(f"{where['device']}, {where['versions']}, {seconds:.0f} s", markup=False, highlight=False)
    console.print(conclusion, style="bold", markup=False, highlight=False)
    console.print(f"Picture: {folder / 'compare.png'}", markup=False, highlight=False, soft_wrap=True)
    console.print(comparison_report.takeaway(results, METRICS, cores), style="bold", markup=False, highlight=False)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
