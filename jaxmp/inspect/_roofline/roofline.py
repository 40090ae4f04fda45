"""Predict the time of a compiled program on a GPU.

The prediction uses the GPU's peak FLOP/s, its memory bandwidth, and the time of a kernel launch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxmp.base import hardware, tables
from jaxmp.base.inspection import tool
from jaxmp.inspect.compiled import compiling, targets
from jaxmp.inspect.compiled.hlo import COLLECTIVES, HloProgram, Instruction
from jaxmp.inspect.compiled.kernels import moved_bytes, products_of

ACHIEVED = {"dot": 0.8, "convolution": 0.5, "attention": 0.45}
"""The share of the peak FLOP/s at which each kind of product is assumed to run, on all devices.

The share of matrix products was measured on an H200, after the time for their bytes was subtracted. It is 0.80 to 0.95
in bfloat16, 0.77 to 0.84 in TF32, and 0.73 to 0.77 in float32 (three shapes each). Convolutions and attentions run in
cuDNN. Their shares were chosen so that predictions fit the recorded steps of ResNet-50 and BERT.
"""
_ONLY_MOVE = ("__cub$", "AllocateBuffer", "MoveToHost", "MoveToDevice", "annotate_device_placement")
"""Prefixes of the targets of custom calls that only move or sort data."""
LIMITS = ("arithmetic", "bytes", "launch")
ACHIEVED_BANDWIDTH = 0.9
"""The share of the memory bandwidth that kernels achieve; on an H200, a copy moved 4.3 of 4.8 TB/s."""
ON_RECORD = "NVIDIA H200"
ERROR = 0.12
"""The largest measured relative error of a prediction. All measurements were on an H200; see docs/tools/roofline.md."""
LAUNCH = 2e-6
"""Seconds from the end of a kernel to the start of the next one, with or without a CUDA graph."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of the compiled program, and its cost over all launches.

    Attributes:
      name: the name of the kernel's instruction in the text of the compiled program.
      path: the names of the modules and scopes around the instruction, joined by ``/``.
      source: the file and line in the user's code.
      dtype: the dtype of the product with the most FLOPs; empty if the kernel has no products.
      count: the number of launches.
      flops: the FLOPs of the products in all launches; a multiply-add is 2.
      bytes: the bytes that all launches read and write.
      bound: the part that takes the longest predicted time: ``"arithmetic"``, ``"bytes"`` or ``"launch"``.
      milliseconds: the predicted time.
      recomputed: whether the kernel recomputes forward values for the backward pass, under ``jax.checkpoint``.
    """

    name: str
    path: str
    source: str
    dtype: str
    count: int
    flops: int
    bytes: int
    bound: str
    milliseconds: float
    recomputed: bool


@dataclasses.dataclass(frozen=True)
class Roofline(tables.Shown):
    """The predicted time of a program, by kernel.

    Attributes:
      device: the name of the device.
      milliseconds: the sum of the kernels' times, because kernels are assumed to run one after the other.
      kernels: the kernels, slowest first.
      model_flop_utilisation: the share of ``milliseconds`` that the products would take at the device's peak FLOP/s.
        Recomputed products are left out.
      uncounted: the names of collectives, and of kernels with unknown FLOPs (of Triton, Pallas or a solver). All of
        them take longer than predicted, because only their bytes are counted.
    """

    device: str
    milliseconds: float
    kernels: tuple[Kernel, ...]
    model_flop_utilisation: float
    uncounted: tuple[str, ...] = ()

    def _shown(self) -> Any:
        title = (
            f"{tables.time_text(self.milliseconds)} predicted on {self.device}, model FLOP utilisation "
            f"{self.model_flop_utilisation:.1%}"
        )
        notes = []
        if len(self.kernels) > _SHOWN:
            notes.append(f"… and {len(self.kernels) - _SHOWN} more")
        if self.uncounted:
            names = ", ".join(self.uncounted)
            notes.append(f"these take longer than predicted, because only their bytes are counted: {names}")
        times = dict.fromkeys(LIMITS, 0.0)
        for kernel in self.kernels:
            times[kernel.bound] += kernel.milliseconds
        notes.append("bound by: " + ", ".join(f"{bound} {tables.time_text(time)}" for bound, time in times.items()))
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
def roofline(fun: Callable[..., Any], *, device: str | None = None) -> Callable[..., Roofline]:
    """Return a function that predicts the time of a call of ``fun``.

    Nothing is executed. The time of a kernel is the sum of the time of its products, the time of its bytes, and the
    time of a launch. Products are assumed to run at a fixed share of the peak FLOP/s. Bytes are assumed to move at a
    fixed share of the bandwidth. Kernels are assumed to run one after the other. All branches of a conditional count,
    so its predicted time is too long. A loop of unknown length counts as one iteration, so its predicted time is too
    short.

    The prediction is based on the roofline model of Williams, Waterman, Patterson, "Roofline: an insightful visual
    performance model for multicore architectures", CACM 2009. That model takes the maximum of the times of products
    and bytes. :func:`roofline` adds the two times, because the sum agreed better with measurements.

    Args:
      fun: a train step, a function that JAX can compile, or a jitted function.
      device: None for the attached GPU, or the name of a GPU that is not attached, as for
        :func:`jaxmp.inspect.memory`.

    Returns:
      A function of ``fun``'s arguments, or their shapes, that returns a :class:`Roofline`.

    Raises:
      ValueError: ``device`` is unknown, or the attached device has no known peak rates (such as a CPU).
      ModuleNotFoundError: the GPU ``device`` is not attached, and the packages that compile for it are missing.
    """

    def predict(*args: Any) -> Roofline:
        device_hardware = hardware_of(device)
        return of_program(HloProgram(str(compiling.compiled(fun, args, device).as_text())), device_hardware)

    return predict


def hardware_of(device: str | None) -> hardware.Hardware:
    """Return the hardware of a GPU whose peak rates are known."""
    known = hardware.detect(device)
    if not known.peak_tflops or known.peak_bandwidth is None:
        raise ValueError(
            f"a predicted time needs the peak rates of the device, but jaxmp.hardware has none for {known.name!r}; "
            f"name a known GPU: {targets.choice()}"
        )
    return known


def of_program(program: HloProgram, device: hardware.Hardware) -> Roofline:
    """Return the prediction for a compiled program on ``device``."""
    kernels = sorted(_kernels(program, device), key=lambda kernel: -kernel.milliseconds)
    total = sum(kernel.milliseconds for kernel in kernels)
    at_peak = 1e3 * sum(kernel.flops / _rate(kernel.dtype, device) for kernel in kernels if not kernel.recomputed)
    return Roofline(device.name, total, tuple(kernels), at_peak / total if total else 0.0, tuple(_uncounted(program)))


def _uncounted(program: HloProgram) -> list[str]:
    """Return the names of collectives, and of kernels with unknown FLOPs."""
    names = set()
    for computation, instruction, _ in program.instructions_by_run():
        target = instruction.target
        if target and not products_of(program, computation, instruction) and not target.startswith(_ONLY_MOVE):
            names.add(target)
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            names.add(kind)
    return sorted(names)


def _kernels(program: HloProgram, device: hardware.Hardware) -> Iterator[Kernel]:
    for computation, instruction, times in program.instructions_by_run(into_fusions=False, repeat_loops=True):
        if instruction.is_kernel:
            yield _kernel(program, computation, instruction, times, device)


def _kernel(
    program: HloProgram, computation: str, instruction: Instruction, times: int, device: hardware.Hardware
) -> Kernel:
    products, moved = products_of(program, computation, instruction), moved_bytes(program, computation, instruction)
    seconds = {
        "arithmetic": sum(
            product.flops / (ACHIEVED[product.kind] * _rate(product.dtype, device)) for product in products
        ),
        "bytes": moved / (ACHIEVED_BANDWIDTH * (device.peak_bandwidth or math.inf)),
        "launch": LAUNCH,
    }
    made_by = program.made_by(instruction)
    return Kernel(
        name=instruction.name,
        path=made_by.path,
        source=program.source(made_by),
        dtype=max(products, key=lambda product: product.flops).dtype if products else "",
        count=times,
        flops=times * sum(product.flops for product in products),
        bytes=int(times * moved),
        bound=max(seconds, key=lambda bound: seconds[bound]),
        milliseconds=1e3 * times * sum(seconds.values()),
        recomputed=made_by.phase == "recomputed",
    )


def _rate(dtype: str, device: hardware.Hardware) -> float:
    """Return the peak FLOP/s of a dtype, or of float32 if the rate is unknown."""
    rates = device.peak_tflops
    return 1e12 * rates.get(dtype, rates["float32"])
