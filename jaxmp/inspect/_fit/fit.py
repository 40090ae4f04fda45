"""Find the fastest way to make a train step fit into a device's memory."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmp.base import hardware, tables
from jaxmp.base.arguments import printed
from jaxmp.base.inspection import tool
from jaxmp.base.trees import path_name
from jaxmp.inspect._fit.combinations import LOSS_CHUNKS, REMATS, Trial, fastest, measure_combinations
from jaxmp.inspect._memory.memory import Memory
from jaxmp.inspect._memory.memory import of_call as memory_of_call
from jaxmp.inspect._roofline.roofline import ERROR, ON_RECORD, Roofline, hardware_of
from jaxmp.inspect._roofline.roofline import of_call as time_of_call
from jaxmp.inspect.compiled import compiling
from jaxmp.inspect.compiled.tpu_targets import DoesNotFitError
from jaxmp.inspect.program.argument_kinds import batch_axes, sharding_on_mesh
from jaxmp.inspect.program.calls import is_step, under_policy
from jaxmp.inspect.status import status_of
from jaxmp.nnx.training import TrainStep as NNXTrainStep
from jaxmp.training.remat import NoLayersError
from jaxmp.training.step import TrainStep

MARGIN = 0.07
"""The room for what the compiler does not report, such as workspaces, as a share of the compiled peak.

The measured peak of ResNet-50 was 7 % above the compiled peak, see docs/tools/memory.md.
"""
JAX_SHARE = 0.75
"""The share of a GPU's memory that JAX takes if no environment variable says otherwise."""


@dataclasses.dataclass(frozen=True)
class Fit(tables.Shown):
    """The combinations of rematerialisation, chunks and microbatches that were compiled, and the best one.

    Attributes:
      device: the name of the device.
      limit: the limit of the peak memory in bytes.
      batch: the number of examples in the batch, on all devices together.
      trials: the combinations that were compiled. Those that fit come first, the fastest first; then the others, those
        with the lowest peak first.
      memory: the memory of the first combination in ``trials``.
      notes: remarks on the combinations, such as why the batch cannot be split.
      margin: the room above the compiled peak, as a share of the peak. A combination fits if both fit.
      not_counted: the parts of the first combination in ``trials`` that its peak or its time does not count.
    """

    device: str
    limit: int
    batch: int
    trials: tuple[Trial, ...]
    memory: Memory | None = dataclasses.field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()
    margin: float = 0.0
    not_counted: tuple[str, ...] = ()

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
        return {option: getattr(self.best, option) for option in self._option_names()}

    def _option_names(self) -> tuple[str, ...]:
        """Return the names of the options that were tried."""
        has_chunks = any(trial.loss_chunks is not None for trial in self.trials)
        return ("remat", "loss_chunks", "accumulate_steps") if has_chunks else ("remat", "accumulate_steps")

    def _shown(self) -> Any:
        limit = tables.byte_text(self.limit)
        margin = f" with a margin of {self.margin:.0%}" if self.margin else ""
        notes = [*self.notes, *tables.not_counted(self.not_counted)]
        columns = (*self._option_names(), "peak", "ms predicted", "fits")
        rows = []
        for trial in self.trials:
            values = [getattr(trial, option) for option in self._option_names()]
            rows.append((*values, _peak_text(trial), _time_text(trial), "yes" if trial.fits else "no"))
        if self.best is None:
            title = f"nothing fits into {limit} of {self.device}{margin}, batch of {self.batch}"
            return title, columns, rows, (*notes, "use a smaller batch, jaxmp.low_precision, or more devices")
        title = f"{_peak_text(self.best)} of {limit} on {self.device}{margin}, batch of {self.batch}"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        after = [f"make_train_step(loss_fn, {options})"]
        after += notes
        if self.device == ON_RECORD and len(rows) > 1:
            after.append(f"measured errors of predicted times are up to {ERROR:.0%}")
        return title, columns, rows, after


def _peak_text(trial: Trial) -> str:
    return tables.byte_text(trial.peak) if math.isfinite(trial.peak) else "does not compile"


def _time_text(trial: Trial) -> str:
    return f"{trial.milliseconds:.1f}" if math.isfinite(trial.milliseconds) else ""


