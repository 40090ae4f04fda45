"""Train ResNet-50, GPT-2 and BERT under every policy.

The accuracy or loss of each model is compared with the same model in float32. ResNet-50 trains on CIFAR-10.

python -m experiments.benchmarks.accuracy --tasks gpt2 --policies float32 --seeds 0 --run-dir runs/accuracy

With the same seed, all policies of a task start from the same params. They see the same examples in the same order,
for the same number of steps. The difference to float32 is taken for each seed. The policy float32 has products in
float32, not in tensorfloat32. Where that takes too long, --brief float32 trains for a few hundred steps, which gives
its time and memory. Accuracies are then compared with tensorfloat32. O3 is float16 throughout without a loss scale, and
the policy bfloat16 is bfloat16 throughout. The goals are for the mean over three seeds. On images, the accuracy may
fall by at most 0.5 points (the aim is 0.1). On text, the loss may be at most 0.5 % higher.

Every finished run is saved in the run folder, so several commands can share the work by task, policy and seed. The
report shows all runs in the folder. If --minutes are up in the middle of a run, a checkpoint is saved, and the next
command continues from there. Without Orbax (orbax-checkpoint) there is no checkpoint, and that run starts again.
CIFAR-10 is downloaded, or built from files in --data-dir. The run folder holds accuracy.md, .json and .png, and a
folder for each run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from experiments import compare, image_classification, language_modeling, masked_lm
from experiments.benchmarks.accuracy import report as accuracy_report
from experiments.benchmarks.measure.turns import failed
from experiments.benchmarks.shared import measurements, records
from experiments.comparison.outcomes import BASELINE, RESERVED, Task, init_params
from experiments.report.json_files import numbers, strict_json
from experiments.training import cli, loop
from experiments.training.environment import environment, require_gpu
from experiments.training.experiment import Experiment
from experiments.training.run_folders import checkpoints_can_be, checkpoints_folder
from jaxmp.inspect.compiled import compiling

POLICIES = (
    "float32", "mixed_float16", "mixed_bfloat16", "autocast:mixed_float16", "autocast:mixed_bfloat16", "O2", "O3@none",
    "bfloat16")  # fmt: skip
SMOKE_POLICIES = ("float32", "mixed_float16", "autocast:mixed_bfloat16", "O3@none")
_SMALL = {
    "layers": 1, "heads": 2, "width": 32, "context": 32, "batch_size": 16, "steps": 20, "learning_rate": 1e-2,
    "test_batches": 2, "evaluate_every": 10}  # fmt: skip
_BASE = {"layers": 12, "heads": 12, "width": 768, "test_batches": 16, "evaluate_every": 100}
_IMAGES = {
    "dataset": "cifar10", "model": "resnet50", "image_size": 224, "batch_size": 256, "epochs": 11, "optimizer": "sgd",
    "learning_rate": 0.1, "weight_decay": 5e-4, "schedule": "cosine", "flip": True, "shift": 4, "evaluate_every": 429,
}  # fmt: skip
_GPT2 = {"model": "gpt2", "context": 1024, "batch_size": 16, "steps": 1000, "learning_rate": 6e-4, "vocabulary": 50257}
_BERT = {"context": 512, "batch_size": 64, "steps": 750, "learning_rate": 3e-4, "vocabulary": 50258}
TASKS = {
    "images": Task(image_classification, _IMAGES),
    "gpt2": Task(language_modeling, {**_BASE, **_GPT2, "sample_tokens": 0}),
    "bert": Task(masked_lm, {**_BASE, **_BERT}),
}
"""Images: 2,145 steps, which are 11 epochs. GPT-2: 16.4 million tokens. BERT: 24.6 million tokens. The vocabularies
have the size of GPT-2's byte-pair vocabulary (and [MASK]), so that a model's size does not depend on the tokenizer."""
SMOKE_TASKS = {
    "images": Task(image_classification, {"steps": 30, "evaluate_every": 10}),
    "gpt2": Task(language_modeling, {**_SMALL, "model": "gpt2", "sample_tokens": 0}),
    "bert": Task(masked_lm, _SMALL),
}


BRIEF_STEPS = 200
"""The steps of a policy that is only timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Pieces, records.Small):
    """Flags of the benchmark."""

    tasks: tuple[Literal["images", "gpt2", "bert"], ...] = ("images", "gpt2", "bert")
    """images: ResNet-50 on CIFAR-10 at 224×224, batch 256. gpt2: 124M params, 16×1024 tokens. bert: Base, 64×512."""
    policies: Annotated[tuple[str, ...], tyro.conf.arg(metavar="POLICY[@SCALE]", help_behavior_hint="")] = ()
    """Policies. A loss scale may follow after an @. Without one, policies that compute in float16 have a dynamic loss
    scale. autocast:mixed_bfloat16 leaves the model in float32 and runs the loss function under jaxmp.autocast.
    bfloat16_sr+float8 is bfloat16_sr with --low-precision float8.
    (default: float32 mixed_float16 mixed_bfloat16 autocast:mixed_float16 autocast:mixed_bfloat16 O2 O3@none bfloat16;
    with --smoke half of them)"""
    brief: Annotated[tuple[str, ...], tyro.conf.arg(metavar="POLICY[@SCALE]", help_behavior_hint="")] = ()
    """Policies that train for a few hundred steps with the first seed, to measure their time and memory. Their accuracy
    is not shown."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED", help_behavior_hint="")] = ()
    """Seeds to train with. (default: 0 1 2, with --smoke 0)"""
    steps: int = 0
    """Steps of every run; 0 for the number in the task's preset."""
    flags: Annotated[
        tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FLAG[=VALUE] ...")
    ] = ()
    """Other flags for the script of the task, as in 'epochs=30 no-flip'; see that script's --help. --tasks must then
    name a single task, and the benchmark runs on any device."""
    data_dir: cli.Folder = None
    """Folder of the prepared data sets. (default: ~/.cache/jaxmp/data)"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A task under a policy with a seed.

    ``flags`` are the flags of the task's script. Policy, seed and folder are set later. A ``brief`` run ends after
    ``BRIEF_STEPS`` steps.
    """

    task: str
    policy: str
    loss_scale: str
    seed: int
    flags: Any
    brief: bool = False

    @property
    def setting(self) -> dict[str, Any]:
        """Return the flags that all runs of a task in a folder share.

        The entry ``whole`` says whether these flags are the task's preset.
        """
        task = TASKS[self.task]
        flags, preset = (
            {name: value for name, value in strict_json(dataclasses.asdict(flags)).items() if name not in RESERVED}
            for flags in (self.flags, task.script.Config(**task.preset))
        )
        return flags | {"whole": flags == preset}

    @property
    def name(self) -> str:
        """Return the name of the run's result and folder."""
        variant = self.policy if self.loss_scale == "none" else f"{self.policy}-{self.loss_scale}"
        variant = re.sub(r"[^\w.=-]+", "-", variant)
        return f"{self.task}-{variant}{'-brief' if self.brief else ''}-seed{self.seed}"


