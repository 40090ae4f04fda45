"""Evaluate a program with half-precision values in float32.

Each value that the program rounds is passed to a function, such as a tap (see ``rounding.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxmp.base.dtypes import is_narrow
from jaxmp.base.trees import widen
from jaxmp.inspect._budget.sites import CASTS, Place
from jaxmp.program.binding import bind_equation, params_in_dtype
from jaxmp.program.bodies import rebuild
from jaxmp.program.equations import HIGHEST, Bodies, names_a_dtype, opened, primitive_of
from jaxmp.program.primitives import PRODUCTS, Class, Trait, classify, has_trait
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.values import Key

_FLOAT32 = np.dtype(np.float32)


class Changes(NamedTuple):
    """The changes of a program's values during its evaluation.

    Attributes:
      sites: the numbers of the sites by place.
      at_site: a function that takes the number of a site and its value, and returns the value to use in its place.
      at_site_without_gradient: the same where JAX cannot differentiate, in while loops.
      at_operand: the same for the operands of half-precision operations. It takes the key of the equation, the
        equation, the number of the site of its result (None without one), the dtype of the operand and its value.
    """

    sites: Mapping[Place, int]
    at_site: Callable[[int, Any], Any]
    at_site_without_gradient: Callable[[int, Any], Any]
    at_operand: Callable[[Key, Any, int | None, np.dtype, Any], Any]


class WideEvaluation(Rewriter):
    """An evaluation of a program in which values narrower than float32 are float32.

    Custom derivative rules are left out, because errors pass through the function itself. For the same reason,
    ``stop_gradient`` does not stop them.

    Attributes:
      changes: the functions that each site and each operand of a product calls.
      gaps: the reasons why errors do not pass through an equation, by the equation's key.
    """

    def __init__(self, changes: Changes, gaps: dict[Key, str], around: Key = ()) -> None:
        """Evaluate a body. ``around`` is the key of the body."""
        self.changes, self.gaps, self.around = changes, gaps, around
        self._numbers = itertools.count()
        self._key: Key = ()

    def evaluate_literal(self, atom: Any) -> Any:
        return _in_float32(atom.val) if is_narrow_aval(atom.aval) else atom.val

    def evaluate_equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        self._key = (*self.around, next(self._numbers))
        return super().evaluate_equation(eqn, operands)

    def evaluate_operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if reason := reason_against(eqn) or _error_of_derivative(eqn, operands):
            self.gaps[self._key] = reason
            operands = list(map(_without_gradient, operands))
        results = self._results(eqn, operands)
        for position, result in enumerate(results):
            number = self.changes.sites.get((self._key, position))
            if number is not None:
                results[position] = self.changes.at_site(number, result)
        return results

    def _results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = primitive_of(eqn)
        if name == "stop_gradient":
            return operands
        is_changed = any(is_narrow_aval(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
        if not is_changed:
            return bind_equation(eqn, operands, eqn.params)
        if name in CASTS:
            return [_cast(eqn, operands)]
        if name == "reduce_precision":  # it rounds half values to their own dtype
            return operands
        if has_fixed_dtypes(eqn):
            self.gaps.setdefault(self._key, "computes in its own dtypes")
            return _in_own_dtypes(eqn, operands)
        params = params_in_dtype(eqn, _FLOAT32, HIGHEST)
        if "dtype" in params:
            params["dtype"] = _FLOAT32
        key, number = self._key, self.changes.sites.get((self._key, 0))

        def operation(*operands: Any) -> list[Any]:
            read = []
            for atom, operand in zip(eqn.invars, operands, strict=True):
                if is_narrow_aval(atom.aval):
                    operand = self.changes.at_operand(key, eqn, number, atom.aval.dtype, operand)
                read.append(operand)
            return bind_equation(eqn, read, params)

        if name not in PRODUCTS:
            return operation(*operands)
        # The backward pass rounds the operands again. Otherwise each product would keep rounded copies of them.
        return list(jax.checkpoint(operation, prevent_cse=False)(*operands))

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        key, changes = self._key, self.changes
        if bodies.is_jitted or bodies.has_rule:
            return self._evaluate_inside(key, changes, bodies, 0, *operands)
        if not bodies.has_gradient:
            self.gaps[key] = "a while loop, through which JAX does not differentiate backwards"
            changes = changes._replace(at_site=changes.at_site_without_gradient)
            operands = list(map(_without_gradient, operands))
        functions = []
        for number in range(len(bodies.jaxprs)):
            functions.append(functools.partial(self._evaluate_inside, key, changes, bodies, number))
        return list(rebuild(eqn, bodies, functions)(*operands))

    def _evaluate_inside(self, key: Key, changes: Changes, bodies: Bodies, number: int, *args: Any) -> list[Any]:
        """Return the results of a body of the equation ``key``."""
        inside = WideEvaluation(changes, self.gaps, (*key, number))
        jaxpr, consts = opened(bodies.jaxprs[number])
        return inside.evaluate(jaxpr, [_in_float32(const) for const in consts], args)


def evaluate_wide(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], changes: Changes, gaps: dict[Key, str]
) -> list[Any]:
    """Return the results of an open jaxpr, with float32 in place of narrower values."""
    evaluation = WideEvaluation(changes, gaps)
    results = evaluation.evaluate(jaxpr, [_in_float32(const) for const in consts], [_in_float32(arg) for arg in args])
    return [jnp.asarray(result) for result in results]


def is_narrow_aval(aval: Any) -> bool:
    """Return whether an abstract value has a floating dtype that is narrower than float32."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and is_narrow(np.dtype(dtype))


