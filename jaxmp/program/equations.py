"""Read bodies, constants and parameters of equations in every version of JAX.

The bodies of an equation are the jaxprs in it. An open jaxpr is a ``Jaxpr``, without its constants; a ``ClosedJaxpr``
includes the constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal as Literal

from jaxmp._internals.jax.core import Tracer, eval_jaxpr, evaluate_dimension
from jaxmp.program.primitives import BODIES

Opened = tuple[Any, list[Any]]
"""An open jaxpr and its constants."""


class Bodies(NamedTuple):
    """The jaxprs in an equation, and the roles of its operands.

    ``kind`` is one of these:

    - ``"call"``: the operands and results of the equation are those of the body
    - ``"scan"``
    - ``"while"``, with two jaxprs: the condition and the body
    - ``"cond"``, with a jaxpr for each branch

    A loop has these operands, in this order:

    - the constants of its condition; ``consts`` is their number
    - the constants of its body, which end at the index ``start``
    - the carries; ``carry`` is their number
    - the scanned arrays
    """

    kind: str
    jaxprs: tuple[Any, ...]
    consts: int = 0
    start: int = 0
    carry: int = 0

    @property
    def is_loop(self) -> bool:
        """Return whether the equation is a scan or a while loop."""
        return self.kind == "scan" or self.kind == "while"


def bodies_of(eqn: Any) -> Bodies | None:
    """Return the bodies of an equation if they can be rebuilt in other dtypes.

    Return None for all other equations.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in BODIES:
        return Bodies("call", (params[BODIES[name]],))
    if name == "scan":
        if "ft_in" in params:  # from 0.11 on
            consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
        else:
            consts, carry = params["num_consts"], params["num_carry"]
        return Bodies("scan", (params["jaxpr"],), 0, consts, carry)
    if name == "while":
        start = params["cond_nconsts"] + params["body_nconsts"]
        jaxprs = (params["cond_jaxpr"], params["body_jaxpr"])
        return Bodies("while", jaxprs, params["cond_nconsts"], start, len(eqn.invars) - start)
    if name == "cond":
        return Bodies("cond", tuple(params["branches"]))
    return None


def opened(jaxpr: Any) -> Opened:
    """Return an open or closed jaxpr as the open jaxpr and its constants.

    From JAX 0.11 on, open and closed jaxprs have the same class.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def is_literal(atom: Any) -> bool:
    """Return whether an operand is a literal."""
    return isinstance(atom, Literal)


_ELEMENTS = 2**16
"""Constants with more elements than this count as weights. They are not read: a read would wait for the device."""


def elements_of(constant: Any) -> np.ndarray | None:
    """Return the elements of a constant, or None.

    The result is None if the constant is large, traced, on another host, or does not consist of numbers.
    """
    if isinstance(constant, jax.Array) and (isinstance(constant, Tracer) or not constant.is_fully_addressable):
        return None
    if np.size(constant) > _ELEMENTS or jax.dtypes.issubdtype(getattr(constant, "dtype", float), jax.dtypes.extended):
        return None
    return np.asarray(constant)


def extremes_of(constant: Any) -> tuple[float, float] | None:
    """Return the smallest nonzero and the largest magnitude of a constant.

    Only finite magnitudes count. The result is None if :func:`elements_of` returns None.
    """
    elements = elements_of(constant)
    if elements is None:
        return None
    magnitudes = np.abs(elements.astype(np.float32))
    finite = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]  # 0, infinity and NaN fit in float16
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def evaluate(jaxpr: Any, consts: list[Any], args: Any) -> list[Any]:
    """Evaluate an open jaxpr unchanged, and return its results."""
    return list(eval_jaxpr(jaxpr, consts, *args))


HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
"""The ``precision`` of a product in true float32."""


def precision_named(name: str) -> Any:
    """Return the ``precision`` of a product for a name that ``jax.default_matmul_precision`` takes."""
    if name in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[name]
    precision = jax.lax.Precision(name)
    return precision, precision


def asks_for_highest(precision: Any) -> bool:
    """Return whether the ``precision`` of a product requests full float32.

    ``precision`` may be a pair, with an entry for each operand. A request in one entry is enough.
    """
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(
        part is jax.lax.Precision.HIGHEST or str(part).endswith(("F32_F32_F32", "F64_F64_F64")) for part in parts
    )


def asks_for_what_is_missing(params: dict[str, Any]) -> bool:
    """Return whether a product requests an algorithm that the backend lacks.

    JAX's attention tries the algorithm and catches the backend's error. While the attention is traced, the backend
    raises no error, so the traced program contains an algorithm that fails when it is compiled.
    """
    return params.get("precision") is jax.lax.DotAlgorithmPreset.F16_F16_F32 and jax.default_backend() == "cpu"


def names_a_dtype(eqn: Any) -> bool:
    """Return whether a parameter fixes the dtype of a result.

    Such parameters are, for example:

    - ``out_dtype`` of ``mul``
    - the update function of a scatter, if it has several operations
    - the jaxprs of a half-precision solver
    """
    update = eqn.params.get("update_jaxpr")
    if eqn.primitive.name == "custom_linear_solve" and any(var.aval.dtype.itemsize < 4 for var in eqn.outvars):
        return True
    return eqn.params.get("out_dtype") is not None or (update is not None and len(update.eqns) > 1)


def in_dtype_of_scatter(jaxpr: Any, dtype: Any) -> Any | None:
    """Return the update function of a scatter in another dtype, or None.

    The result is None if the function has several operations.
    """
    if len(jaxpr.eqns) > 1:
        return None
    scalars = [jax.ShapeDtypeStruct((), dtype) for _ in jaxpr.invars]
    return opened(jax.make_jaxpr(lambda *args: evaluate(jaxpr, [], args))(*scalars))[0]


def has_explicit_axes(value: Any) -> bool:
    """Return whether a value is on a mesh with Explicit axes."""
    return bool(jax.typeof(value).sharding.mesh.explicit_axes)


def size_of(shape: Sequence[Any]) -> int:
    """Return the number of elements of a shape.

    A symbolic dimension of ``jax.export`` counts as 1024.
    """
    size: Any = math.prod(shape)
    return size if type(size) is int else evaluate_dimension(size, 1024)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return a ``ShapeDtypeStruct`` of an abstract value, for tracing.

    The struct has the sharding of the value if the mesh has Explicit axes.
    """
    sharding = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
