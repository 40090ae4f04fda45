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
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config, core, dtypes, source_info_util
from jax._src.interpreters import ad, partial_eval
from jax.extend.core import Literal, Primitive, primitives

from jaxmp._jaxpr.reading import opened

_CAST: Any = jax.lax.convert_element_type_p
_JIT: Any = primitives.jit_p
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
        # Of operations that were put here before, by their parameters and the types of their operands.
        self._known: dict[Any, tuple[Any, list[Any]]] = {}
        self._casts: dict[Any, dict[str, Any]] = {}  # the parameters of each
        self._numbers: dict[Any, Any] = {}  # those that are written into equations

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

    def number(self, value: Any, dtype: np.dtype) -> Any:
        """A number that is written into equations, in ``dtype``, as an operand of one."""
        written = np.asarray(value)
        key = dtype, written.dtype, written.tobytes()
        if (found := self._numbers.get(key)) is None:
            found = written.astype(dtype)
            self._numbers[key] = found = self._tracers([found])[0] if self._is_traced else found
        return found

    def bind(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """As ``primitive.bind``."""
        results = self._put(primitive, operands, params, (primitive, *params.values()))
        if results is None:
            with self.here():
                return primitive.bind(*operands, **params)
        return results if primitive.multiple_results else results[0]

    def _put(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any], key: Any) -> list[Any] | None:
        """The results of an operation by the short way; None if there is none. Equal keys have equal parameters."""
        if not self._is_short or not (primitive is _CAST or _is_plain(primitive)):
            return None
        primals: Sequence[Any] = operands
        tangents: list[Any] = []
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
        known = key, *[tracer.aval for tracer in tracers]
        if known in self._known and not (primitive is _CAST and self._is_constant(tracers[0])):
            params, types = self._known[known]
            return self._emitted(tracers, types, primitive, params, core.no_effects)
        if primitive in partial_eval.custom_staging_rules:
            out = partial_eval.custom_staging_rules[primitive](self._trace, self._source, *tracers, **params)
        else:
            out = self._trace.default_process_primitive(primitive, tracers, params, self._source)
        results = list(out) if primitive.multiple_results else [out]
        self._note(known, primitive, tracers, results)
        return results

    def _note(self, known: Any, primitive: Any, tracers: Sequence[Any], results: Sequence[Any]) -> None:
        """Keeps what an equation was put as for the next one that is equal."""
        eqn: Any = results[0].parent if results and type(results[0]) is _Tracer else None
        # What JAX inlines, folds or forwards is another equation, or none.
        is_whole = eqn is not None and eqn.primitive is primitive and len(eqn.in_tracers) == len(tracers)
        if not is_whole or eqn.effects or not all(map(operator.is_, eqn.in_tracers, tracers)):
            return
        if eqn.outvars == [getattr(result, "val", None) for result in results]:
            self._known[known] = eqn.params, [var.aval for var in eqn.outvars]

    def called(self, jitted: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a jitted function; it is called once for all operands of equal types."""
        tracers = self._tracers(operands) if self._is_short and self._linear is None else []
        known = jitted, *[tracer.aval for tracer in tracers]
        if tracers and known in self._known:
            params, types = self._known[known]
            return self._emitted(tracers, types, _JIT, params, core.no_effects)
        results = list(self.within(jitted, *(tracers or operands)))
        if tracers:
            self._note(known, _JIT, tracers, results)
        return results

    def _emitted(
        self, tracers: list[Any], types: Sequence[Any], primitive: Any, params: Any, effects: Any
    ) -> list[Any]:
        """The results of a new equation: as JAX's own ``emit_eqn``, which asks once more what is known."""
        trace, source = self._trace, self._source
        outvars = [*map(core.Var, types)]
        eqn = partial_eval.TracingEqn(tracers, outvars, primitive, params, effects, source, self._context)
        trace.frame.add_eqn(eqn)
        if len(outvars) == 1:
            return [_Tracer(trace, types[0], outvars[0], source, eqn)]
        return [_Tracer(trace, var.aval, var, source, eqn) for var in outvars]

    def _differentiated(
        self, primitive: Any, primals: Sequence[Any], tracers: list[Any], tangents: list[Any], params: dict[str, Any]
    ) -> list[Any]:
        """The results of an operation on operands with tangents."""
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
        return [ad.LinearizeTracer(linear, result, next(found)) if known else result for result, known in pairs]

    def _is_constant(self, tracer: Any) -> bool:
        """Whether JAX folds a cast of it."""
        return type(tracer.val) is Literal or tracer.val in self._trace.frame.constvar_to_val

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
        if dtype not in self._casts:
            self._casts[dtype] = {"new_dtype": dtype, "weak_type": False, "sharding": None}
        params = self._casts[dtype]
        if (results := self._put(_CAST, (value,), params, dtype)) is not None:
            return results[0]
        with self.here():
            return _CAST.bind(value, **params)

    def bound(self, operands: Sequence[Any], params: Any, key: Any = None) -> list[Any]:
        """The results of the equation with other parameters on other operands; of equal ``key`` these are equal."""
        primitive = self._eqn.primitive
        results = self._put(primitive, operands, params, key or (primitive, *params.values()))
        if results is not None:
            return results
        with self.here():
            out = primitive.bind(*operands, **(params if _is_plain(primitive) else primitive.get_bind_params(params)))
        return list(out) if primitive.multiple_results else [out]

    def repeated(self, operands: Sequence[Any]) -> list[Any]:
        """The results of the equation as it stands."""
        eqn, trace, primitive = self._eqn, self._trace, self._eqn.primitive
        tracers: list[Any] = []
        is_cast, is_jit = primitive is _CAST, primitive is _JIT and not eqn.params["jaxpr"].is_high
        if not self._is_short or eqn.effects or not (is_cast or is_jit or _is_plain(primitive)):
            return self.bound(operands, eqn.params)
        avals = [var.aval for var in eqn.outvars]
        # What a forwarding rule may drop, as it leaves its operand what it is, JAX looks at again.
        may_drop = primitive in partial_eval.forwarding_rules and not is_jit
        if may_drop and (primitive.multiple_results or avals == [atom.aval for atom in eqn.invars]):
            return self.bound(operands, eqn.params)
        for atom, operand in zip(eqn.invars, operands, strict=True):
            if type(atom) is Literal:
                operand = _Tracer(trace, atom.aval, atom, self._source)
            elif not (type(operand) is _Tracer and operand._trace is trace and operand.aval is atom.aval):
                return self.bound(operands, eqn.params)
            if is_cast and self._is_constant(operand):
                return self.bound(operands, eqn.params)
            tracers.append(operand)
        return self._emitted(tracers, avals, primitive, eqn.params, eqn.effects)


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
