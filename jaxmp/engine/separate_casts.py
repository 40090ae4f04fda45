"""Keep the half-precision copies of large weights on a TPU.

*Half* is half precision: float16 or bfloat16. The compiler for TPUs casts a float32 weight inside of each product that
reads the weight, tile by tile. If the weight is small, it stays in the core's memory, and the casts cost nothing. A
large weight fills this memory, or does not fit, and each of its products takes longer than with a half copy. So a large
weight is cast once, in a kernel of its own.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp.base import hardware

_SHARE = 1 / 2
"""The share of the core's memory above which a weight is large."""


def with_separate_cast(weight: Any, operand: Any) -> Any:
    """Return the half copy of a large weight behind a barrier if the device is a TPU.

    Return any other operand as it is. The device is the one that :func:`jaxmp.hardware.detect` returns.

    Args:
      weight: the operand before it was cast.
      operand: the operand in the dtype that an equation reads.
    """
    if operand is weight or operand.dtype.itemsize >= weight.dtype.itemsize:
        return operand
    core_memory = hardware.detect().core_memory_bytes
    is_known = isinstance(weight.size, int)  # a size that jax.export leaves open is not
    if core_memory is None or not is_known or weight.size * weight.dtype.itemsize <= core_memory * _SHARE:
        return operand
    return _separate.bind(operand)


# The barrier of JAX also stops the cotangent. The compiler would then write the weight's gradient in half, and cast it
# to float32 in another kernel.
_separate = Primitive("separate_cast")
_separate.def_impl(jax.lax.optimization_barrier)
_separate.def_abstract_eval(lambda operand: operand)
ad.primitive_jvps[_separate] = lambda primals, tangents: (_separate.bind(*primals), *tangents)
ad.primitive_transposes[_separate] = lambda cotangent, _: [cotangent]
batching.primitive_batchers[_separate] = lambda operands, axes: (_separate.bind(*operands), *axes)
mlir.register_lowering(_separate, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False))
