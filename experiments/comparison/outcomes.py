"""Train and measure a task under a policy and a loss scale."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Iterable, Set
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp
from experiments.measure.gradients import gradients, zero_share
from experiments.report.progress import Progress
from experiments.training.experiment import Experiment, PendingMetrics
from experiments.training.precision import read_low_precision
from jaxmp.inspect.compiled import compiling

AUTOCAST = "autocast:"  # prefix of a policy with which the loss function runs under autocast


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

    def flags(self, changes: Iterable[Iterable[str]], reserved: Set[str]) -> Any:
        """Return the preset flags, changed by the flags in ``changes``.

        An example of such a flag is ``model=resnet18``.

        Raises:
          ValueError: a flag is ``reserved``, because the comparison sets it.
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
                    f"--flags sets the task's flags, but --{field.name.replace('_', '-')} is set by the comparison"
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

    Attributes:
      policy: the name of the policy.
      loss_scale: the name of the loss scale; ``none`` without one.
      runs: the result of :func:`train` for each seed.
    """

    policy: str
    loss_scale: str
    runs: list[dict[str, Any]]

    @property
    def label(self) -> str:
        """Return the name of the variant in tables and pictures."""
        return self.policy if self.loss_scale == "none" else f"{self.policy}, {self.loss_scale}"

    @property
    def failure(self) -> str:
        """Return the reason why a run stopped early, or an empty text."""
        return next((run["failure"] for run in self.runs if run["failure"]), "")

    def of_first(self, name: str) -> Any:
        """Return a figure of the run with the first seed."""
        return self.runs[0][name]


def init_params(experiment: Experiment, baseline: Experiment, seed: int) -> Any:
    """Return the baseline's params in this experiment's param dtypes.

    Params drawn in half precision would differ from the baseline's.
    """
    return _cast_like(baseline.init_params(seed), jax.eval_shape(experiment.init_params, seed))


def train(
    experiment: Experiment, baseline: Experiment, seed: int, progress: Progress, title: str, count_zeros: bool = True
) -> dict[str, Any]:
    """Train once from the baseline's params, and return the results.

    Returns:
      A dictionary:

      - ``test``: the held-out metrics; nan if training stopped early
      - ``curve``: the training loss at each step
      - ``skipped``, ``final_scale``: the number of skipped steps, and the loss scale after the last step
      - ``failure``: the reason why training stopped early, or empty
      - ``ms``: the milliseconds of a step, without the first one, which compiles
      - ``step_bytes``: the peak memory of the compiled step; None if the compiler does not say
      - ``zero_activations``, ``zero_params``: the share of gradients that became zero (see :func:`zeros`); nan
        without ``count_zeros``
    """
    curve, pending, failure, started = [], PendingMetrics(), "", 0.0

    def read(old: Iterable[tuple[int, dict[str, float]]]) -> None:
        for _, metrics in old:
            curve.append(metrics["loss"])
            right = f"  accuracy {metrics['accuracy']:.1%}" if "accuracy" in metrics else ""
            progress.advance(1, f"loss {metrics['loss']:.4f}{right}", title)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no loss scale", category=UserWarning)  # compared on purpose
        state = experiment.create(init_params(experiment, baseline, seed))
        batch = next(experiment.train_batches(seed))
        compiled = experiment.step.lower(state, batch).compile()  # the loop reuses this program
        test = dict.fromkeys(("loss", "accuracy"), math.nan)
        try:
            for step, batch in enumerate(itertools.islice(experiment.train_batches(seed), experiment.steps), 1):
                state, metrics = experiment.step(state, batch)
                if step == 1:
                    jax.block_until_ready(metrics)
                    started = time.perf_counter()
                read(pending.push(step, metrics))
            read(pending.drain())
            seconds = time.perf_counter() - started
            test = experiment.evaluate(state)
        except FloatingPointError as error:  # jaxmp.NonFiniteTrainingError
            failure, seconds = str(error), math.nan
            read(pending.drain())
            progress.advance(experiment.steps - len(curve), "stopped: not finite", title)
        zero_params = zero_activations = math.nan
        if count_zeros and not failure:
            zero_params, zero_activations = zeros(experiment, baseline, state, seed)
    return {
        "test": test,
        "curve": curve,
        "skipped": int(state.skipped_steps),
        "final_scale": float(state.loss_scale),
        "failure": failure,
        "ms": 1000 * seconds / max(1, experiment.steps - 1),
        "step_bytes": compiling.peak_bytes(compiled),
        "zero_params": zero_params,
        "zero_activations": zero_activations,
    }


def zeros(experiment: Experiment, baseline: Experiment, state: jaxmp.TrainState, seed: int) -> tuple[float, float]:
    """Return the shares of gradients that are zero here and not in the baseline, for params and activations.

    Both are computed for the first batch with the params of ``state``.
    """
    before = jax.eval_shape(baseline.init_params, seed)
    exact = baseline.create(_cast_like(state.params, before)).replace(model_state=state.model_state)
    reference = gradients(baseline.loss_fn, exact, next(baseline.train_batches(seed)))
    found = gradients(experiment.loss_fn, state, next(experiment.train_batches(seed)))
    params, activations = (zero_share(*pair) for pair in zip(reference, found, strict=True))
    return params, activations


def _cast_like(params: Any, like: Any) -> Any:
    """Return a copy of ``params`` in the dtypes of ``like``.

    A copy is needed because the step donates its state.
    """
    return jax.tree.map(lambda param, other: jnp.array(param, other.dtype), params, like)
