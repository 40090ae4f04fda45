"""Where equations are bound again: each in its place, and by a short way into a program that is traced.

``Primitive.bind`` asks what each operand is, which transformation is meant, and what stands around. Where the operands
belong to the program that is traced all that is known: there an equation is put by what ``bind`` comes to in the end,
``default_process_primitive``; and one that nothing changes with the types of its results that are known as well, as JAX
does itself with the body of a ``jit`` that is inlined.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import config, core, dtypes, source_info_util
from jax._src.interpreters import partial_eval
from jax.extend.core import Literal, Primitive

_CAST: Any = jax.lax.convert_element_type_p
_Trace: Any = partial_eval.DynamicJaxprTrace


class Places:
    """The places of equations that are bound where this is made: each keeps its source, its scopes and its context.

    From one :meth:`at` to the next all is bound in the place of one equation; before the first where this is made.
    """

    def __init__(self) -> None:
        self._trace, self._around = core.trace_ctx.trace, source_info_util.current_name_stack()
        self._is_traced = type(self._trace) is _Trace and not config.eager_constant_folding.value
        self._context: Any = core.current_jaxpr_eqn_context()
        self._eqn: Any = None
        self._scopes: Any = None
        self._names: Any = None
        self._source: Any = None
        self._is_short = False

    def at(self, eqn: Any) -> None:
        """The place is that of ``eqn`` from now on; None: where this was made."""
        self._eqn, self._is_short = eqn, eqn is not None and self._is_traced and eqn.ctx is self._context
        if eqn is not None:
            info = eqn.source_info
            if info.name_stack is not self._scopes:  # a scope has many equations, one after the other
                self._scopes, self._names = info.name_stack, self._around + info.name_stack
            # An equation that knows none has the source of what is around it, as under JAX.
            self._source = info.replace(name_stack=self._names)
            if not info.traceback:
                self._source.traceback = source_info_util.current().traceback

    def within(self, fun: Callable[..., Any], *args: Any) -> Any:
        """What a function returns that binds by itself."""
        with self.here():
            return fun(*args)

    def here(self) -> contextlib.AbstractContextManager[None]:
        """What JAX binds in it is bound in the place."""
        if self._eqn is None:
            return contextlib.nullcontext()
        source = source_info_util.user_context(self._source.traceback, name_stack=self._names)
        return source if self._eqn.ctx is self._context else _both(source, self._eqn.ctx.manager)

    def bind(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """As ``primitive.bind``."""
        if self._is_short and (primitive is _CAST or _is_plain(primitive)) and (tracers := self._tracers(operands)):
            if rule := partial_eval.custom_staging_rules.get(primitive):
                return rule(self._trace, self._source, *tracers, **params)
            return self._trace.default_process_primitive(primitive, tracers, params, self._source)
        with self.here():
            return primitive.bind(*operands, **params)

    def _tracers(self, operands: Sequence[Any]) -> list[Any]:
        """What stands for ``operands`` in the program that is traced; none if one is of another, or there are none."""
        tracers = []
        for operand in operands:
            if getattr(operand, "_trace", None) is not self._trace:
                if isinstance(operand, core.Tracer):
                    return []
                operand = self._trace.to_jaxpr_tracer(dtypes.canonicalize_value(operand), self._source)
            tracers.append(operand)
        return tracers

    def cast(self, value: Any, dtype: Any) -> Any:
        """A real array in another dtype."""
        return self.bind(_CAST, (value,), {"new_dtype": dtype, "weak_type": False, "sharding": None})

    def bound(self, operands: Sequence[Any], params: Any) -> list[Any]:
        """The results of the equation with other parameters on other operands, as one operation."""
        primitive = self._eqn.primitive
        out = self.bind(primitive, operands, primitive.get_bind_params(params))
        return list(out) if primitive.multiple_results else [out]

    def repeated(self, operands: Sequence[Any]) -> list[Any]:
        """The results of the equation as it stands."""
        eqn, trace, primitive, tracers = self._eqn, self._trace, self._eqn.primitive, list[Any]()
        # What a forwarding rule may drop, JAX looks at again.
        if not self._is_short or eqn.effects or primitive in partial_eval.forwarding_rules or not _is_plain(primitive):
            return self.bound(operands, eqn.params)
        for atom, operand in zip(eqn.invars, operands, strict=True):
            if isinstance(atom, Literal):
                operand = partial_eval.DynamicJaxprTracer(trace, atom.aval, atom, self._source)
            elif getattr(operand, "_trace", None) is not trace or operand.aval is not atom.aval:
                return self.bound(operands, eqn.params)
            tracers.append(operand)
        avals = [var.aval for var in eqn.outvars]
        return list(trace.emit_eqn(tracers, avals, primitive, eqn.params, eqn.effects, self._source, eqn.ctx))


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


@functools.cache
def _is_plain(primitive: Any) -> bool:
    """Whether JAX binds and stages a primitive as it does most."""
    own = {"bind_with_trace", "is_high", "get_bind_params"} & vars(primitive).keys()
    special = own or primitive.ref_allocating or primitive in partial_eval.const_fold_rules
    return type(primitive) is Primitive and not special
