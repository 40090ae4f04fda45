"""Train and measure a task under several policies and loss scales."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp
from experiments.measure import flops, memory, timing
from experiments.measure.gradients import gradients, zero_share
from experiments.report.progress import Progress
from experiments.training import loop
from experiments.training.experiment import Experiment, PendingMetrics
from experiments.training.precision import read_low_precision
from jaxmp.inspect.compiled import compiling

BASELINE = ("float32", "none")
AUTOCAST = "autocast:"  # prefix of a policy with which the loss function runs under autocast
RESERVED = loop.OF_A_RUN | {"seed"}
"""Flags of a training script that every comparison sets itself."""


def read_variant(text: str) -> tuple[str, str]:
    """Return the policy and the ``--low-precision`` in a text.

    Examples are ``autocast:mixed_float16`` and ``bfloat16_sr+kahan``.

    Raises:
      ValueError: the text after the plus is not a value of ``--low-precision``.
    """
    policy, plus, low = text.removeprefix(AUTOCAST).partition("+")
    if plus:
        read_low_precision(optax.identity(), low, 0)
    return policy, low or "none"


@dataclasses.dataclass(frozen=True)
class Task:
    """A training script and preset values of its flags."""

    script: ModuleType
    preset: dict[str, Any]

    def flags(self, changes: Iterable[Iterable[str]], reserved: Set[str], owner: str) -> Any:
        """Return the preset flags, changed by the flags in ``changes``.

        An example of such a flag is ``model=resnet18``.

        Raises:
          ValueError: a flag is ``reserved``. The error says that the ``owner`` sets this flag.
        """
        preset = self.script.Config(**self.preset)
        flags = tyro.cli(
            self.script.Config,
            prog=f"python -m {self.script.__name__}",  # so that errors point to the --help of this script
            args=[f"--{flag.lstrip('-')}" for texts in changes for flag in texts],
            default=preset,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        for field in dataclasses.fields(flags):
            if field.name in reserved and getattr(flags, field.name) != getattr(preset, field.name):
                raise ValueError(
                    f"--flags sets the task's flags, but --{field.name.replace('_', '-')} is set by the {owner}"
                )
        return flags

    def prepare(self, flags: Any, policy: str, loss_scale: str) -> Experiment:
        """Return the task under a policy, a text for :func:`read_variant`.

        Raises:
          ValueError: the value of a flag is invalid.
          DataError: the data are not available.
        """
        name, low = read_variant(policy)
        low = low if low != "none" else flags.low_precision
        autocast = policy.startswith(AUTOCAST)
        return self.script.prepare(
            dataclasses.replace(flags, policy=name, autocast=autocast, loss_scale=loss_scale, low_precision=low)
        )


@dataclasses.dataclass
class Outcome:
    """The results of a policy with a loss scale.

    ``test``, ``curves``, ``skipped`` and ``final_scale`` have one entry for each seed.

    Attributes:
      policy: the name of the policy.
      loss_scale: the name of the loss scale; ``none`` without one.
      test: the held-out metrics.
      curves: the training loss at each step.
      skipped: the number of skipped steps.
      final_scale: the loss scale after the last step.
      failure: the reason why training stopped early, or empty.
      milliseconds: the time of a step, one figure per round (see :func:`experiments.measure.timing.interleaved`).
      step_bytes: the memory of the compiled step; None if the compiler does not say.
      device_bytes: the device's peak memory; None if the device does not count its memory.
      device_bytes_is_bound: whether an earlier variant had the same peak, so that ``device_bytes`` is an upper bound.
      flops: the FLOPs of a step's products, by dtype.
      zero_activations: the share of the activations' gradients that became zero
        (:func:`experiments.measure.gradients.zero_share`).
      zero_params: the share of the params' gradients that became zero.
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
        """Return the name of the variant in tables and pictures."""
        return label(self.policy, self.loss_scale)


def label(policy: str, loss_scale: str) -> str:
    """Return the policy, and the loss scale if there is one."""
    return policy if loss_scale == "none" else f"{policy}, {loss_scale}"


