"""Read bodies, constants and parameters of equations in every version of JAX.

The bodies of an equation are the jaxprs in it. An open jaxpr is a ``Jaxpr``, without its constants; a ``ClosedJaxpr``
includes the constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Literal

from jaxmp._internals.jax import hi_primitives
from jaxmp._internals.jax.core import Tracer, eval_jaxpr, evaluate_dimension
from jaxmp.program.primitives import BODIES, Trait, replaced_by, with_trait

if TYPE_CHECKING:
    from typing_extensions import TypeIs

T = TypeVar("T")
Array = Any
"""A value of a program: an array of JAX or NumPy, a tracer, or the Python number of a literal.

JAX has no class for all of them.
"""
Atom = Var | Literal
"""An operand or a result of an equation."""
Opened = tuple[Jaxpr, list[Array]]
"""An open jaxpr and its constants."""
Params = dict[str, Any]
"""The parameters of an equation."""
Precision = Any
"""The ``precision`` of a product: None, a precision for each operand, or an algorithm."""
Size = Any
"""A size of a shape: an integer, or a symbolic dimension of ``jax.export``."""


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
    jaxprs: tuple[Jaxpr | ClosedJaxpr, ...]
    consts: int = 0
    start: int = 0
    carry: int = 0
    length: Size = None  # the number of iterations of a scan; None for a while loop
    reverse: bool = False  # whether a scan runs from the last element to the first
    primitive: str = ""  # the name of the primitive

    @property
    def is_loop(self) -> bool:
        """Return whether the equation is a scan or a while loop."""
        return self.kind == "scan" or self.kind == "while"

    @property
    def is_call(self) -> bool:
        """Return whether the equation has one body, with its operands and results."""
        return self.kind == "call"

    @property
    def is_conditional(self) -> bool:
        """Return whether the first operand selects the body that runs."""
        return self.kind == "cond"

    @property
    def is_recomputed(self) -> bool:
        """Return whether the backward pass computes the body again (``jax.checkpoint``)."""
        return self.primitive == "remat2"

    @property
    def is_jitted(self) -> bool:
        """Return whether the equation is a call of a jitted function."""
        return self.primitive == "jit"

    @property
    def is_per_device(self) -> bool:
        """Return whether each device runs the body on its parts of the arrays (``jax.shard_map``)."""
        return self.primitive == "shard_map"

    @property
    def is_compiled(self) -> bool:
        """Return whether JAX compiles the equation as a whole if it is not traced."""
        return not self.is_call or self.is_per_device or self.is_jitted

    @property
    def has_rule(self) -> bool:
        """Return whether the equation has a custom derivative rule."""
        return self.primitive in _WITH_RULES

    @property
    def has_backward_rule(self) -> bool:
        """Return whether the equation has a rule for cotangents (``jax.custom_vjp``)."""
        return self.primitive == "custom_vjp_call"

    @property
    def has_gradient(self) -> bool:
        """Return whether the equation has cotangents. A while loop has none."""
        return self.kind != "while"

    @property
    def iterations(self) -> Size:
        """Return the number of iterations of a scan, else 1."""
        return 1 if self.length is None else self.length

    @property
    def carries(self) -> range:
        """Return the positions of the carries among the operands."""
        return range(self.start, self.start + self.carry)

    def is_condition(self, number: int) -> bool:
        """Return whether body ``number`` is the condition of a while loop."""
        return self.kind == "while" and number == 0

    def inputs(self, number: int, operands: Sequence[T]) -> list[T]:
        """Return the operands that body ``number`` takes.

        A carry is passed as its initial value, and a scanned array as a whole.
        """
        if self.is_condition(number):
            return [*operands[: self.consts], *operands[self.start :]]
        first = 1 if self.is_conditional else self.consts
        return list(operands[first:])

    def joined(self, number: int) -> range:
        """Return the positions of the results of body ``number`` that are joined.

        A join is a carry of a loop, or a result of a conditional. All values that are joined must have the same type.
        """
        if self.is_condition(number):
            return range(0)
        return range(len(opened(self.jaxprs[number])[0].outvars) if self.is_conditional else self.carry)


def primitive_of(eqn: JaxprEqn) -> str:
    """Return the name under which the table of primitives has the primitive of an equation.

    The name of a hi primitive is that of the primitive that it replaces. If it replaces none, its name is that of its
    class, which the table does not have.
    """
    primitive = hi_primitives.hi_primitive_of(eqn)
    if primitive is None:
        return str(eqn.primitive.name)
    name = replaced_by(primitive.params)
    is_other = name == "name" and not hi_primitives.is_identity(primitive)
    return type(primitive).__name__ if name is None or is_other else name


def params_of(eqn: JaxprEqn) -> Params:
    """Return the parameters of an equation.

    Those of a hi primitive have the names that they have in the primitive that it replaces.
    """
    primitive = hi_primitives.hi_primitive_of(eqn)
    if primitive is None:
        return eqn.params
    is_replaced = replaced_by(primitive.params) is not None
    return hi_primitives.older_params(primitive) if is_replaced else dict(primitive.params)


# A body that is inlined has no rule of its own.
_WITH_RULES = with_trait(Trait.CUSTOM_DERIVATIVE) - with_trait(Trait.INLINED)


def bodies_of(eqn: JaxprEqn) -> Bodies | None:
    """Return the bodies of an equation if they can be rebuilt in other dtypes.

    Return None for all other equations.
    """
    name, params = primitive_of(eqn), eqn.params
    if name in BODIES:
        return Bodies("call", (params_of(eqn)[BODIES[name]],), primitive=name)
    if name == "scan":
        if "ft_in" in params:  # from 0.11 on
            consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
        else:
            consts, carry = params["num_consts"], params["num_carry"]
        return Bodies("scan", (params["jaxpr"],), 0, consts, carry, params["length"], params["reverse"], name)
    if name == "while":
        start = params["cond_nconsts"] + params["body_nconsts"]
        jaxprs = (params["cond_jaxpr"], params["body_jaxpr"])
        return Bodies("while", jaxprs, params["cond_nconsts"], start, len(eqn.invars) - start, primitive=name)
    if name == "cond":
        return Bodies("cond", tuple(params["branches"]), primitive=name)
    return None


def aval_of(atom: Atom) -> jax.core.ShapedArray:
    """Return the type of an operand or a result that is an array."""
    return cast(jax.core.ShapedArray, atom.aval)


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Opened:
    """Return an open or closed jaxpr as the open jaxpr and its constants.

    From JAX 0.11 on, open and closed jaxprs have the same class.
    """
    open_jaxpr: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return open_jaxpr, list(getattr(jaxpr, "consts", ()))


def is_literal(atom: Atom) -> TypeIs[Literal]:
    """Return whether an operand is a literal."""
    return isinstance(atom, Literal)


_ELEMENTS = 2**16
"""Constants with more elements than this count as weights. They are not read: a read would wait for the device."""


_ELEMENTS_OF_MASK = 2**20
"""Constants with more elements than this do not count as masks."""


def elements_of(constant: Array, most: int = _ELEMENTS) -> np.ndarray | None:
    """Return the elements of a constant, or None.

    The result is None if the constant has more than ``most`` elements, or is traced, or on another host, or does not
    consist of numbers.
    """
    if isinstance(constant, jax.Array) and (isinstance(constant, Tracer) or not constant.is_fully_addressable):
        return None
    if np.size(constant) > most or jax.dtypes.issubdtype(getattr(constant, "dtype", float), jax.dtypes.extended):
        return None
    return np.asarray(constant)


def extremes_of(constant: Array) -> tuple[float, float] | None:
    """Return the smallest nonzero and the largest magnitude of a constant.

    Only finite magnitudes count. The result is None if :func:`elements_of` returns None.
    """
    elements = elements_of(constant)
    if elements is None:
        return None
    magnitudes = np.abs(elements.astype(np.float32))
    finite = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]  # 0, infinity and NaN fit in float16
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def is_mask(constant: Array) -> bool:
    """Return whether a constant consists of zeros and ones.

    Ones may be negative, and at least one element is not zero.
    """
    elements = None if constant is None else elements_of(constant, _ELEMENTS_OF_MASK)
    if elements is None or not elements.any():
        return False
    first = elements.flat[:100]  # a weight needs no further look
    return all(bool(((part == 0) | (abs(part) == 1)).all()) for part in (first, elements))


def is_one_hot(mask: Array) -> bool:
    """Return whether a mask has at most one nonzero element along one of its axes, as an identity matrix has."""
    elements = np.asarray(mask)
    return any(np.count_nonzero(elements, axis).max() <= 1 for axis, size in enumerate(elements.shape) if size > 1)


def evaluate(jaxpr: Jaxpr, consts: list[Array], args: Sequence[Array]) -> list[Array]:
    """Evaluate an open jaxpr unchanged, and return its results."""
    return list(eval_jaxpr(jaxpr, consts, *args))


HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
"""The ``precision`` of a product in true float32."""


def precision_named(name: str) -> Precision:
    """Return the ``precision`` of a product for a name that ``jax.default_matmul_precision`` takes."""
    if name in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[name]
    precision = jax.lax.Precision(name)
    return precision, precision


def asks_for_highest(precision: Precision) -> bool:
    """Return whether the ``precision`` of a product requests full float32.

    ``precision`` may be a pair, with an entry for each operand. A request in one entry is enough.
    """
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(
        part is jax.lax.Precision.HIGHEST or str(part).endswith(("F32_F32_F32", "F64_F64_F64")) for part in parts
    )


def asks_for_what_is_missing(params: Params) -> bool:
    """Return whether a product requests an algorithm that the backend lacks.

    JAX's attention tries the algorithm and catches the backend's error. While the attention is traced, the backend
    raises no error, so the traced program contains an algorithm that fails when it is compiled.
    """
    return params.get("precision") is jax.lax.DotAlgorithmPreset.F16_F16_F32 and jax.default_backend() == "cpu"


def names_a_dtype(eqn: JaxprEqn) -> bool:
    """Return whether a parameter fixes the dtype of a result.

    Such parameters are, for example:

    - ``out_dtype`` of ``mul``
    - the update function of a scatter, if it has several operations
    - the jaxprs of a half-precision solver
    """
    update = eqn.params.get("update_jaxpr")
    if eqn.primitive.name == "custom_linear_solve" and any(aval_of(var).dtype.itemsize < 4 for var in eqn.outvars):
        return True
    return eqn.params.get("out_dtype") is not None or (update is not None and len(update.eqns) > 1)


def in_dtype_of_scatter(jaxpr: Jaxpr, dtype: np.dtype) -> Jaxpr | None:
    """Return the update function of a scatter in another dtype, or None.

    The result is None if the function has several operations.
    """
    if len(jaxpr.eqns) > 1:
        return None
    scalars = [jax.ShapeDtypeStruct((), dtype) for _ in jaxpr.invars]
    return opened(jax.make_jaxpr(lambda *args: evaluate(jaxpr, [], args))(*scalars))[0]


def has_explicit_axes(value: Array) -> bool:
    """Return whether a value is on a mesh with Explicit axes."""
    return bool(jax.typeof(value).sharding.mesh.explicit_axes)


def size_of(shape: Sequence[Size]) -> int:
    """Return the number of elements of a shape.

    A symbolic dimension of ``jax.export`` counts as 1024.
    """
    size: Size = math.prod(shape)
    return size if type(size) is int else evaluate_dimension(size, 1024)


def shape_of(aval: jax.core.ShapedArray) -> jax.ShapeDtypeStruct:
    """Return a ``ShapeDtypeStruct`` of an abstract value, for tracing.

    The struct has the sharding of the value if the mesh has Explicit axes.
    """
    sharding = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
