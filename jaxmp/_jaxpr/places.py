"""Where equations are bound again: each in its place, and by a short way into a program that is traced.

``Primitive.bind`` asks what each operand is, which transformation is meant, and what stands around. Where the operands
belong to the program that is traced all that is known: there an equation is put by what ``bind`` comes to in the end,
``default_process_primitive``; and one that nothing changes with the types of its results that are known as well, as JAX
does itself with the body of a ``jit`` that is inlined.

Where the program is differentiated while it is traced, JAX traces the derivative of every single equation anew, which
takes most of the time. Here that of equal ones is traced once, and put into both programs by the same way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import config, core, dtypes, source_info_util
from jax._src.interpreters import ad, partial_eval
from jax.extend.core import Literal, Primitive

from jaxmp._jaxpr.reading import opened

_CAST: Any = jax.lax.convert_element_type_p
_Trace: Any = partial_eval.DynamicJaxprTrace
_Tracer: Any = partial_eval.DynamicJaxprTracer


class Places:
    """The places of equations that are bound where this is made: each keeps its source, its scopes and its context.

    From one :meth:`at` to the next all is bound in the place of one equation; before the first where this is made.
    """

    def __init__(self) -> None:
        self._trace, self._around = core.trace_ctx.trace, source_info_util.current_name_stack()
        self._linear: Any = self._trace if type(self._trace) is ad.LinearizeTrace else None
        if self._linear is not None:
            self._trace, self._configuration = self._linear.parent_trace, config.trace_context()
        self._is_traced = type(self._trace) is _Trace and not config.eager_constant_folding.value
        self._context: Any = core.current_jaxpr_eqn_context()
        self._eqn: Any = None
        self._scopes: Any = None
        self._names: Any = None
        self._source: Any = None
        self._is_short = False
        self._types: dict[Any, list[Any]] = {}  # of the results of operations that were put here before

    def at(self, eqn: Any) -> None:
        """The place is that of ``eqn`` from now on; None: where this was made."""
        self._eqn, self._is_short = eqn, eqn is not None and self._is_traced and eqn.ctx is self._context
        if eqn is not None:
            info = eqn.source_info
            if info.name_stack is not self._scopes:  # a scope has many equations, one after the other
                self._scopes, self._names = info.name_stack, self._around + info.name_stack
            # An equation that knows none has the source of what is around it, as under JAX.
            self._source = source_info_util.SourceInfo(info.traceback, self._names)
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
        if self._is_short and (primitive is _CAST or _is_plain(primitive)):
            results = self._put(primitive, operands, params)
            if results is not None:
                return results
        with self.here():
            return primitive.bind(*operands, **params)

    def _put(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """What ``bind`` returns, by the short way; None if there is none."""
        primals, tangents = operands, list[Any]()
        if self._linear is not None:
            pairs = [_pair(operand, self._linear) for operand in operands]
            primals, tangents = [primal for primal, _ in pairs], [tangent for _, tangent in pairs]
        if not (tracers := self._tracers(primals)):
            return None
        if self._linear is not None and any(tangent is not None for tangent in tangents):
            is_own = primitive in ad.primitive_linearizations or primitive not in ad.primitive_jvps
            if is_own or any(map(callable, params.values())):  # a function may hold what dies with this trace
                return None
            return self._differentiated(primitive, primals, tracers, tangents, params)
        if primitive in partial_eval.custom_staging_rules:
            return partial_eval.custom_staging_rules[primitive](self._trace, self._source, *tracers, **params)
        key = (primitive, *params.values(), *[tracer.aval for tracer in tracers])
        types = None if primitive is _CAST and tracers[0].get_const() is not None else self._types.get(key)  # JAX folds
        if types is not None:
            args = tracers, types, primitive, params, core.no_effects, self._source, self._context
            out = self._trace.emit_eqn(*args)
            return out if primitive.multiple_results else out[0]
        out = self._trace.default_process_primitive(primitive, tracers, params, self._source)
        results = out if primitive.multiple_results else [out]
        # What a forwarding rule may drop, as it leaves its operand what it is, JAX looks at again.
        if not self._eqn.effects and not any(result is tracer for result in results for tracer in tracers):
            self._types[key] = [result.aval for result in results]
        return out

    def _differentiated(
        self, primitive: Any, primals: Sequence[Any], tracers: list[Any], tangents: list[Any], params: dict[str, Any]
    ) -> Any:
        """What ``bind`` returns of operands with tangents."""
        linear, put = self._linear, partial_eval.inline_jaxpr_into_trace
        avals, known = tuple(tracer.aval for tracer in tracers), tuple(tangent is not None for tangent in tangents)
        with self.here():
            forwards, _, is_known, passed, derivative = _linearized(
                primitive, tuple(params.items()), avals, known, linear.is_vjp, self._configuration
            )
        results = put(self._trace, self._source, *opened(forwards), *tracers)
        saved = iter(results[len(is_known) :])
        source = self._source.replace(name_stack=self._names[linear._name_stack_prefix_len :])
        read = [*(next(saved) if n is None else primals[n] for n in passed), *(t for t in tangents if t is not None)]
        read = [linear.tangent_trace.to_jaxpr_tracer(value, source) for value in read]
        found = iter(put(linear.tangent_trace, source, *opened(derivative), *read))
        pairs = zip(results, is_known, strict=False)
        out = [ad.LinearizeTracer(linear, result, next(found)) if known else result for result, known in pairs]
        return out if primitive.multiple_results else out[0]

    def _tracers(self, operands: Sequence[Any]) -> list[Any]:
        """What stands for ``operands`` in the program that is traced; none if one is of another, or there are none."""
        tracers = []
        for operand in operands:
            if type(operand) is not _Tracer or operand._trace is not self._trace:
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
        params = params if _is_plain(primitive) else primitive.get_bind_params(params)
        out = self.bind(primitive, operands, params)
        return list(out) if primitive.multiple_results else [out]

    def repeated(self, operands: Sequence[Any]) -> list[Any]:
        """The results of the equation as it stands."""
        eqn, trace, primitive, tracers = self._eqn, self._trace, self._eqn.primitive, list[Any]()
        is_cast, avals = primitive is _CAST, [var.aval for var in eqn.outvars]
        # What a forwarding rule may drop, as it leaves its operand what it is, JAX looks at again.
        is_dropped = primitive in partial_eval.forwarding_rules and (
            primitive.multiple_results or avals == [atom.aval for atom in eqn.invars]
        )
        if not self._is_short or eqn.effects or is_dropped or not (is_cast or _is_plain(primitive)):
            return self.bound(operands, eqn.params)
        for atom, operand in zip(eqn.invars, operands, strict=True):
            if type(atom) is Literal:
                operand = _Tracer(trace, atom.aval, atom, self._source)
            elif not (type(operand) is _Tracer and operand._trace is trace and operand.aval is atom.aval):
                return self.bound(operands, eqn.params)
            if is_cast and operand.get_const() is not None:  # which JAX folds
                return self.bound(operands, eqn.params)
            tracers.append(operand)
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
    has_hashes = primitive.name != "custom_lin" and not primitive.name.startswith("call_hi_primitive")  # its parameters
    return type(primitive) is Primitive and has_hashes and not special


def _pair(operand: Any, linear: Any) -> tuple[Any, Any]:
    """A value and its tangent where ``linear`` differentiates; None if it has none."""
    if type(operand) is not ad.LinearizeTracer or operand._trace is not linear:
        return operand if isinstance(operand, core.Tracer) else dtypes.canonicalize_value(operand), None
    return operand.primal, None if type(operand.tangent) is ad.Zero else operand.tangent


@functools.lru_cache(maxsize=1024)
def _linearized(
    primitive: Any, params: Any, avals: Any, known: tuple[bool, ...], is_vjp: bool, configuration: Any
) -> Any:
    """The programs of an equation that is differentiated, as JAX says of one that is a ``jit``."""
    jaxpr = jax.make_jaxpr(lambda *operands: primitive.bind(*operands, **dict(params)))(*avals)
    return ad.linearize_jaxpr(jaxpr, known, is_vjp=is_vjp)
