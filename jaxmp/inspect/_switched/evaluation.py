"""Evaluate a program in a wide dtype, with a switch at each rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.dtypes import is_narrow
from jaxmp.base.trees import widen
from jaxmp.inspect._switched.operations import CASTS
from jaxmp.inspect._switched.rounding import count_underflows_and_overflows, round_if
from jaxmp.inspect._switched.sites import OPERANDS
from jaxmp.inspect.program.recorded_evaluation import RecordingRewriter, Records
from jaxmp.program.binding import bind_equation, params_in_dtype
from jaxmp.program.bodies import rebuild
from jaxmp.program.equations import HIGHEST, Bodies, names_a_dtype, opened, primitive_of
from jaxmp.program.primitives import Class, classify
from jaxmp.program.values import Key

_FLOAT32 = np.dtype(np.float32)
Place = tuple[Key, int]
"""The key and the position of a site."""


class Switches:
    """The switches of a program or an equation.

    Args:
      dtypes: the dtype to which each site rounds, by the site's place.
      are_on: a boolean scalar for each site.
      are_counted: whether to count underflows and overflows. Those in while loops are not counted.
    """

    def __init__(self, dtypes: Mapping[Place, np.dtype], are_on: Mapping[Place, Any], *, are_counted: bool) -> None:
        self._dtypes, self._are_on, self._are_counted = dtypes, are_on, are_counted

    def rounded(self, key: Key, position: int, value: Any) -> Any:
        """Return a value, rounded if there is a site whose switch is on."""
        place = key, position
        return round_if(self._are_on[place], self._dtypes[place], value) if place in self._dtypes else value

    def counts(self, key: Key, position: int, values: Sequence[Any]) -> Any:
        """Return the underflows and overflows of the values at a site; 0 without a site."""
        dtype = self._dtypes.get((key, position)) if self._are_counted else None
        return 0 if dtype is None else sum(count_underflows_and_overflows(value, dtype) for value in values)


class SwitchedEvaluation(RecordingRewriter):
    """An evaluation of a program in which values narrower than float32 are float32, and roundings have switches.

    The program contains its derivatives, so custom derivative rules are left out.
    """

    def __init__(self, switches: Switches, around: Key = ()) -> None:
        """Evaluate a body. ``around`` is the key of the body."""
        super().__init__(None, around, {})
        self.switches = switches

    def inside(self, around: Key, sinks: Records) -> SwitchedEvaluation:
        return SwitchedEvaluation(self.switches, around)

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return super().evaluate(jaxpr, list(map(in_float32, consts)), args)

    def evaluate_literal(self, atom: Any) -> Any:
        return in_float32(atom.val) if is_narrow_aval(atom.aval) else atom.val

    def is_whole(self, eqn: Any) -> bool:
        return False

    def evaluate_operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        key, switches = self.key, self.switches
        read, narrow = [], []
        for atom, operand in zip(eqn.invars, operands, strict=True):
            is_rounded = _is_float(atom.aval) and (is_narrow_aval(atom.aval) or atom.aval.dtype == np.float64)
            narrow += [operand] if is_rounded else []
            read.append(switches.rounded(key, OPERANDS, operand) if is_rounded else operand)
        results = self._results(eqn, read)
        counts = {OPERANDS: switches.counts(key, OPERANDS, narrow)}
        counts |= {position: switches.counts(key, position, [result]) for position, result in enumerate(results)}
        if counts := {position: count for position, count in counts.items() if not isinstance(count, int)}:
            self.records[key] = counts
        return [switches.rounded(key, position, result) for position, result in enumerate(results)]

    def _results(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if not any(is_narrow_aval(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            return bind_equation(eqn, operands, eqn.params)
        name = primitive_of(eqn)
        if name in CASTS:
            return [_cast(eqn, operands)]
        if name == "reduce_precision":  # it rounds half values to their own dtype
            return operands
        if has_fixed_dtypes(eqn):
            return _in_own_dtypes(eqn, operands)
        params = params_in_dtype(eqn, _FLOAT32, HIGHEST)
        if "dtype" in params:
            params["dtype"] = _FLOAT32
        return bind_equation(eqn, operands, params)

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        if bodies.is_jitted or bodies.has_rule:
            return self.evaluate_call(eqn, bodies, operands)
        if bodies.has_gradient and not bodies.is_per_device:
            results, records = self.with_records(eqn, bodies, operands)
            self.records |= records
            return results
        functions = []
        for number in range(len(bodies.jaxprs)):
            functions.append(self._function_of_body(bodies, number))
        return list(rebuild(eqn, bodies, functions)(*operands))

    def _function_of_body(self, bodies: Bodies, number: int) -> Any:
        key = self.key

        def function(*args: Any) -> list[Any]:
            return self.inside((*key, number), {}).evaluate(*opened(bodies.jaxprs[number]), args)

        return function


def is_narrow_aval(aval: Any) -> bool:
    """Return whether an abstract value has a floating dtype that is narrower than float32."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and is_narrow(np.dtype(dtype))


def has_fixed_dtypes(eqn: Any) -> bool:
    """Return whether an equation without bodies cannot be computed in another dtype."""
    name = primitive_of(eqn)
    if name in CASTS or name == "reduce_precision" or name == "iota":
        return False
    cls = classify(name)
    return cls in (Class.OPAQUE, Class.RECURSE, None) or names_a_dtype(eqn)


def _is_float(aval: Any) -> bool:
    return bool(jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact))


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
    return [in_float32(result) for result in bind_equation(eqn, narrowed, eqn.params)]


def in_float32(value: Any) -> Any:
    """Return an array in float32 if it is narrower."""
    if not is_narrow_aval(jax.typeof(value)):
        return value
    return np.asarray(value).astype(_FLOAT32) if isinstance(value, (np.ndarray, np.generic)) else widen(value)
