"""A cast whose transpose the caller defines.

JAX's custom derivative rules cannot define such a cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_cast = Primitive("cast_with_transpose")


def cast_with_transpose(tangent: Any, dtype: Any, transpose: Callable[[Any], Any]) -> Any:
    """Cast ``tangent`` to ``dtype``, and use ``transpose`` in the backward pass.

    ``transpose`` takes the cotangent of the result, and returns it in the dtype of ``tangent``.
    """
    return _cast.bind(tangent, dtype=dtype, transpose=transpose)


def _of(tangent: Any, *, dtype: Any, transpose: Callable[[Any], Any]) -> Any:
    return jax.lax.convert_element_type(tangent, dtype)


_cast.def_impl(_of)
_cast.def_abstract_eval(lambda tangent, dtype, transpose: tangent.update(dtype=dtype, weak_type=False))
ad.deflinear2(_cast, lambda cotangent, tangent, dtype, transpose: [transpose(cotangent)])
batching.defvectorized(_cast)
mlir.register_lowering(_cast, mlir.lower_fun(_of, multiple_results=False))
jet.deflinear(_cast)
