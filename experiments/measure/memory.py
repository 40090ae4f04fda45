"""Peak memory: what the compiled step needs, and what the device reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from experiments.models import attention
from jaxmp.inspect.program import compiling
from jaxmp.training.step import TrainStep

NO_ROOM = sys.maxsize
"""The need of a step that had no room to be compiled."""


def of_step(step: Callable[..., Any], args: tuple[Any, Any], device: str | None = None) -> int:
    """Return the bytes that a step needs at most.

    ``NO_ROOM`` if its compiler had none; arguments are those of :func:`compiled`.

    Raises:
      ValueError: the compiler does not tell.
    """
    try:
        needed = of_compiled(compiled(step, args, device))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # the compiler tries kernels, and those had no room
            raise
        return NO_ROOM
    if needed is None:
        raise ValueError(
            "the compiler must tell how much memory a step takes, but this device's says nothing; name a batch size, "
            "and look for no largest one"
        )
    return needed


def compiled(step: Callable[..., Any], args: tuple[Any, Any], device: str | None = None) -> Any:
    """A step compiled for its state, which it is given, and a batch.

    Args:
      step: a function, or a train step.
      args: state and batch, arrays or shapes.
      device: a GPU that is not there to compile for, where half attention is cuDNN's; None for the device that is.
    """
    with attention.implementation("cudnn" if device else None):
        jitted = step if isinstance(step, TrainStep) else jax.jit(step, donate_argnums=0)
        return compiling.compiled(jitted, args, device)


def of_compiled(compiled: Any) -> int | None:
    """Return the bytes that a compiled function needs at most.

    They are arguments, results that reuse none of them, and temporaries.

    None where the compiler does not tell.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


def device_peak() -> int | None:
    """Return the most bytes this process has had on the first device so far.

    None where the device does not count (CPU).
    """
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
