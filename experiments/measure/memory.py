"""Peak memory: what the compiled step needs, and what the device reports."""

from __future__ import annotations

import sys
from typing import Any

import jax

from experiments.models import attention
from jaxmp.inspect import targets

NO_ROOM = sys.maxsize
"""What a step needs that could not even be compiled: nobody knows how much."""


def lower_for(step: Any, device: Any, state: Any, batch: Any) -> Any:
    """A train step lowered for a GPU that is not there, its state donated, its half attention cuDNN's."""
    with attention.implementation("cudnn"), targets.with_cudnn(targets.TARGETS["h200"].cudnn):
        traced = jax.jit(step, donate_argnums=0).trace(targets.on(device, state), targets.on(device, batch))
        return traced.lower(lowering_platforms=("cuda",))


def of_lowered(lowered: Any, compiler_options: dict[str, Any] | None = None) -> int:
    """Bytes that a lowered function needs at most, ``NO_ROOM`` if its compiler had none; compiles it.

    Raises:
      ValueError: the compiler does not tell.
    """
    try:
        needed = of_compiled(lowered.compile(compiler_options))
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


def of_compiled(compiled: Any) -> int | None:
    """Bytes that a compiled function needs at most: arguments, results that reuse none of them, temporaries.

    None where the compiler does not tell.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


def device_peak() -> int | None:
    """The most bytes this process has had on the first device so far; None where the device does not count (CPU)."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
