"""Train a task under several policies and loss scales.

The results, time and memory of the runs are compared.

python -m experiments.compare --task pysource --policies mixed_float16 --loss-scales none static:4096 dynamic headroom

python -m experiments.compare --task cifar10 --steps 300 --flags model=resnet18 optimizer=sgd learning-rate=0.1 flip

python -m experiments.compare --demo

Every policy is trained with every seed. A policy that computes in float16 is trained with each of the loss scales,
other policies without one. A policy may name its loss scale, as in float16@static:4096. autocast:mixed_bfloat16 leaves
the model in float32 and runs the loss function under autocast. The others are compared with --reference, which is
trained too. The run folder holds compare.md and compare.png, and a file for each run. Runs that have a file are not
trained again, so several commands can share the work.

The demo (--demo) compares policies on digits and on pysource, in 3 to 6 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

if not __package__:  # started as a file, so add the folder with the packages to the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax.numpy as jnp
import tyro

import jaxmp
from experiments import data, image_classification, language_modeling, masked_lm
from experiments.comparison import report as comparison_report
from experiments.comparison.outcomes import Outcome, Task, read_variant, train
from experiments.comparison.picture import picture
from experiments.report.json_files import numbers, strict_json, write_json
from experiments.report.progress import UNFINISHED, Progress
from experiments.report.tables import terminal
from experiments.training import cli, loop
from experiments.training.environment import environment
from experiments.training.experiment import Experiment
from experiments.training.precision import compute_dtype, read_policy

TASKS = {
    **{name: Task(image_classification, {"dataset": name}) for name in data.IMAGES},
    "pysource": Task(language_modeling, {"dataset": "pysource"}),
    "gpt2": Task(language_modeling, {"model": "gpt2"}),
    "bert": Task(masked_lm, {}),
}
# The metric that the picture shows for each task.
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
    """Policies to compare with the reference. A loss scale may follow after an @. autocast:mixed_bfloat16 leaves the
    model in float32 and runs the loss function under jaxmp.autocast. bfloat16_sr+float8 is bfloat16_sr with
    --low-precision float8."""
    loss_scales: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SCALE")] = ("none", "dynamic")
    """Loss scales for policies that compute in float16, unless they name one: none, static:4096, dynamic, headroom."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED")] = (0, 1, 2)
    """Seeds to train with."""
    steps: int = 0
    """Steps to train; 0 for the task's default."""
    batch_size: int = 0
    """Examples per step; 0 for the task's default."""
    override: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN=POLICY")] = ()
    """Another policy for the modules whose path matches PATTERN, in all variants but the reference."""
    remat: str = "none"
    """Recomputation in the backward pass, in all variants: none, full, dots or dots_no_batch; gpt2 and bert also have
    attention."""
    reference: str = "float32"
    """Policy that the others are compared with, without a loss scale."""
    minutes: float = 0.0
    """Start no new run after so many minutes; 0 for no limit. Run the same command again to continue."""
    demo: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compare five variants on digits and on pysource: float32, mixed_float16 with loss scaling, mixed_float16 without
    it, mixed_bfloat16, and float16 without loss scaling."""
    data_dir: cli.Folder = None
    """Folder of the prepared data sets. (default: ~/.cache/jaxmp/data)"""
    run_dir: cli.Folder = None
    """Folder to write tables and picture to. (default: runs/compare-TIME)"""


def variants(config: Config) -> list[tuple[str, str]]:
    """Return the policies with their loss scales, the reference first.

    Raises:
      ValueError: a policy or a loss scale is unknown.
    """
    pairs = [(config.reference, "none")]
    for text in config.policies:
        policy, at, scale_text = text.partition("@")
        half = compute_dtype(read_policy(read_variant(policy)[0], scale_text or "none")[0]) == jnp.float16
        pairs += [(policy, scale) for scale in ([scale_text] if at else config.loss_scales if half else ["none"])]
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
    text = dataclasses.replace(both, task="pysource", seeds=(0,))
    return [text, dataclasses.replace(both, task="digits", seeds=(0, 1, 2))]


def prepare(config: Config) -> dict[tuple[str, str], Experiment]:
    """Return the task of ``config`` under each policy and loss scale.

    Raises:
      ValueError: the value of a flag is invalid.
      DataError: the data are not available.
    """
    for flag, value in (("--steps", config.steps), ("--batch-size", config.batch_size)):
        cli.require(flag, value, 0)
    cli.require("the number of --seeds", len(config.seeds), 1)
    for seed in config.seeds:
        cli.require("--seeds", seed, 0, 2**31)
    flags = task_flags(config)
    experiments = {}
    for i, variant in enumerate(variants(config)):
        variant_flags = dataclasses.replace(flags, override=config.override if i else ())
        experiments[variant] = TASKS[config.task].prepare(variant_flags, *variant)
    return experiments


def task_flags(config: Config) -> Any:
    """Return the flags that all variants share.

    Raises:
      ValueError: ``--flags`` names a flag that the comparison sets.
    """
    task, names = TASKS[config.task], {field.name for field in dataclasses.fields(config)}
    flags = task.flags(config.flags, loop.OF_A_RUN | names | task.preset.keys() | {"evaluate_every"})
    changes = {name: value for name in ("steps", "batch_size") if (value := getattr(config, name))}
    return dataclasses.replace(flags, remat=config.remat, data_dir=config.data_dir, **changes)


def main(config: Config) -> dict[str, list[Outcome]]:
    started = time.perf_counter()
    print("preparing data and models", file=sys.stderr, flush=True)
    with cli.bad_values_end_it():
        prepared = [(part, prepare(part)) for part in plan(config)]
        folder = cli.run_folder("compare", config.run_dir)
        results = {part.task: saved_outcomes(part, experiments, folder) for part, experiments in prepared}
    total = sum(len(part.seeds) * sum(e.steps for e in experiments.values()) for part, experiments in prepared)
    left = 0
    with Progress("compare", total) as progress:
        for part, experiments in prepared:
            for outcome, seed in missing(results[part.task], part.seeds):
                if 0 < 60 * config.minutes < time.perf_counter() - started:
                    left += 1
                    continue
                baseline = experiments[config.reference, "none"]
                experiment = experiments[outcome.policy, outcome.loss_scale]
                title = f"{part.task}: {outcome.label}, seed {seed}"
                is_first = seed == part.seeds[0]  # the tables show the zeros of the first seed
                run = {"seed": seed, **train(experiment, baseline, seed, progress, title, is_first)}
                write_json(run_file(part, outcome, seed, folder), {"setting": setting(part), **run})
                outcome.runs.append(run)
    results = {task: [outcome for outcome in outcomes if outcome.runs] for task, outcomes in results.items()}
    data = {next(iter(all_.values())).precision["data"]: None for _, all_ in prepared}
    if all(outcomes and outcomes[0].policy == config.reference for outcomes in results.values()):
        report(results, folder, [*data])
    if left:
        print(UNFINISHED)
    return results


def setting(config: Config) -> Any:
    """Return the flags that all runs of a folder share."""
    names = ("task", "flags", "steps", "batch_size", "override", "remat", "reference")
    return strict_json({name: getattr(config, name) for name in names})


def run_file(config: Config, outcome: Outcome, seed: int, folder: Path) -> Path:
    """Return the file with the results of a run."""
    variant = re.sub(r"[^\w.=-]+", "-", outcome.label)
    return folder / f"{config.task}-{variant}-seed{seed}.json"


def saved_outcomes(config: Config, experiments: dict[tuple[str, str], Experiment], folder: Path) -> list[Outcome]:
    """Return the runs of each variant that are in the folder.

    Raises:
      ValueError: a run has another setting.
    """
    outcomes = [Outcome(*variant, []) for variant in experiments]
    for outcome in outcomes:
        for seed in config.seeds:
            file = run_file(config, outcome, seed, folder)
            if not file.is_file():
                continue
            run = numbers(json.loads(file.read_text()))
            if run.pop("setting") != setting(config):
                raise ValueError(f"{file} is a run with other flags; use those flags, or another --run-dir")
            outcome.runs.append(run)
    return outcomes


def missing(outcomes: list[Outcome], seeds: tuple[int, ...]) -> Iterator[tuple[Outcome, int]]:
    """Yield the runs that are not in the folder."""
    for outcome in outcomes:
        done = {run["seed"] for run in outcome.runs}
        for seed in seeds:
            if seed not in done:
                yield outcome, seed


def report(results: dict[str, list[Outcome]], folder: Path, data: list[str]) -> None:
    """Print and write the tables, and draw the picture."""
    where = environment()
    cores = bool(jaxmp.hardware.detect().tensor_cores)
    tables = [comparison_report.table(task, outcomes, cores) for task, outcomes in results.items()]
    picture(results, METRICS, folder / "compare.png", f"{where['device']}, {where['date'][:10]}")
    lines = ["# Comparison", "", "![comparison](compare.png)", ""]
    lines += [*(f"- {name}: {value}" for name, value in where.items()), *(f"- data: {origin}" for origin in data), ""]
    (folder / "compare.md").write_text("\n".join([*lines, *(table.markdown() for table in tables)]))
    console = terminal()
    for table in tables:
        table.show(console)
        console.print()
    for outcome in [o for all_ in results.values() for o in all_ if o.failure]:
        console.print(f"{outcome.label} stopped: {outcome.failure}", markup=False, highlight=False)
    console.print(f"Picture: {folder / 'compare.png'}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