def has_fixed_dtypes(eqn: Any) -> bool:
    """Return whether an equation without bodies cannot be computed in another dtype."""
    name = primitive_of(eqn)
    if name in CASTS or name == "iota":
        return False
    cls = classify(name)
    return cls in (Class.OPAQUE, Class.RECURSE, None) or names_a_dtype(eqn)


def reason_against(eqn: Any) -> str:
    """Return why errors cannot pass through an equation without bodies; empty if they can."""
    name = primitive_of(eqn)
    if not any(_is_float(var.aval) for var in eqn.outvars) or not any(_is_float(atom.aval) for atom in eqn.invars):
        return ""
    if has_trait(name, Trait.ONLY_FORWARD):
        return "JAX does not differentiate it backwards"
    if classify(name) is Class.OPAQUE and has_trait(name, Trait.UNCOUNTED):
        return "a kernel, or code outside of JAX"
    return "" if eqn.primitive in ad.primitive_jvps else "JAX has no derivative of it"


def _error_of_derivative(eqn: Any, operands: Sequence[Any]) -> str:
    """Return the error that the derivative of another package's operation raises; empty if it raises none.

    For example, lineax's solve has no derivative with respect to the factors of its matrix.
    """
    if classify(primitive_of(eqn)) is not None:
        return ""
    is_float = [_is_float(jax.typeof(operand)) for operand in operands]

    def pull_back_ones(*floats: Any) -> Any:
        def results_of(*floats: Any) -> list[Any]:
            remaining = iter(floats)
            mixed = [next(remaining) if is_one else x for x, is_one in zip(operands, is_float, strict=True)]
            return [result for result in _in_own_dtypes(eqn, mixed) if _is_float(jax.typeof(result))]

        results, pull_back = jax.vjp(results_of, *floats)
        return pull_back(list(map(jnp.ones_like, results)))

    try:
        jax.eval_shape(pull_back_ones, *itertools.compress(operands, is_float))
    except Exception as error:
        return f"its derivative raises {type(error).__name__}"
    return ""


def _is_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", np.int32)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _cast(eqn: Any, operands: Sequence[Any]) -> Any:
    """Return the result of a cast or a broadcasting cast from or to a narrow dtype, in float32 or the wider dtype."""
    result = eqn.outvars[0].aval
    dtype = _FLOAT32 if is_narrow_aval(result) else result.dtype
    if eqn.primitive.name != "convert_element_type":
        return bind_equation(eqn, operands, {**eqn.params, "dtype": dtype})[0]
    return jax.lax.convert_element_type(operands[0], dtype)


def _in_own_dtypes(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation that is bound in its own dtypes, in float32 where they are narrower."""
    narrowed = []
    for operand, atom in zip(operands, eqn.invars, strict=True):
        is_cast = is_narrow_aval(atom.aval)
        narrowed.append(jnp.asarray(operand).astype(atom.aval.dtype) if is_cast else operand)
    return [_in_float32(result) for result in bind_equation(eqn, narrowed, eqn.params)]


def _without_gradient(value: Any) -> Any:
    return jax.lax.stop_gradient(value) if _is_float(jax.typeof(value)) else value


def _in_float32(value: Any) -> Any:
    """Return an array in float32 if it is narrower."""
    if not is_narrow_aval(jax.typeof(value)):
        return value
    return np.asarray(value).astype(_FLOAT32) if isinstance(value, (np.ndarray, np.generic)) else widen(value)
