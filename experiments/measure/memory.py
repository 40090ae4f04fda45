"""The peak memory of a step, compiled and as the device reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from experiments.models import attention
from jaxmp.inspect.compiled import compiling
from jaxmp.training.step import TrainStep


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