def variants(policies: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the policies with their loss scales.

    ``experiments.compare`` reads them in the same way. float32 is included only if it is listed.

    Raises:
      ValueError: a policy or a loss scale is unknown.
    """
    return [
        variant for variant in compare.variants(policies, ("dynamic",)) if variant != BASELINE or "float32" in policies
    ]


def task_flags(config: Config, name: str) -> Any:
    """Return the flags that all runs of a task share.

    Raises:
      ValueError: there are ``--flags`` and several tasks, or ``--flags`` name a flag that the benchmark sets.
    """
    if config.flags and len(config.tasks) > 1:
        raise ValueError(f"--flags need a single task, got --tasks {' '.join(config.tasks)}; name one of them")
    flags = (SMOKE_TASKS if config.smoke else TASKS)[name].flags(config.flags, RESERVED, "benchmark")
    changes = {"steps": config.steps} if config.steps else {}
    # With --minutes, train() saves a checkpoint when the time is up. No checkpoint is saved before.
    checkpoint_every = 10**9 if config.minutes and checkpoints_can_be() else 0
    return dataclasses.replace(flags, data_dir=config.data_dir, checkpoint_every=checkpoint_every, keep=1, **changes)


def plan(config: Config) -> list[Run]:
    """Return all runs that the flags ask for, including those already done.

    The seeds of a policy follow one another, so that the policy is compiled once.

    Raises:
      ValueError: the value of a flag is invalid.
    """
    for seed in config.seeds:
        cli.require("--seeds", seed, 0, 2**31)
    policies = config.policies or (() if config.brief else SMOKE_POLICIES if config.smoke else POLICIES)
    seeds = config.seeds or tuple(range(1 if config.smoke else accuracy_report.SEEDS))
    runs = list[Run]()
    for task in dict.fromkeys(config.tasks):
        flags = task_flags(config, task)
        for policy, loss_scale in variants(policies) if policies else ():
            runs += [Run(task, policy, loss_scale, seed, flags) for seed in dict.fromkeys(seeds)]
        for policy, loss_scale in variants(config.brief) if config.brief else ():
            runs.append(Run(task, policy, loss_scale, seeds[0], flags, brief=True))
    return runs


def finished(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the finished runs.

    The records are sorted by task, policy (the baseline first) and seed.

    Raises:
      ValueError: a file is damaged.
    """
    order = [(task, *variant) for task in TASKS for variant in variants(POLICIES)]

    def place(record: dict[str, Any]) -> Any:
        key = (record["task"], record["policy"], record["loss_scale"])
        return order.index(key) if key in order else len(order), key, record["seed"]

    return sorted((numbers(measurements.read(path)) for path in folder.glob("*-seed*.json")), key=place)


class _TimeIsUp(Exception):
    """Raised when the minutes are up.

    The next command continues the run, or starts it again without Orbax.
    """


def train(
    run: Run, experiment: Experiment, baseline: Experiment, folder: Path, clock: measurements.Clock
) -> dict[str, Any] | None:
    """Train once from the baseline's params.

    Return the record, or None if the time is up before the end.
    """
    if not checkpoints_can_be():
        shutil.rmtree(checkpoints_folder(folder), ignore_errors=True)  # they cannot be read without Orbax
    resumable = any(checkpoints_folder(folder).glob("*"))
    flags = dataclasses.replace(run.flags, seed=run.seed, run_dir=folder, resume=resumable)
    alike = dataclasses.replace(experiment, init_params=functools.partial(init_params, experiment, baseline))
    summary, failure = {}, ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the final output is also in the run's folder
            with loop.running(f"accuracy, {run.task}", flags, lambda _: alike) as running:
                for batch in running.batches():
                    running.state, metrics = experiment.step(running.state, batch)
                    running.log(metrics)
                    if run.brief and int(running.step) == BRIEF_STEPS:
                        break
                    if clock.late() and int(running.state.step) < experiment.steps:
                        if flags.checkpoint_every:
                            running.save(running.state)
                        raise _TimeIsUp
            summary = running.summary
    except _TimeIsUp:
        return None
    except FloatingPointError as error:  # jaxmp.NonFiniteTrainingError
        failure = str(error)
    state, batch = jax.eval_shape(experiment.init, run.seed), next(experiment.train_batches(run.seed))
    compiled = experiment.step.lower(state, batch).compile()  # JAX has compiled it above and does not compile it again
    shutil.rmtree(checkpoints_folder(folder), ignore_errors=True)
    return {
        **{name: getattr(run, name) for name in ("task", "policy", "loss_scale", "seed", "brief")},
        "data": experiment.precision["data"],
        "steps": experiment.steps,
        "batch_size": experiment.batch_size,
        "unit": experiment.unit,
        "step_bytes": compiling.peak_bytes(compiled),
        **accuracy_report.outcome(folder / "metrics.csv", summary, failure, experiment.steps),
        **({"final": {"loss": math.nan, "accuracy": math.nan}} if run.brief else {}),
    }


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        runs = plan(config)
        folder = records.folder_of("accuracy", config)
        saved = measurements.Measurements(folder, config.minutes, environment(), smoke=config.smoke)
        missing = [run for run in runs if not saved.read(run.name)]
        for run in missing:
            saved.require_alike(f"{run.task}-*-seed*.json", **run.setting)
        if missing:
            require_gpu(config.smoke or bool(config.flags))
        # Prepare the baselines first, so that missing data is an error before anything is trained.
        flags = {run.task: run.flags for run in missing}
        baselines = {task: TASKS[task].prepare(flags[task], *BASELINE) for task in flags}

    @functools.lru_cache(1)  # the seeds of a policy are compiled once
    def prepared(task: str, policy: str, loss_scale: str) -> Experiment:
        return TASKS[task].prepare(flags[task], policy, loss_scale)

    if missing and config.minutes and not checkpoints_can_be():
        print(
            "note: without Orbax (pip install orbax-checkpoint) a run that is not finished in time starts again",
            flush=True,
        )
    broken = list[str]()
    try:
        for i, run in enumerate(missing, 1):
            if saved.clock.late():
                break
            print(f"run {i} of {len(missing)}: {run.name}", file=sys.stderr, flush=True)
            with warnings.catch_warnings():
                # O3 has no loss scale on purpose
                warnings.filterwarnings("ignore", message=".*no loss scale", category=UserWarning)
                experiment = prepared(run.task, run.policy, run.loss_scale)
                find = functools.partial(train, run, experiment, baselines[run.task], folder / run.name, saved.clock)
                try:
                    saved.get(run.name, find, **run.setting)
                except Exception as error:  # if one policy fails, the others still run
                    broken.append(f"{run.name}: {failed(error)}")
    finally:  # report the finished runs after an interruption too
        if recorded := finished(folder):
            accuracy_report.write(recorded, folder)
    saved.end()
    if broken:
        cli.fail(f"{'; '.join(broken)}; see above", 1)
    return recorded
