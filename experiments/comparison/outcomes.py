"""Trains one task under several policies and loss scales, and measures what each did: the work behind `compare`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp
from experiments.measure import flops, memory, timing
from experiments.measure.environment import environment
from experiments.measure.gradients import gradients, zero_share
from experiments.report.progress import Progress
from experiments.training import loop
from experiments.training.describing import describe
from experiments.training.experiment import Experiment
from experiments.training.metrics import Late
from experiments.training.precision import read_low_precision
from jaxmp.inspect import record

BASELINE = ("float32", "none")
AUTOCAST = "autocast:"  # before a policy: the loss function runs under autocast, and the model has no policy
RESERVED = loop.OF_A_RUN | {"seed"}
"""Flags of a training script that every comparison sets itself."""


def read_variant(text: str) -> tuple[str, str]:
    """The policy and the ``--low-precision`` of a text such as ``autocast:mixed_float16`` or ``bfloat16_sr+kahan``.

    Raises:
      ValueError: there is nothing like what follows the plus.
    """
    policy, plus, low = text.removeprefix(AUTOCAST).partition("+")
    if plus:
        read_low_precision(optax.identity(), low, 0)
    return policy, low or "none"


@dataclasses.dataclass(frozen=True)
class Task:
    """A training script with a preset of its flags."""

    script: ModuleType
    preset: dict[str, Any]

    def flags(self, given: Iterable[Iterable[str]], reserved: Set[str], owner: str) -> Any:
        """The preset with the flags that are ``given``, as in ``model=resnet18``.

        Raises:
          ValueError: one is ``reserved``, which the error says is up to the ``owner``.
        """
        preset = self.script.Config(**self.preset)
        flags = tyro.cli(
            self.script.Config,
            prog=f"python -m {self.script.__name__}",  # whose --help an error points to
            args=[f"--{flag.lstrip('-')}" for texts in given for flag in texts],
            default=preset,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        for field in dataclasses.fields(flags):
            if field.name in reserved and getattr(flags, field.name) != getattr(preset, field.name):
                raise ValueError(f"--flags are the task's, but --{field.name.replace('_', '-')} is up to the {owner}")
        return flags

    def prepare(self, flags: Any, policy: str, loss_scale: str) -> Experiment:
        """The task under a policy, as :func:`read_variant` reads it.

        Raises:
          ValueError: a flag has a value that cannot be.
          DataError: the data cannot be had.
        """
        own, low = read_variant(policy)
        low = low if low != "none" else flags.low_precision
        autocast = policy.startswith(AUTOCAST)
        return self.script.prepare(
            dataclasses.replace(flags, policy=own, autocast=autocast, loss_scale=loss_scale, low_precision=low)
        )


@dataclasses.dataclass
class Outcome:
    """The results of a policy with a loss scale; lists have one entry for each seed.

    Attributes:
      policy: the policy's name.
      loss_scale: the loss scale's, ``none`` if there is none.
      test: held-out metrics.
      curves: training loss at each step.
      skipped: steps skipped.
      final_scale: the loss scale after the last step.
      failure: why training stopped early, or empty.
      milliseconds: a step's time, one figure a round (see :func:`experiments.measure.timing.interleaved`).
      step_bytes: what the compiled step needs; None where the compiler does not tell.
      device_bytes: the device's peak; None where it does not count.
      device_bytes_is_bound: whether another variant had reached that peak before, so that this one's is no higher.
      flops: FLOPs of a step's products, by dtype.
      zero_activations: share of the activations' gradients that became zero
        (:func:`experiments.measure.gradients.zero_share`); not a number where they cannot be seen (NNX).
      zero_params: the same of the params' gradients.
    """

    policy: str
    loss_scale: str
    test: list[dict[str, float]] = dataclasses.field(default_factory=list)
    curves: list[list[float]] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    final_scale: list[float] = dataclasses.field(default_factory=list)
    failure: str = ""
    milliseconds: list[float] = dataclasses.field(default_factory=list)
    step_bytes: int | None = None
    device_bytes: int | None = None
    device_bytes_is_bound: bool = False
    flops: dict[str, int] = dataclasses.field(default_factory=dict)
    zero_activations: float = math.nan
    zero_params: float = math.nan

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return label(self.policy, self.loss_scale)


def run_folder(folder: Path, outcome: Outcome, seed: int) -> Path:
    """Return the folder of a run in the folder of a task's runs."""
    name = outcome.policy if outcome.loss_scale == "none" else f"{outcome.policy}@{outcome.loss_scale}"
    return folder / name.replace("/", "_") / f"seed{seed}"


def label(policy: str, loss_scale: str) -> str:
    """The policy, and the loss scale if there is one."""
    return policy if loss_scale == "none" else f"{policy}, {loss_scale}"