def compare(
    variants: dict[tuple[str, str], Experiment],
    seeds: list[int],
    rounds: int,
    progress: Progress,
    title: str,
) -> list[Outcome]:
    """Train every variant with every seed, and time all variants in turn.

    The zeros in the gradients of each variant are counted too. With the same seed, all variants start from the
    baseline's params, rounded to their param dtypes.

    Args:
      variants: experiments by policy and loss scale, :data:`BASELINE` first.
      seeds: the seeds of the params and of the order of the examples.
      rounds: the number of rounds of timing. A round counts as one step of progress.
      progress: the progress bar.
      title: the name of the task in the progress bar.
    """
    experiments = list(variants.values())
    outcomes = [Outcome(*variant) for variant in variants]
    baseline = experiments[0]

    def first_batch(experiment: Experiment) -> Any:
        return next(experiment.train_batches(seeds[0]))  # images have the experiment's dtype

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no loss scale", category=UserWarning)  # compared on purpose
        progress.advance(0, "compiling", title)
        # XLA compiles on one core, so compile in parallel. Not on a GPU, where XLA also times kernels.
        with ThreadPoolExecutor(os.cpu_count() if jax.default_backend() == "cpu" else 1) as pool:
            list(pool.map(_compile, outcomes, experiments, map(first_batch, experiments)))

        final: list[Any] = [None] * len(variants)
        # The device's peak never falls, so train in order of memory. Then each variant sets a new peak.
        for i in sorted(range(len(variants)), key=lambda i: outcomes[i].step_bytes or 0):
            before = memory.device_peak()
            for seed in seeds:
                state = train(experiments[i], baseline, seed, outcomes[i], progress, title)
                final[i] = state if seed == seeds[0] else final[i]
            outcomes[i].device_bytes = memory.device_peak()
            outcomes[i].device_bytes_is_bound = before is not None and outcomes[i].device_bytes == before

        progress.advance(0, "the zeros among the gradients", title)
        reference, batch = None, first_batch(baseline)
        for outcome, experiment, state in zip(outcomes, experiments, final, strict=True):
            # All variants are compared at float32's final params, each with its own final loss scale.
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
    outcome.step_bytes = compiling.peak_bytes(experiment.step.lower(state, batch).compile())
    outcome.flops = flops.count(experiment.step.jitted, state, batch)


def start(experiment: Experiment, baseline: Experiment, seed: int) -> jaxmp.TrainState:
    """Return the initial state of an experiment.

    The state has the baseline's params, in this experiment's param dtypes.
    """
    return experiment.create(init_params(experiment, baseline, seed))


def init_params(experiment: Experiment, baseline: Experiment, seed: int) -> Any:
    """Return the baseline's params in this experiment's param dtypes.

    Params drawn in half precision would differ from the baseline's.
    """
    shapes = jax.eval_shape(experiment.init_params, seed)
    return _cast_like(baseline.init_params(seed), shapes)


def train(
    experiment: Experiment,
    baseline: Experiment,
    seed: int,
    outcome: Outcome,
    progress: Progress,
    title: str,
) -> jaxmp.TrainState:
    """Train once and add the results to ``outcome``.

    If training stops early, the metrics are nan.
    """
    state = start(experiment, baseline, seed)
    title = f"{title}: {outcome.label}, seed {seed}"
    curve, pending = [], PendingMetrics()

    def read(old: Iterable[tuple[int, dict[str, float]]]) -> None:
        for _, metrics in old:
            curve.append(metrics["loss"])
            right = f"  accuracy {metrics['accuracy']:.1%}" if "accuracy" in metrics else ""
            progress.advance(1, f"loss {metrics['loss']:.4f}{right}", title)

    batches = itertools.islice(experiment.train_batches(seed), experiment.steps)
    try:
        for step, batch in enumerate(batches, 1):
            state, metrics = experiment.step(state, batch)
            read(pending.push(step, metrics))
        read(pending.drain())
        test = experiment.evaluate(state)
    except FloatingPointError as error:  # jaxmp.NonFiniteTrainingError
        outcome.failure = str(error)
        read(pending.drain())
        progress.advance(experiment.steps - len(curve), "stopped: not finite", title)
        test = dict.fromkeys(("loss", "accuracy"), math.nan)
    outcome.test.append(test)
    outcome.curves.append(curve)
    outcome.skipped.append(int(state.skipped_steps))
    outcome.final_scale.append(float(state.loss_scale))
    return state


def _turn(state: jaxmp.TrainState, experiment: Experiment, batch: Any) -> Callable[[], Any]:
    def step() -> Any:
        nonlocal state
        state, metrics = experiment.step(state, batch)
        return state, metrics

    return step


def _cast_like(params: Any, like: Any) -> Any:
    """Return a copy of ``params`` in the dtypes of ``like``.

    A copy is needed because the step donates its state.
    """
    return jax.tree.map(lambda param, other: jnp.array(param, other.dtype), params, like)
