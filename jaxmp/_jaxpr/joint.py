"""The sum of an array's rows and its largest magnitude, as one reduction where XLA does not divide the program.

The gradient of what a bias is added to is summed for the bias, and a float8 product needs its largest magnitude. XLA's
GPU compiler puts one reduction into the kernel that computes what it reads; of two it expects that each computes it
again, and gives them a kernel that reads it once more. A sum and a maximum as the parts of one complex number are one.
Over several devices XLA would have to join the parts that each finds. It cannot, and on GPUs ends the process. How many
there are is not known before a program is lowered: so this is an operation of its own, and two reductions wherever XLA
divides the program. Who wants the sum and who wants the magnitude ask for both, and XLA finds them once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._jaxpr.reading import has_explicit_axes

_both = Primitive("sum_and_largest")
_both.multiple_results = True


def sum_and_largest(value: Any) -> tuple[Any, Any]:
    """The sum of all rows of ``value`` and its largest magnitude, both in float32; beside a NaN this is NaN.

    Members of a ``jax.vmap`` have sums of their own, and one largest magnitude, whose derivative is zero.

    Args:
      value: an array (…, columns) of float32 or a half dtype.
    """
    summed, found = _in_two(value) if has_explicit_axes(value) else _both.bind(value)
    return summed, found


@custom_vmap
def largest(value: Any) -> Any:
    """The largest magnitude in an array alone, in float32, of all members of a ``jax.vmap``, but of no other shards."""
    # By columns first, as rows are summed, in whose kernel it is then; XLA would make one maximum of both.
    columns = jax.lax.reduce_max(jnp.abs(value), tuple(range(value.ndim - 1)))
    return jax.lax.reduce_max(jax.lax.optimization_barrier(columns), tuple(range(columns.ndim))).astype(jnp.float32)


@largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: Any, value: Any) -> Any:
    return largest(value), False  # a scale for each member would be a vector, of which XLA makes a bfloat16 product


def _wide(value: Any) -> Any:
    # Else XLA takes the float32 numbers that were rounded to `value`, and writes them.
    info = jnp.finfo(value.dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant).astype(jnp.float32)


def _summed(value: Any, first: int = 0) -> Any:
    return jnp.sum(_wide(value), tuple(range(first, value.ndim - 1)))


def _in_two(value: Any) -> list[Any]:
    return [_summed(value), largest(jax.lax.stop_gradient(value))]


def _in_one(value: Any) -> list[Any]:
    def joined(one: Any, other: Any) -> Any:
        total = jax.lax.real(one) + jax.lax.real(other)
        return jax.lax.complex(total, jax.lax.max(jax.lax.imag(one), jax.lax.imag(other)))

    wide = _wide(value)
    parts = jax.lax.complex(wide, jnp.abs(wide))
    found = jax.lax.reduce(parts, np.complex64(0), joined, tuple(range(value.ndim - 1)))
    return [jax.lax.real(found), jax.lax.reduce_max(jax.lax.imag(found), (0,))]


def _lowered(context: Any, value: Any) -> Any:
    module = context.module_context
    around = module.axis_context
    manual = getattr(around, "manual_axes", None)  # inside of a shard_map
    is_whole = around.num_devices == 1 if manual is None else {*manual} == {*around.mesh.axis_names}
    is_fixed = not module.lowering_parameters.for_export  # else it may be called on any number of devices
    # One rule for all: JAX takes no rules of several platforms for what is lowered anew each time, as this is.
    is_joint = is_whole and is_fixed and {*module.platforms} <= {"cpu", "cuda", "rocm"}
    return mlir.lower_fun(_in_one if is_joint else _in_two, multiple_results=True)(context, value)


def _derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
    results = _both.bind(*primals)
    zeros = [ad.Zero(jax.typeof(each).to_tangent_aval()) for each in results]
    return results, zeros if type(tangents[0]) is ad.Zero else [_summed(tangents[0]), zeros[1]]


def _batch(operands: Any, batched: Any) -> tuple[list[Any], list[Any]]:
    value = jnp.moveaxis(operands[0], batched[0], 0)
    return [_summed(value, 1), _both.bind(value)[1]], [0, None]


def _types(value: Any) -> list[Any]:
    summed = value.update(shape=value.shape[-1:], dtype=np.dtype(np.float32), weak_type=False)
    return [summed, summed.update(shape=())]


_both.def_impl(lambda value: _in_two(value))
_both.def_abstract_eval(_types)
ad.primitive_jvps[_both] = _derivative
batching.primitive_batchers[_both] = _batch
# A program may have regions of a shard_map, for which a lowering outside would be kept, and the reverse.
mlir.register_lowering(_both, _lowered, cacheable=False)