@tool
def fit(
    step: Any,
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    device: str | None = None,
    memory: int | None = None,
    topology: str | None = None,
    margin: float = MARGIN,
) -> Callable[..., Fit]:
    """Return a function that finds the fastest way to make a train step fit into a device's memory.

    Combinations of ``remat``, ``accumulate_steps`` and ``loss_chunks`` are compiled for the device, but not executed.
    The compiler reports their memory, and :func:`jaxmp.inspect.roofline` predicts their time. The step's own options of
    these names are replaced, but its ``remat`` is one of those that are tried. If the step fits without any of them,
    one compilation is enough; otherwise about ten are needed, or twenty with ``loss_chunks``.

    Args:
      step: a train step for Linen or NNX.
      policy: the policy of the step. Leave it out for a step that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      device: None for the attached device, or the name of a GPU or TPU that is not attached, as for
        :func:`jaxmp.inspect.memory`.
      memory: the limit in bytes, for each device. By default, it is the memory that JAX takes: the whole memory of a
        TPU, and 75 % of a GPU's, or the share that the environment variable ``XLA_CLIENT_MEM_FRACTION`` sets.
      topology: the topology of a cluster of such GPUs, as for :func:`jaxmp.inspect.memory`.
      margin: the room for what the compiler does not report, as a share of the compiled peak. A combination fits if
        its peak times ``1 + margin`` is within the limit.

    Returns:
      A function of the step's arguments, or their shapes, that returns a :class:`Fit`.

    Raises:
      TypeError: ``step`` is not a train step, or gets the wrong number of arguments.
      ValueError: ``device`` is unknown; the attached device has no known rates (such as a CPU); ``memory`` is not a
        number of at least 1024 bytes; ``margin`` is not a share; the batch has no arrays; or the step has a mesh, and
        the shapes that you pass are not on it.
      ModuleNotFoundError: the packages that compile for ``device`` are missing.

    Example::

        result = jaxmp.inspect.fit(step, device="h100")(state, batch)
        print(result)
        step = step.with_options(**result.options)
    """
    if memory is not None and not _is_size(memory):
        raise ValueError(f"memory is a positive number of bytes, got {memory!r}; write e.g. memory=40 * 2**30")
    if memory is not None and memory < 2**10:
        raise ValueError(f"memory is a number of bytes, got {memory}; for {memory} GiB, write memory={memory} * 2**30")
    if not 0 <= margin < 1:
        raise ValueError(f"margin is a share of the peak from 0 to 1, got {margin!r}; write e.g. 0.1 for 10 %")
    if not is_step(step):
        raise TypeError(
            f"fit takes a train step, got {printed(step)}; pass the step that jaxmp.make_train_step or "
            "jaxmp.nnx.make_train_step returned"
        )

    step = under_policy(step, policy, overrides)
    inner_step: TrainStep = step.of_trees if isinstance(step, NNXTrainStep) else step

    def fit_call(*args: Any) -> Fit:
        gpu = hardware_of(device)
        limit = limit_of(gpu) if memory is None else int(memory)
        _, inputs = compiling.call_of(step, args)
        options = inner_step.options
        batch = _Batch.of(inputs[-1], options.get("sharding"))
        own_remat = options.get("remat")
        remats = [*REMATS, *([own_remat] if own_remat is not None and own_remat not in REMATS else [])]
        with status_of("compiling") as status:
            usable = limit / (1 + margin)
            compiler = _Compiler(step, args, device, topology, gpu, usable, status)
            chunks = LOSS_CHUNKS if compiler.uses_chunks(batch.microbatches[0]) else [None]
            trials = measure_combinations(compiler.measure, remats, chunks, batch.microbatches, usable)
        if not trials:
            raise ValueError("; ".join(compiler.notes))
        trials.sort(key=lambda trial: (0, trial.milliseconds) if trial.fits else (1, trial.peak))
        best_memory = compiler.memories.get(trials[0])
        notes = [*compiler.notes]
        if has_batch_statistics(args) and trials[0].fits and trials[0].accumulate_steps > 1:
            notes.append("batch statistics are computed per microbatch, so microbatches change the numbers")
        not_counted = compiler.not_counted.get(trials[0], ())
        return Fit(gpu.name, limit, batch.size, tuple(trials), best_memory, tuple(notes), margin, not_counted)

    return fit_call


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The batch of a step.

    Attributes:
      size: the number of examples on all devices together.
      microbatches: the possible numbers of microbatches, in ascending order.
    """

    size: int
    microbatches: list[int]

    @classmethod
    def of(cls, batch: Any, sharding: Any) -> _Batch:
        """Read the batch of a step whose ``sharding`` may be None."""
        arrays = jax.tree.leaves(batch)
        sizes = [np.shape(array)[0] for array in arrays if np.shape(array)]
        if not sizes:
            raise ValueError(f"the batch has no arrays to split along axis 0, got {printed(batch)}")
        axes = batch_axes(arrays)
        if sharding is not None and not any(map(sharding_on_mesh, arrays)):
            raise ValueError(
                "the step is on a mesh, but the shapes of the batch are not; pass jax.ShapeDtypeStruct(shape, dtype, "
                "sharding=jax.NamedSharding(mesh, spec)), also for the state"
            )
        size = max(sizes)
        examples = size // math.prod(axes.values()) if set(sizes) == {size} else 1
        counts = [count for count in range(1, examples + 1) if examples % count == 0]
        if sharding is not None and sharding.reduce == "once":  # needs several microbatches
            counts = counts[1:] or [2]
        return cls(size, counts)


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Compiles a call of a step with different options.

    Attributes:
      measured: the memory and the predicted time of each program, by its text before compilation.
      memories: the memory of each combination.
      not_counted: the parts of each combination that its peak or its time does not count.
      notes: the reasons why combinations are not possible.
    """

    step: Any
    args: tuple[Any, ...]
    device: str | None
    topology: str | None
    gpu: hardware.Hardware
    limit: float
    status: Any
    measured: dict[str, tuple[Memory, Roofline]] = dataclasses.field(default_factory=dict)
    memories: dict[Trial, Memory] = dataclasses.field(default_factory=dict)
    not_counted: dict[Trial, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def uses_chunks(self, accumulate_steps: int) -> bool:
        """Return whether the option ``loss_chunks`` changes the program of the step."""
        programs = set()
        for chunks in (1, 2):
            step = self.step.with_options(remat="none", loss_chunks=chunks, accumulate_steps=accumulate_steps)
            try:
                trace = compiling.trace_of_call(step, self.args, self.device, topology=self.topology)
            except (TypeError, ValueError):  # `measure` reports it
                return False
            programs.add(compiling.lowered_of(trace, self.device).as_text())
        return len(programs) > 1

    def measure(self, remat: Any, loss_chunks: int | None, accumulate_steps: int) -> Trial | None:
        """Return the memory and the predicted time of a combination.

        The result is None if the model has no layers to recompute, or if its loss does not accept microbatches.
        """
        options = {"remat": remat, "loss_chunks": loss_chunks, "accumulate_steps": accumulate_steps}
        self.status.update("compiling " + ", ".join(f"{name}={value!r}" for name, value in options.items()))
        step = self.step.with_options(**options)
        function, inputs = compiling.call_of(step, self.args)
        try:
            trace = compiling.trace_of_call(function, inputs, self.device, topology=self.topology)
            text = compiling.lowered_of(trace, self.device).as_text()
            if text in self.measured:  # such as "dots" and "dots_no_batch" of a step without batched products
                return self._record(options, *self.measured[text])
            compiled = compiling.compiled_of(trace, self.device)
        except NoLayersError:
            return None
        except DoesNotFitError as error:
            return Trial(**options, peak=error.needed, milliseconds=math.inf, fits=False)
        except (TypeError, ValueError) as error:
            if accumulate_steps == 1:
                raise
            self._note(f"{accumulate_steps} microbatches are not possible: {str(error).splitlines()[0]}")
            return None
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Trial(remat, accumulate_steps, math.inf, math.inf, fits=False, loss_chunks=loss_chunks)
        call = compiling.CompiledCall(function, inputs, trace, compiled, self.device, self.topology)
        self.measured[text] = memory_of_call(call), time_of_call(call, self.gpu)
        return self._record(options, *self.measured[text])

    def _record(self, options: dict[str, Any], memory: Memory, time: Roofline) -> Trial:
        state_bytes = sum(memory.by_kind[kind] for kind in ("params", "optimizer", "model_state"))
        fits = memory.peak <= self.limit
        trial = Trial(**options, peak=memory.peak, milliseconds=time.milliseconds, fits=fits, state_bytes=state_bytes)
        self.memories[trial] = memory
        self.not_counted[trial] = tuple(dict.fromkeys((*memory.not_counted, *time.not_counted)))
        return trial

    def _note(self, text: str) -> None:
        if not self.notes:
            self.notes.append(text)


def limit_of(gpu: hardware.Hardware) -> int:
    """Return the bytes of memory that JAX takes: all of a TPU's, and a share of a GPU's."""
    if gpu.memory_bytes is None:
        raise ValueError(f"the memory of {gpu.name} is unknown; pass its bytes: fit(step, memory=24 * 2**30)")
    if gpu.platform == "tpu":
        return gpu.memory_bytes
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if share := os.environ.get(name):
            try:
                return int(gpu.memory_bytes * float(share))
            except ValueError:
                raise ValueError(f"{name} must be a number such as 0.9, got {share!r}") from None
    return int(gpu.memory_bytes * JAX_SHARE)


def _is_size(memory: Any) -> bool:
    is_number = isinstance(memory, (int, float, np.number)) and not isinstance(memory, bool)
    return is_number and 0 < memory < math.inf


def has_batch_statistics(args: Sequence[Any]) -> bool:
    """Return whether the arguments of a step contain batch statistics of Linen or NNX."""
    leaves = jax.tree.leaves_with_path(tuple(args), is_leaf=lambda node: isinstance(node, nnx.Variable))
    return any(isinstance(leaf, nnx.BatchStat) or "batch_stats" in path_name(path).split("/") for path, leaf in leaves)
