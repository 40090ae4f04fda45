"""Predict the time of a compiled program on a GPU or TPU.

On a GPU, the prediction uses the peak FLOP/s, the memory bandwidth, and the time of a kernel launch. On a TPU, it uses
the cycles that the compiler estimates for each kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxmp.base import hardware, tables
from jaxmp.base.accelerators import BY_DEVICE_KIND
from jaxmp.base.inspection import tool
from jaxmp.base.tpus import Tpu
from jaxmp.inspect._roofline.kernels import (
    LIMITS_OF_GPU,
    LIMITS_OF_TPU,
    Kernel,
    kernels_on_gpu,
    kernels_on_tpu,
    memory_traffic,
    rate_of,
)
from jaxmp.inspect.compiled import compiling, targets
from jaxmp.inspect.compiled.hlo import HloProgram
from jaxmp.inspect.compiled.kernels import products_of
from jaxmp.inspect.program.calls import under_policy

_ONLY_MOVE = (
    "__cub$",
    "AllocateBuffer",
    "MoveToHost",
    "MoveToDevice",
    "annotate_device_placement",
    "ConcatBitcast",
    "GatherScatterIndices",
    "AssumeGatherIndices",
    "AsyncCollective",
)
"""Prefixes of the targets of custom calls that only move or sort data."""
ON_RECORD = "NVIDIA H200"
ERROR = 0.12
"""The largest measured relative error of a prediction. The measurements are in docs/tools/memory.md."""


@dataclasses.dataclass(frozen=True)
class Roofline(tables.Shown):
    """The predicted time of a program, by kernel.

    Attributes:
      device: the name of the device.
      milliseconds: on a GPU, the sum of the kernels' times, because kernels are assumed to run one after the other. On
        a TPU, the largest of ``parts``.
      kernels: the kernels, slowest first.
      model_flop_utilisation: the share of ``milliseconds`` that the products would take at the device's peak FLOP/s.
        Recomputed products are left out.
      not_counted: the parts of the time that are not in ``milliseconds``: loops of unknown length, which count as one
        iteration; kernels with unknown FLOPs (of Triton, Pallas or a solver), and on a GPU collectives, of which only
        the bytes count; lines of the compiled program that could not be read.
      parts: on a TPU, the milliseconds of three things that run at the same time; empty on a GPU. ``"kernels"`` is the
        sum of the kernels' times, by the cycles that the compiler estimates. ``"memory"`` is the time in which the
        peak bandwidth moves all bytes of the program. ``"links"`` is the time in which a device's links send the bytes
        of all collectives.
    """

    device: str
    milliseconds: float
    kernels: tuple[Kernel, ...]
    model_flop_utilisation: float
    not_counted: tuple[str, ...] = ()
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def _shown(self) -> Any:
        title = (
            f"{tables.time_text(self.milliseconds)} predicted on {self.device}, model FLOP utilisation "
            f"{self.model_flop_utilisation:.1%}"
        )
        notes = []
        if len(self.kernels) > _SHOWN:
            notes.append(f"… and {len(self.kernels) - _SHOWN} more")
        if self.parts:
            parts = [f"{part} {tables.time_text(time)}" for part, time in self.parts.items() if time]
            notes.append(f"cycles estimated by the compiler, not run; at the same time: {', '.join(parts)}")
        notes += tables.not_counted(self.not_counted)
        if self.not_counted:
            notes.append("so the call takes longer than predicted")
        limits = dict.fromkeys(LIMITS_OF_TPU if self.parts else LIMITS_OF_GPU, 0.0)
        for kernel in self.kernels:
            limits[kernel.bound] += kernel.milliseconds
        notes.append("bound by: " + ", ".join(f"{bound} {tables.time_text(time)}" for bound, time in limits.items()))
        if self.device == ON_RECORD:
            notes.append(f"measured errors are up to {ERROR:.0%}, so do not rank times that differ by less")
        return title, _COLUMNS, [_cells(kernel) for kernel in self.kernels[:_SHOWN]], notes


def _cells(kernel: Kernel) -> tuple[Any, ...]:
    return (
        f"{kernel.milliseconds:.3f}",
        kernel.count,
        kernel.bound,
        kernel.dtype,
        tables.short(kernel.flops),
        tables.byte_text(kernel.bytes),
        kernel.path or kernel.name,
        kernel.source,
    )


_COLUMNS = ("ms", "launches", "bound by", "dtype", "FLOP", "bytes", "path", "source")
_SHOWN = 20


@tool
def roofline(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    device: str | None = None,
) -> Callable[..., Roofline]:
    """Return a function that predicts the time of a call of ``fun``.

    Nothing is executed. On a GPU, the time of a kernel is the sum of the time of its products, the time of its bytes,
    and the time of a launch. Products are assumed to run at a fixed share of the peak FLOP/s. Bytes are assumed to move
    at a fixed share of the bandwidth. Kernels are assumed to run one after the other. All branches of a conditional
    count, so its predicted time is too long. A loop of unknown length counts as one iteration, so its predicted time is
    too short.

    On a TPU, the time of a kernel is the compiler's own estimate of its cycles. Copies and collectives run beside the
    kernels. The predicted time is the best case: the largest of the times of kernels, memory and links.

    The prediction for GPUs is based on the roofline model of Williams, Waterman, Patterson, "Roofline: an insightful
    visual performance model for multicore architectures", CACM 2009. That model takes the maximum of the times of
    products and bytes. :func:`roofline` adds the two times, because the sum agreed better with measurements.

    Args:
      fun: a train step, a function that JAX can compile, or a jitted function.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``, in addition to the policies in ``fun``. Leave it
        out for a train step that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      device: None for the attached device, or the name of a GPU or TPU that is not attached, as for
        :func:`jaxmp.inspect.memory`.

    Returns:
      A function of ``fun``'s arguments, or their shapes, that returns a :class:`Roofline`.

    Raises:
      ValueError: ``device`` is unknown, or the attached device has no known peak rates (such as a CPU).
      ModuleNotFoundError: the packages that compile for ``device`` are missing.
    """
    fun = under_policy(fun, policy, overrides)

    def predict(*args: Any) -> Roofline:
        device_hardware = hardware_of(device)
        return of_call(compiling.compile_call(fun, args, device), device_hardware)

    return predict


def hardware_of(device: str | None) -> hardware.Hardware:
    """Return the hardware of a device whose peak rates are known."""
    known = hardware.detect(device)
    if not known.peak_tflops or known.peak_bandwidth is None:
        raise ValueError(
            f"a predicted time needs the peak rates of the device, but jaxmp.hardware has none for {known.name!r}; "
            f"name a known device: {targets.choice()}"
        )
    return known


def of_call(call: compiling.CompiledCall, device: hardware.Hardware) -> Roofline:
    """Return the prediction for a compiled call on ``device``."""
    return of_program(call.program, device, call.collectives.wire)


def of_program(program: HloProgram, device: hardware.Hardware, sent: float = 0.0) -> Roofline:
    """Return the prediction for a compiled program on ``device``.

    ``sent`` is the number of bytes that the device sends to others. It has an effect on a TPU only.
    """
    known = BY_DEVICE_KIND.get(device.name)
    parts = {}
    if isinstance(known, Tpu):
        kernels = list(kernels_on_tpu(program, known))
        parts["kernels"] = sum(kernel.milliseconds for kernel in kernels)
        parts["memory"] = 1e3 * memory_traffic(program) / known.bandwidth
        parts["links"] = 1e3 * sent / (known.link_gb * 1e9)
        total = max(parts.values())
    else:
        kernels = list(kernels_on_gpu(program, device))
        total = sum(kernel.milliseconds for kernel in kernels)
    kernels.sort(key=lambda kernel: -kernel.milliseconds)
    at_peak = 1e3 * sum(kernel.flops / rate_of(kernel.dtype, device) for kernel in kernels if not kernel.recomputed)
    utilisation = at_peak / total if total else 0.0
    return Roofline(device.name, total, tuple(kernels), utilisation, _not_counted(program), parts)


def _not_counted(program: HloProgram) -> tuple[str, ...]:
    """Return sentences on the loops, kernels and collectives that take longer than predicted."""
    loops, kernels = set(), set()
    for computation, instruction, _ in program.instructions_by_run():
        target = instruction.target
        if target and not products_of(program, computation, instruction) and not target.startswith(_ONLY_MOVE):
            kernels.add(f"the FLOPs of {target}")
        if instruction.collective and not program.is_for_tpu:
            kernels.add(f"the time on the network of {instruction.collective}")
        if program.is_loop_of_unknown_length(instruction):
            place = " ".join(filter(None, (instruction.path, f"({program.source(instruction) or instruction.name})")))
            loops.add(f"the iterations of the loop {place} after the first")
    return (*program.not_counted, *sorted(loops), *sorted(kernels))
