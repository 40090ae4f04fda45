"""Read JAX's traces around the running code: ``jit``, ``vmap`` and ``shard_map``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src import config, core
from jax._src.interpreters.batching import BatchTrace


def static_arguments(jitted: Any) -> tuple[int, ...]:
    """Return the positions of the static arguments of a jitted function.

    ``jitted`` may come from ``jax.jit`` or from ``nnx.jit``.
    """
    numbers = getattr(getattr(jitted, "_jit_info", jitted), "static_argnums", None)
    return (numbers,) if isinstance(numbers, int) else tuple(numbers or ())


def is_tracing() -> bool:
    """Return whether operations are traced into a program that is compiled later."""
    return bool(jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE())


def is_tracing_jit() -> bool:
    """Return whether ``jax.jit`` traces the running code, or code that calls it."""
    infos = (getattr(getattr(trace, "frame", None), "debug_info", None) for trace in traces_around())
    return any(getattr(info, "traced_for", "") == "jit" for info in infos)


def traces_around() -> list[Any]:
    """Return the traces around the running code, innermost first."""
    trace, traces = core.trace_ctx.trace, []
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


def staging_trace() -> Any:
    """Return the innermost trace that records operations for a program; None if there is none."""
    return next((trace for trace in traces_around() if hasattr(trace, "frame")), None)


def batches_around() -> list[Any]:
    """Return the trace of each ``jax.vmap`` around the code, innermost first."""
    return [trace for trace in traces_around() if isinstance(trace, BatchTrace)]


def is_batched(value: Any, batch: Any) -> bool:
    """Return whether the ``jax.vmap`` with the trace ``batch`` maps over a value."""
    while isinstance(value, core.Tracer):
        if value._trace is batch:
            return True
        value = getattr(value, "primal", getattr(value, "val", None))
    return False


def is_staged(value: Any) -> bool:
    """Return whether a value is traced into a program that may be batched later."""
    return isinstance(value, core.Tracer) and hasattr(value._trace, "frame")


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramSoFar:
    """The program that JAX is tracing, with the fields of an open jaxpr.

    The values of ``constvars`` are unknown.
    """

    constvars: list[Any]
    invars: list[Any]
    eqns: list[Any]
    outvars: list[Any]


def program_so_far(values: Sequence[Any]) -> ProgramSoFar | None:
    """Return the program that computes traced values, as far as it is traced.

    The result is None if the values do not belong to one program that JAX traces.
    """
    traces = {value._trace if is_staged(value) else None for value in values}
    frame = getattr(traces.pop(), "frame", None) if len(traces) == 1 else None
    if frame is None:
        return None
    constants = list(frame.constvar_to_val.copy())  # before the equations: a collection may delete both
    return ProgramSoFar(constants, list(frame.invars), frame.get_eqns(), [value.val for value in values])


def shows_what_varies() -> bool:
    """Return whether types show the mesh axes over which a value varies.

    Types show these axes while a ``shard_map`` with ``check_vma=True`` is traced.
    """
    return bool(config._check_vma.value)


def manual_axes(value: Any) -> tuple[str, ...]:
    """Return the mesh axes over which ``value`` may vary.

    The axes belong to the ``shard_map`` that is being traced.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if shows_what_varies():
        axes = [axis for axis in axes if axis in jax.typeof(value).mat.varying]
    return tuple(axes)


def may_be_skipped() -> bool:
    """Return whether some shards of a ``shard_map`` may skip the traced code.

    Shards may skip the code of a branch or a loop. JAX records a branch or a loop as the purpose of a
    trace. The length of a ``fori_loop`` is assumed to differ between shards.
    """
    traced = (getattr(getattr(trace, "frame", None), "debug_info", None) for trace in traces_around())
    around = (getattr(info, "traced_for", "") for info in traced)
    optional = {"cond", "switch", "while_cond", "while_body", "fori_loop"}
    return next((purpose in optional for purpose in around if purpose in optional | {"shard_map"}), False)
