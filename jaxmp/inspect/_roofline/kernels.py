"""Predict the time of each kernel of a compiled program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxmp.base import hardware
from jaxmp.base.tpus import Tpu
from jaxmp.inspect.compiled.hlo import HloProgram, Instruction
from jaxmp.inspect.compiled.kernels import KernelProduct, copied_array, moved_bytes, products_of

ACHIEVED = {"dot": 0.8, "convolution": 0.5, "attention": 0.45}
"""The share of the peak FLOP/s at which each kind of product is assumed to run, on all devices.

The share of matrix products was measured on an H200, after the time for their bytes was subtracted. It is 0.80 to 0.95
in bfloat16, 0.77 to 0.84 in TF32, and 0.73 to 0.77 in float32 (three shapes each). Convolutions and attentions run in
cuDNN. Their shares were chosen so that predictions fit the recorded steps of ResNet-50 and BERT.
"""
LIMITS_OF_GPU = ("arithmetic", "bytes", "launch")
LIMITS_OF_TPU = ("arithmetic", "bytes", "vector")
SMALL_SHARE = 0.5
"""On a TPU, the share of a kernel's time below which neither its products nor its bytes explain the time."""
ACHIEVED_BANDWIDTH = 0.9
"""The share of the memory bandwidth that kernels achieve; on an H200, a copy moved 4.3 of 4.8 TB/s."""
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
      bytes: the bytes of the device's memory that all launches read and write.
      bound: the part that takes the longest predicted time: ``"arithmetic"`` (products), ``"bytes"``, on a GPU
        ``"launch"``, or on a TPU ``"vector"``, if products and bytes explain less than half of the time.
      milliseconds: the predicted time.
      recomputed: whether the kernel recomputes forward values for the backward pass, under ``jax.checkpoint``.
      cycles: on a TPU, the cycles that the compiler estimates for all launches; None if it estimates none.
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
    cycles: int | None = None


def kernels_on_gpu(program: HloProgram, device: hardware.Hardware) -> Iterator[Kernel]:
    """Yield the kernels of a program for a GPU, with the times of the roofline model."""
    for computation, instruction, times in program.instructions_by_run(into_fusions=False, repeat_loops=True):
        if not instruction.is_kernel:
            continue
        products, moved = products_of(program, computation, instruction), moved_bytes(program, computation, instruction)
        seconds = {
            "arithmetic": sum(
                product.flops / (ACHIEVED[product.kind] * rate_of(product.dtype, device)) for product in products
            ),
            "bytes": moved / (ACHIEVED_BANDWIDTH * (device.peak_bandwidth or math.inf)),
            "launch": LAUNCH,
        }
        bound = max(seconds, key=lambda limit: seconds[limit])
        yield _kernel(program, instruction, times, products, moved, bound, 1e3 * sum(seconds.values()))


def kernels_on_tpu(program: HloProgram, tpu: Tpu) -> Iterator[Kernel]:
    """Yield the kernels of a program for a TPU, with the times that the compiler estimates.

    Copies that run beside other kernels take no time of their own, but count in :func:`memory_traffic`. Neither do
    collectives. A kernel without an estimate, such as a small copy, takes the time of its bytes.
    """
    device = hardware.detect(tpu.generation)
    for computation, instruction, times in program.instructions_by_run(into_fusions=False, repeat_loops=True):
        if not instruction.is_kernel or instruction.collective or copied_array(instruction) is not None:
            continue  # the last two run beside the kernels
        products, moved = products_of(program, computation, instruction), moved_bytes(program, computation, instruction)
        cycles = instruction.estimated_cycles
        if cycles is None and not moved:
            continue  # an operation on a scalar in the memory of the core
        arithmetic = sum(product.flops / rate_of(product.dtype, device) for product in products)
        bytes_time = moved / tpu.bandwidth
        seconds = bytes_time if cycles is None else cycles / (tpu.clock_ghz * 1e9)
        bound = "arithmetic" if arithmetic > bytes_time else "bytes"
        if max(arithmetic, bytes_time) < SMALL_SHARE * seconds:
            bound = "vector"
        yield _kernel(program, instruction, times, products, moved, bound, 1e3 * seconds, cycles)


def memory_traffic(program: HloProgram) -> float:
    """Return the bytes that a program for a TPU reads from and writes to the device's memory."""
    total = 0.0
    for computation, instruction, times in program.instructions_by_run(into_fusions=False, repeat_loops=True):
        if instruction.is_kernel and not instruction.collective:
            total += times * moved_bytes(program, computation, instruction)
    return total


def _kernel(
    program: HloProgram,
    instruction: Instruction,
    times: int,
    products: list[KernelProduct],
    moved: float,
    bound: str,
    milliseconds: float,
    cycles: int | None = None,
) -> Kernel:
    """Return a kernel that runs ``times`` times; all other arguments are for one run."""
    made_by = program.made_by(instruction)
    return Kernel(
        name=instruction.name,
        path=made_by.path,
        source=program.source(made_by),
        dtype=max(products, key=lambda product: product.flops).dtype if products else "",
        count=times,
        flops=times * sum(product.flops for product in products),
        bytes=int(times * moved),
        bound=bound,
        milliseconds=times * milliseconds,
        recomputed=made_by.phase == "recomputed",
        cycles=None if cycles is None else times * cycles,
    )


def rate_of(dtype: str, device: hardware.Hardware) -> float:
    """Return the peak FLOP/s of products of a dtype.

    A dtype with an unknown rate gets the rate of float32.
    """
    rate = device.product_rate(dtype) or device.product_rate("float32")
    if rate is None:
        raise ValueError(f"the peak rates of {device.name} are unknown")
    return 1e12 * rate
