"""The transform: a function in, the same function with each operation in its precision out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.autocast import emit
from jaxmp.autocast.kinds import REAL, is_real
from jaxmp.autocast.regions import DECIDED, precision
from jaxmp.autocast.rules import Rules
from jaxmp.autocast.scope import is_inside, tracing
from jaxmp.policy import Policy, PolicyMap, get_policy

F = TypeVar("F", bound=Callable[..., Any])


def transformed(fun: F, policy: Any, overrides: Mapping[str, str] | None) -> F:
    """See :func:`jaxmp.autocast`."""
    one_policy = checked_policy(policy)
    overrides = dict(overrides or {})
    Rules(one_policy.compute_dtype, overrides)  # what is wrong with them is said here, not in the call
    programs: dict[Any, Any] = {}

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if one_policy.compute_dtype == np.float32:
            if policy == "auto":  # this device has no fast half precision
                return fun(*args, **kwargs)
            return _in_float32(fun, one_policy, args, kwargs)
        check_backend(one_policy)
        refuse_shapes(args, kwargs)
        rules = Rules(one_policy.compute_dtype, overrides, {} if reading.is_tracing() else programs)
        traced = Traced(fun, args, kwargs, rules)
        dtypes = traced.result_dtypes(one_policy)
        with jax.named_scope(DECIDED):
            results = emit.coloured(traced.jaxpr, rules, (), traced.operands, dtypes)
        rules.check()
        return traced.unflatten(results)

    return cast(F, wrapped)


def checked_policy(policy: Any) -> Policy:
    """The one policy of an autocast."""
    result = get_policy("mixed_float16" if isinstance(policy, str) and policy.strip().upper() == "O1" else policy)
    if isinstance(result, PolicyMap):
        raise TypeError(
            f"autocast takes one policy for a function, got the PolicyMap {result}; pass its default and name the "
            "exceptions by overrides={'**/head': 'float32'}"
        )
    if result.compute_dtype not in REAL:
        raise ValueError(
            f"autocast computes in float16 or bfloat16, got the compute dtype {result.compute_dtype.name}; use "
            "'mixed_bfloat16' or 'mixed_float16'"
        )
    return result


def check_backend(policy: Policy) -> None:
    """Raises where the default backend has no products in the policy's compute dtype."""
    if policy.compute_dtype == np.float16 and jax.default_backend() == "tpu":
        raise ValueError(
            "autocast needs a backend that multiplies in the policy's compute dtype, got float16 on a TPU, whose "
            "matrix unit has bfloat16 only; use 'mixed_bfloat16'"
        )


def refuse_shapes(args: Any, kwargs: Any) -> None:
    """Raises a TypeError if an argument has a shape and no value."""
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"a function under autocast takes arrays, got {leaf}; use jaxmp.cast_plan(fun, policy) to see the "
                "decisions for shapes, or jax.eval_shape, jax.make_jaxpr or jit(...).lower around it"
            )


def _in_float32(fun: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Any:
    if not is_inside():
        raise ValueError(
            "autocast needs a policy with a half compute dtype, got float32 outside of any other autocast, where it "
            "has nothing to change; use 'mixed_bfloat16' or 'mixed_float16', or call the function itself"
        )
    with precision("float32"), policy.precision():
        return fun(*args, **kwargs)


class Traced:
    """The program of one call, on the dtypes that the author wrote.

    Attributes:
      jaxpr: an open jaxpr and its constants.
      operands: the arrays of the call, in the order of the jaxpr's arguments.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs))
        self.operands = [leaf for leaf in leaves if is_array(leaf)]

        def flat(*operands: Any) -> list[Any]:
            rest = iter(operands)
            filled = [next(rest) if is_array(leaf) else leaf for leaf in leaves]
            args, kwargs = jax.tree.unflatten(tree, filled)
            results = fun(*args, **kwargs)
            leaves_out, self._tree = jax.tree.flatten(results)
            self._results = [_ARRAY if is_array(leaf) else leaf for leaf in leaves_out]  # tracers die with the trace
            return [leaf for leaf in leaves_out if is_array(leaf)]

        with tracing(rules.key):
            closed = jax.make_jaxpr(flat)(*self.operands)
        self.jaxpr = reading.opened(closed)

    def result_dtypes(self, policy: Policy) -> list[Any]:
        """The dtypes that the results have: their own, or in a policy without float32 results its output dtype."""
        avals = [atom.aval for atom in self.jaxpr[0].outvars]
        half = policy.output_dtype if policy.output_dtype.itemsize == 2 else None
        return [half or aval.dtype if is_real(aval) else None for aval in avals]

    def unflatten(self, results: Sequence[Any]) -> Any:
        """What ``fun`` returns, with ``results`` for its arrays."""
        rest = iter(results)
        return jax.tree.unflatten(self._tree, [next(rest) if leaf is _ARRAY else leaf for leaf in self._results])


_ARRAY = object()


def is_array(leaf: Any) -> bool:
    """Whether an argument or a result is traced; what is not stays the Python value that it is."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in _NOT_NUMBERS
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


_NOT_NUMBERS = "OSUTMm"  # objects, texts, times
