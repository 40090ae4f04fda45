"""Peak memory of a compiled step, and the peak that the device reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from experiments.models import attention
from jaxmp.inspect.compiled import compiling
from jaxmp.training.step import TrainStep

NO_ROOM = sys.maxsize
"""The bytes of a step for which the compiler ran out of device memory."""


def of_step(step: Callable[..., Any], args: tuple[Any, Any], device: str | None = None) -> int:
    """Return the peak bytes of a step.

    The result is ``NO_ROOM`` if the compiler ran out of device memory. The arguments are those of :func:`compiled`.

    Raises:
      ValueError: the compiler does not report the memory of a step.
    """
    try:
        needed = of_compiled(compiled(step, args, device))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(
            error
        ):  # the compiler tries kernels on the device, which may run out of memory
            raise
        return NO_ROOM
    if needed is None:
        raise ValueError(
            "the compiler must report how much memory a step needs, but this device's compiler does not; give a batch "
            "size, and do not search for the largest one"
        )
    return needed


def compiled(step: Callable[..., Any], args: tuple[Any, Any], device: str | None = None) -> Any:
    """Compile a step for a state, which is donated, and a batch.

    Args:
      step: a function, or a train step.
      args: the state and the batch, as arrays or shapes.
      device: a GPU that is not attached, to compile for. cuDNN then computes half-precision attention. None compiles
        for the attached device.
    """
    with attention.implementation("cudnn" if device else None):
        jitted = step if isinstance(step, TrainStep) else jax.jit(step, donate_argnums=0)
        return compiling.compiled(jitted, args, device)


def of_compiled(compiled: Any) -> int | None:
    """Return the peak bytes of a compiled function.

    The peak includes the arguments, the temporaries, and the results that do not reuse an argument's memory. The result
    is None if the compiler does not report them.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


def device_peak() -> int | None:
    """Return this process's peak bytes on the first device.

    The result is None on a CPU, which does not count its memory.
    """
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