def compare(
    variants: dict[tuple[str, str], Experiment],
    seeds: list[int],
    rounds: int,
    progress: Progress,
    title: str,
    folder: Path | None = None,
) -> list[Outcome]:
    """Trains every variant with every seed, then times them in turn and looks at their gradients.

    A seed starts all variants from the same params, the baseline's, rounded to their own param dtype.

    Args:
      variants: policy and loss scale to the experiment under them, :data:`BASELINE` first.
      seeds: of params and order of the examples.
      rounds: of timing; one unit of progress each, like a step of training.
      progress: where to show how far it is.
      title: what to call the task there.
      folder: where each run is recorded for its report; None for no record.
    """
    experiments = list(variants.values())
    outcomes = [Outcome(*variant) for variant in variants]
    baseline = experiments[0]

    def first_batch(experiment: Experiment) -> Any:
        return next(experiment.train_batches(seeds[0]))  # in the dtype that this experiment takes

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no loss scale", category=UserWarning)  # it is what we want to see
        progress.advance(0, "compiling", title)
        # XLA compiles on one core. On a GPU it also measures kernels, which another compilation would disturb.
        with ThreadPoolExecutor(os.cpu_count() if jax.default_backend() == "cpu" else 1) as pool:
            list(pool.map(_compile, outcomes, experiments, map(first_batch, experiments)))

        final: list[Any] = [None] * len(variants)
        # The device's peak never falls, so the leanest goes first: then each sets a peak of its own.
        for i in sorted(range(len(variants)), key=lambda i: outcomes[i].step_bytes or 0):
            before = memory.device_peak()
            for seed in seeds:
                recorded = None if folder is None else run_folder(folder, outcomes[i], seed)
                state = train(experiments[i], baseline, seed, outcomes[i], progress, title, recorded)
                final[i] = state if seed == seeds[0] else final[i]
            outcomes[i].device_bytes = memory.device_peak()
            outcomes[i].device_bytes_is_bound = before is not None and outcomes[i].device_bytes == before

        progress.advance(0, "the zeros among the gradients", title)
        reference, batch = None, first_batch(baseline)
        for outcome, experiment, state in zip(outcomes, experiments, final, strict=True):
            # At the params where float32 ended, with the scale that this variant ended with.
            state = state.replace(params=_cast_like(final[0].params, state.params))
            params, activations = gradients(experiment.loss_fn, state, batch)
            reference = reference or (params, activations)
            outcome.zero_params = zero_share(reference[0], params)
            outcome.zero_activations = zero_share(reference[1], activations)
        del final, reference, batch

        progress.advance(0, "timing, in turn", title)
        turns = {
            variant: _turn(start(experiment, baseline, seeds[0]), experiment, first_batch(experiment))
            for variant, experiment in variants.items()
        }
        times = timing.interleaved(turns, rounds, after_round=lambda i: progress.advance(int(i >= 0), "timing"))
        for outcome, variant in zip(outcomes, variants, strict=True):
            outcome.milliseconds = times[variant]
    return outcomes


def _compile(outcome: Outcome, experiment: Experiment, batch: Any) -> None:
    state = jax.eval_shape(experiment.init, 0)
    outcome.step_bytes = memory.of_compiled(experiment.step.lower(state, batch).compile())
    outcome.flops = flops.count(experiment.step.jitted, state, batch)


def start(experiment: Experiment, baseline: Experiment, seed: int) -> jaxmp.TrainState:
    """The state that training starts from: the baseline's params in this experiment's param dtypes."""
    return experiment.create(init_params(experiment, baseline, seed))


def init_params(experiment: Experiment, baseline: Experiment, seed: int) -> Any:
    """The baseline's params in this experiment's param dtypes: drawn in half precision they would be others."""
    own = jax.eval_shape(experiment.init_params, seed)
    return _cast_like(baseline.init_params(seed), own)


def train(
    experiment: Experiment,
    baseline: Experiment,
    seed: int,
    outcome: Outcome,
    progress: Progress,
    title: str,
    folder: Path | None = None,
) -> jaxmp.TrainState:
    """Trains once and adds what came out to ``outcome``; training that cannot go on counts as not a number.

    The run is recorded in ``folder``, if there is one.
    """
    state = start(experiment, baseline, seed)
    title = f"{title}: {outcome.label}, seed {seed}"
    curve, late = [], Late()

    def read(old: Iterable[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in old:
            if recorded:
                recorded.log(step, metrics)
            curve.append(metrics["loss"])
            right = f"  accuracy {metrics['accuracy']:.1%}" if "accuracy" in metrics else ""
            progress.advance(1, f"loss {metrics['loss']:.4f}{right}", title)

    batches = itertools.islice(experiment.train_batches(seed), experiment.steps)
    with contextlib.nullcontext() if folder is None else record(folder) as recorded:
        try:
            for step, batch in enumerate(batches, 1):
                state, metrics = experiment.step(state, batch)
                if folder and step == 1:
                    describe(experiment, state, batch, folder)
                read(late.push(step, metrics))
            read(late.drain())
            test = experiment.evaluate(state)
        except FloatingPointError as error:  # jaxmp.NonFiniteTrainingError
            outcome.failure = str(error)
            read(late.drain())
            progress.advance(experiment.steps - len(curve), "stopped: not finite", title)
            test = dict.fromkeys(("loss", "accuracy"), math.nan)
        if recorded:
            recorded.log(len(curve), test, "test")
            recorded.summary(**environment())
    outcome.test.append(test)
    outcome.curves.append(curve)
    outcome.skipped.append(int(state.skipped))
    outcome.final_scale.append(float(jaxmp.get_loss_scale(state.opt_state).loss_scale))
    return state


def _turn(state: jaxmp.TrainState, experiment: Experiment, batch: Any) -> Callable[[], Any]:
    def step() -> Any:
        nonlocal state
        state, metrics = experiment.step(state, batch)
        return state, metrics

    return step


def _cast_like(params: Any, like: Any) -> Any:
    """A copy of ``params`` in the dtypes of ``like``: the step deletes the state that it is given."""
    return jax.tree.map(lambda param, other: jnp.array(param, other.dtype), params, like)
