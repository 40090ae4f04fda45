"""A linear function of arrays whose transpose the caller defines.

JAX's custom derivative rules cannot define such a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._internals.jax.traces import shows_what_varies

_linear = Primitive("linear_with_transpose")


class Rule(Protocol):
    """A linear function of some arrays, the tangents. The other arguments are residuals. A rule is hashable."""

    def forward(self, tangents: Sequence[Any], residuals: Sequence[Any]) -> Any:
        """Return the result of the function, which is linear in ``tangents``."""

    def transpose(self, cotangent: Any, tangents: Sequence[Any], residuals: Sequence[Any]) -> Sequence[Any]:
        """Return the cotangents of the tangents, whose shapes and dtypes are those of ``tangents``."""

    def batched(self, is_batched: Sequence[bool]) -> tuple[Rule, Sequence[bool], int]:
        """Return the rule for arguments of which some have a batch axis, which is their first axis.

        The second result says which arguments must have this axis. The third result is the batch axis of the result.
        """


def linear_with_transpose(tangents: Sequence[Any], residuals: Sequence[Any], rule: Rule) -> Any:
    """Return ``rule.forward(tangents, residuals)``, and use ``rule.transpose`` in the backward pass."""
    return _linear.bind(*_varying_alike([*tangents, *residuals]), rule=rule, count=len(tangents))


def _varying_alike(arrays: Sequence[Any]) -> Sequence[Any]:
    """Return arrays that vary over the same axes of a mesh.

    Thus the cotangent of an array that does not vary is summed over the shards.
    """
    if not shows_what_varies():
        return arrays
    varying = [jax.typeof(array).mat.varying for array in arrays]
    everywhere = frozenset[str]().union(*varying)
    return [
        jax.lax.pcast(array, tuple(everywhere - axes), to="varying") if everywhere - axes else array
        for array, axes in zip(arrays, varying, strict=True)
    ]


def _forward(*args: Any, rule: Rule, count: int) -> Any:
    return rule.forward(args[:count], args[count:])


def _result_type(*args: Any, rule: Rule, count: int) -> Any:
    return jax.make_jaxpr(lambda *args: _forward(*args, rule=rule, count=count))(*args).out_avals[0]


def _jvp(primals: Sequence[Any], dots: Sequence[Any], *, rule: Rule, count: int) -> tuple[Any, Any]:
    """Differentiate the function, which is linear in its tangents alone."""
    result = _linear.bind(*primals, rule=rule, count=count)
    terms = []
    if any(type(dot) is not ad.Zero for dot in dots[:count]):
        terms.append(_linear.bind(*map(ad.instantiate_zeros, dots[:count]), *primals[count:], rule=rule, count=count))
    moving = [n for n in range(count, len(primals)) if type(dots[n]) is not ad.Zero]
    if moving:

        def of_moving(*values: Any) -> Any:
            args = list(primals)
            for n, value in zip(moving, values, strict=True):
                args[n] = value
            return _forward(*args, rule=rule, count=count)

        terms.append(jax.jvp(of_moving, [primals[n] for n in moving], [dots[n] for n in moving])[1])
    return result, sum(terms[1:], start=terms[0])


def _transpose(cotangent: Any, *args: Any, rule: Rule, count: int) -> list[Any]:
    is_linear = [ad.is_undefined_primal(arg) for arg in args]
    if type(cotangent) is ad.Zero:
        return [ad.Zero(arg.aval) if linear else None for arg, linear in zip(args, is_linear, strict=True)]
    types = [arg.aval if linear else jax.typeof(arg) for arg, linear in zip(args[:count], is_linear, strict=False)]
    cotangents = rule.transpose(cotangent, types, args[count:])
    of_tangents = [value if linear else None for value, linear in zip(cotangents, is_linear, strict=False)]
    return [*of_tangents, *[None] * (len(args) - count)]


def _batch(args: Sequence[Any], axes: Sequence[Any], *, rule: Rule, count: int) -> tuple[Any, int]:
    size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
    is_batched = [axis is not None for axis in axes]
    new_rule, must_be_batched, axis_of_result = rule.batched(is_batched)
    moved = [
        batching.bdim_at_front(arg, axis, size) if batched else arg
        for arg, axis, batched in zip(args, axes, must_be_batched, strict=True)
    ]
    return _linear.bind(*moved, rule=new_rule, count=count), axis_of_result


_linear.def_impl(_forward)
_linear.def_abstract_eval(_result_type)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_forward, multiple_results=False))
