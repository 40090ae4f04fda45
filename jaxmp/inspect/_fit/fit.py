"""Find the fastest way to make a train step fit into a GPU's memory."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmp.base import hardware, tables
from jaxmp.base.arguments import printed
from jaxmp.inspect._fit.search import Trial, fastest, search
from jaxmp.inspect._memory.memory import Memory, of_call
from jaxmp.inspect._roofline.roofline import ERROR, ON_RECORD, hardware_of, of_program
from jaxmp.inspect.compiled import compiling
from jaxmp.inspect.compiled.hlo import HloProgram
from jaxmp.inspect.inspection import tool
from jaxmp.inspect.program.argument_kinds import batch_axes
from jaxmp.inspect.program.calls import is_step
from jaxmp.training.remat import NoLayersError

JAX_SHARE = 0.75
"""The share of a GPU's memory that JAX takes if no environment variable says otherwise."""


@dataclasses.dataclass(frozen=True)
class Fit(tables.Shown):
    """The combinations of rematerialisation and microbatches that were compiled, and the best one.

    Attributes:
      device: the name of the GPU.
      limit: the limit of the peak memory in bytes.
      batch: the number of examples in the batch, on all devices together.
      trials: the combinations that were compiled. Those that fit come first, the fastest first; then the others, those
        with the lowest peak first.
      memory: the memory of the first combination in ``trials``.
      has_statistics: whether the state has batch statistics, which are computed per microbatch.
    """

    device: str
    limit: int
    batch: int
    trials: tuple[Trial, ...]
    memory: Memory | None = dataclasses.field(default=None, repr=False, compare=False)
    has_statistics: bool = False

    @property
    def best(self) -> Trial | None:
        """Return the fastest combination that fits, or None if none fits."""
        return fastest(self.trials)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the best combination, for ``make_train_step`` or ``step.with_options``.

        Raises:
          ValueError: no combination fits.
        """
        if self.best is None:
            raise ValueError(
                f"no combination fits {tables.byte_text(self.limit)}; the lowest peak is {_peak_text(self.trials[0])}. "
                "Use a smaller batch, jaxmp.low_precision, or more devices."
            )
        return {"remat": self.best.remat, "accumulate_steps": self.best.accumulate_steps}

    def _shown(self) -> Any:
        limit = tables.byte_text(self.limit)
        columns = ("remat", "accumulate_steps", "peak", "ms predicted", "fits")
        rows = []
        for trial in self.trials:
            fits = "yes" if trial.fits else "no"
            rows.append((trial.remat, trial.accumulate_steps, _peak_text(trial), _time_text(trial), fits))
        if self.best is None:
            title = f"nothing fits into {limit} of {self.device}, batch of {self.batch}"
            return title, columns, rows, ("use a smaller batch, jaxmp.low_precision, or more devices",)
        title = f"{_peak_text(self.best)} of {limit} on {self.device}, batch of {self.batch}"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        after = [f"make_train_step(loss_fn, {options})"]
        if self.has_statistics and self.best.accumulate_steps > 1:
            after.append("batch statistics are computed per microbatch, so microbatches change the numbers")
        if self.device == ON_RECORD and len(rows) > 1:
            after.append(f"measured errors of predicted times are up to {ERROR:.0%}")
        return title, columns, rows, after


def _peak_text(trial: Trial) -> str:
    return tables.byte_text(trial.peak) if math.isfinite(trial.peak) else "does not compile"


def _time_text(trial: Trial) -> str:
    return f"{trial.milliseconds:.1f}" if math.isfinite(trial.milliseconds) else ""


@tool
def fit(
    step: Callable[..., Any], *, device: str | None = None, memory: int | None = None, topology: str | None = None
) -> Callable[..., Fit]:
    """Return a function that finds the fastest way to make a train step fit into a GPU's memory.

    Each combination of ``remat`` and ``accumulate_steps`` is compiled for the GPU, but not executed. The compiler
    reports its memory, and :func:`jaxmp.inspect.roofline` predicts its time. The step's own ``remat`` and
    ``accumulate_steps`` are replaced. If the whole batch fits without rematerialisation, one compilation is enough;
    otherwise about five to ten are needed.

    Args:
      step: a train step for Linen or NNX.
      device: None for the attached GPU, or the name of a GPU that is not attached, as for
        :func:`jaxmp.inspect.memory`.
      memory: the limit in bytes, for each device. By default, it is the share of the GPU's memory that JAX takes: 75 %,
        or the share that the environment variable ``XLA_CLIENT_MEM_FRACTION`` sets.
      topology: the topology of a cluster of such GPUs, as for :func:`jaxmp.inspect.memory`.

    Returns:
      A function of the step's arguments, or their shapes, that returns a :class:`Fit`.

    Raises:
      TypeError: ``step`` is not a train step.
      ValueError: ``device`` is unknown; the attached device has no known rates (such as a CPU); ``memory`` is not a
        positive number; or ``Sharding(reduce="once")``, which needs several microbatches.
      ModuleNotFoundError: the GPU ``device`` is not attached, and the packages that compile for it are missing.

    Example::

        result = jaxmp.inspect.fit(step, device="h100")(state, batch)
        print(result)
        step = step.with_options(**result.options)
    """
    if memory is not None and not (isinstance(memory, (int, float)) and memory > 0):
        raise ValueError(f"memory is a positive number of bytes, got {memory!r}; write e.g. memory=40 * 2**30")
    if not is_step(step):
        raise TypeError(
            f"fit takes a train step, got {printed(step)}; make one with jaxmp.make_train_step or "
            "jaxmp.nnx.make_train_step"
        )

    def fit_call(*args: Any) -> Fit:
        gpu = hardware_of(device)
        limit = limit_of(gpu) if memory is None else memory
        _, inputs = compiling.call_of(step, args)
        batch_size, examples = _batch_of(inputs[-1])
        with _status() as status:
            compiler = _Compiler(step, args, device, topology, gpu, limit, status)
            counts = [count for count in range(1, examples + 1) if examples % count == 0]
            trials = search(compiler.measure, counts, limit)
        trials.sort(key=lambda trial: (0, trial.milliseconds) if trial.fits else (1, trial.peak))
        plan = compiler.memories.get((trials[0].remat, trials[0].accumulate_steps))
        has_statistics = plan is not None and plan.by_kind["model_state"] > 0
        return Fit(gpu.name, limit, batch_size, tuple(trials), plan, has_statistics)

    return fit_call


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Compiles a call of a step with different options.

    Attributes:
      memories: the memory of each combination that was compiled.
    """

    step: Any
    args: tuple[Any, ...]
    device: str | None
    topology: str | None
    gpu: hardware.Hardware
    limit: int
    status: Any
    memories: dict[tuple[str, int], Memory] = dataclasses.field(default_factory=dict)

    def measure(self, remat: str, accumulate_steps: int) -> Trial | None:
        """Return the memory and the predicted time of a combination.

        The result is None if the combination needs layers, and the model has none.
        """
        self.status.update(f"compiling remat={remat!r}, accumulate_steps={accumulate_steps}")
        step = self.step.with_options(remat=remat, accumulate_steps=accumulate_steps)
        call, inputs = compiling.call_of(step, self.args)
        try:
            compiled = compiling.compiled(call, inputs, self.device, self.topology)
        except NoLayersError:
            return None
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Trial(remat, accumulate_steps, math.inf, math.inf, fits=False)
        program = HloProgram(str(compiled.as_text()))
        plan = of_call(call, inputs, compiled, program, self.device, self.topology)
        self.memories[remat, accumulate_steps] = plan
        state_bytes = sum(plan.by_kind[kind] for kind in ("params", "optimizer", "model_state"))
        milliseconds = of_program(program, self.gpu).milliseconds
        return Trial(remat, accumulate_steps, plan.peak, milliseconds, plan.peak <= self.limit, state_bytes)


def limit_of(gpu: hardware.Hardware) -> int:
    """Return the bytes of a GPU that JAX takes."""
    if gpu.memory_bytes is None:
        raise ValueError(f"the memory of {gpu.name} is unknown; pass its bytes: fit(step, memory=24 * 2**30)")
    share = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return int(gpu.memory_bytes * (float(share) if share else JAX_SHARE))


def _batch_of(batch: Any) -> tuple[int, int]:
    """Return the number of examples in a batch, on all devices and on each device."""
    arrays = jax.tree.leaves(batch)
    sizes = [np.shape(array)[0] for array in arrays if np.shape(array)]
    if not sizes:
        raise ValueError(f"fit splits axis 0 of the batch, but the batch has no arrays, got {printed(batch)}")
    return sizes[0], sizes[0] // math.prod(batch_axes(arrays).values())


def _status() -> Any:
    """Return a context with a line of text on the terminal's standard error."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    return console.status("compiling")
