"""The peak memory of a step, compiled and as the device reports it, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import jaxmp
from experiments.models import attention
from jaxmp.inspect.compiled import compiling
from jaxmp.training.step import TrainStep


def of_step(step: Callable[..., Any], args: tuple[Any, Any], device: str | None = None) -> int:
    """Return the peak bytes of a step. The arguments are those of :func:`compiled`.

    Raises:
      ValueError: the compiler does not report the memory of a step.
    """
    needed = compiling.peak_bytes(compiled(step, args, device))
    if needed is None:
        raise ValueError(
            "the compiler must report how much memory a step needs, but this device's compiler does not; compile for a "
            "device that is not attached"
        )
    return needed


def largest_batch(
    step: Callable[..., Any], args: tuple[Any, Any], limit: int, device: str | None = None, at_most: int | None = None
) -> int:
    """Return the largest batch whose step needs at most ``limit`` bytes; 0 if nothing fits.

    The result is a multiple of 8, unless not even 8 examples fit.

    Args:
      step: as for :func:`compiled`.
      args: the state and a batch of any size.
      limit: the bytes that the step may take.
      device: as for :func:`compiled`.
      at_most: the largest useful batch; None for no limit.
    """
    with attention.implementation(attention.implementation_on(device)):
        plan = jaxmp.inspect.memory(_jitted(step), device=device)(*args)
        largest = plan.largest_batch(limit, multiple_of=8, at_most=at_most)
        return largest or plan.largest_batch(limit, at_most=at_most)


def compiled(step: Callable[..., Any], args: tuple[Any, Any], device: str | None = None) -> Any:
    """Compile a step for a state, which is donated, and a batch.

    Args:
      step: a function, or a train step.
      args: the state and the batch, as arrays or shapes.
      device: a GPU or TPU that is not attached, to compile for. On a GPU, cuDNN then computes half-precision attention.
        None compiles for the attached device.
    """
    with attention.implementation(attention.implementation_on(device)):
        return compiling.compiled(_jitted(step), args, device)


def _jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    return step if isinstance(step, TrainStep) else jax.jit(step, donate_argnums=0)


def device_peak() -> int | None:
    """Return this process's peak bytes on the first device.

    The result is None on a CPU, which does not count its memory.
    """
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
