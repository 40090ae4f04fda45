"""Emit the decided program: bind every equation again, in its decided dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._internals.jax.rebind import in_place_of
from jaxmp._internals.jax.traces import is_staged, is_tracing, may_be_skipped
from jaxmp.base.dtypes import is_castable
from jaxmp.engine.casts import read_in
from jaxmp.engine.decide import decide
from jaxmp.engine.float8_products import choose_float8, emit_float8
from jaxmp.engine.graph import Body, Graph, Node, Step, build
from jaxmp.engine.marks import WITH_RULE, ours
from jaxmp.engine.rules import Rules
from jaxmp.engine.states import KEPT
from jaxmp.engine.trace import tracing
from jaxmp.program.bodies import RuleEvaluation, bind_equation, params_in_dtype, rebuilt
from jaxmp.program.equations import (
    Bodies,
    Literal,
    Opened,
    asks_for_what_is_missing,
    evaluate,
    has_explicit_axes,
    is_literal,
)
from jaxmp.program.primitives import BOUNDS, BROADCAST, COMPARISONS, MEETS, PRODUCTS, Trait, with_trait
from jaxmp.program.repeated_casts import (
    REPEATS,
    cast_repeated,
    must_widen,
    read_often,
    summed_in_float32,
    sums_half,
)
from jaxmp.program.vmap_sharing import Examples, Same, same_in_bodies

# A body that is inlined has no rule of its own.
_WITH_RULES = with_trait(Trait.CUSTOM_DERIVATIVE) - with_trait(Trait.INLINED)
_EQUALITIES = with_trait(Trait.EQUATES)
_CAST, _FLOAT32 = "convert_element_type", np.dtype(np.float32)


def evaluated(graph: Graph, rules: Rules, args: Sequence[Any], dtypes: Sequence[Any], force: bool = False) -> list[Any]:
    """Decide the dtypes of a program, and evaluate the program in these dtypes.

    The steps and bodies of ``graph`` record the emitted casts. The dtypes of ``args`` may differ from the traced
    dtypes. ``dtypes`` has the requested dtype of each result, or None. If ``force`` is true, all operations are decided
    even if there is no product.
    """
    for node, value in zip(graph.sources, args, strict=True):
        if node is not None:
            node.dtype = np.dtype(jax.typeof(value).dtype)
    decide(graph, dtypes, force)
    choose_float8(graph)
    body = graph.body
    changed = {node for node in graph.nodes if node.deferred_cast is not None or node.dtype != node.written}
    for step in graph.steps:
        step.is_unchanged = _is_unchanged(step, changed)
    evaluation = _Evaluation(rules, body, args)
    results = evaluation.results() if graph.changes else evaluate(body.jaxpr, body.consts, args)
    return [
        value if dtype is None or not is_castable(jax.typeof(value)) else evaluation.cast(value, dtype, node)
        for value, node, dtype in zip(results, body.results, dtypes, strict=True)
    ]


def _derived(rules: Rules, step: Step, jaxpr: Opened, args: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Evaluate a derivative rule.

    ``dtypes`` has the requested dtype of each result, or None.
    """
    graph = build(*jaxpr, rules, (*step.names, WITH_RULE), in_rule=step.eqn.primitive.name == "custom_vjp_call")
    return evaluated(graph, rules, args, dtypes, force=True)


class _Repeat(NamedTuple):
    """An equation that may broadcast an operand, and the values of its operands."""

    step: Step
    operands: Sequence[Any]


class _Evaluation:
    """An evaluation of a body, with its values and their casts.

    A new evaluation is created each time JAX traces the body.
    """

    def __init__(self, rules: Rules, body: Body, args: Any, same: Same | None = None) -> None:
        self.rules, self.body = rules, body
        self.examples = Examples(body.jaxpr, args, body.consts, same)
        self.env = dict(zip((*body.jaxpr.invars, *body.jaxpr.constvars), (*args, *body.consts), strict=True))
        self.casts = body.casts = list[int]()  # the casts for the current step, and at the end for the results
        self.shared: dict[Any, Any] = {}
        # For each result of a cast to float32, the half operand of the cast and its node. Half readers of the result
        # read the operand instead.
        self.narrow: dict[Any, tuple[Any, Any]] = {}

    def results(self) -> list[Any]:
        """Return the results of the body in the dtypes of their nodes."""
        for step in self.body.steps:
            eqn = step.eqn
            self.casts = step.casts = list[int]()
            values = self.read(eqn.invars)
            is_unchanged = step.is_unchanged and not self.examples.are_many
            with in_place_of(eqn):
                results = bind_equation(eqn, values, eqn.params) if is_unchanged else self.results_of(step, values)
            for var, value in zip(eqn.outvars, results, strict=True):
                self.env[var] = value
            if eqn.primitive.name == _CAST and _is_widening(step):
                self.narrow[eqn.outvars[0]] = eqn.invars[0], step.operands[0]
        self.casts = self.body.casts
        return self.read(self.body.jaxpr.outvars)

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """Return the values of atoms."""
        return [atom.val if type(atom) is Literal else self.env[atom] for atom in atoms]

    def read_as(self, value: Any, atom: Any, node: Node, dtype: np.dtype, repeat: _Repeat | None = None) -> Any:
        """Return ``value`` in ``dtype`` for an equation that reads it.

        Pass the equation as ``repeat`` if it may repeat the value.
        """
        if type(atom) is Literal:
            return np.asarray(value).astype(dtype)
        is_half = dtype.itemsize == 2
        is_summed = repeat is not None and is_half and must_widen(repeat.step.eqn, atom, value, self.examples)
        if node.deferred_cast is None and value.dtype == dtype and not isinstance(value, np.ndarray) and not is_summed:
            return value
        if atom in self.narrow and self.narrow[atom][1].value_dtype == dtype:
            narrow, node = self.narrow[atom]
            return self.read_as(self.read([narrow])[0], narrow, node, dtype, repeat)
        # A weight is cast at each use, so that its cotangents are summed in float32; other values are cast once.
        # A cast to float32 is made at each use, so that XLA stores the half value and no shared float32 copy.
        is_shared = node.is_cast_once and dtype.itemsize <= node.value_dtype.itemsize
        if (is_shared and not is_summed) or isinstance(value, np.ndarray):
            if (atom, dtype) not in self.shared:
                self.shared[atom, dtype] = self.cast(value, dtype, node)
            return self.shared[atom, dtype]
        is_narrowed = dtype.itemsize < value.dtype.itemsize
        if repeat is not None and node.deferred_cast in (None, dtype) and (is_summed or is_narrowed):
            return self.repeated(value, dtype, repeat.step, _batched_operands(repeat, self.examples.others, node))
        return self.cast(value, dtype, node)

    def cast(self, value: Any, dtype: np.dtype, node: Node | None = None) -> Any:
        """Return the ``value`` of ``node`` in ``dtype``.

        A postponed cast of the author is applied first.
        """
        if node is not None and node.deferred_cast is not None:
            value = self.cast(value, node.deferred_cast)
        if not isinstance(value, (jax.core.Tracer, jax.Array)):  # the test for jax.Array is slower
            return np.asarray(value).astype(dtype)
        if value.dtype == dtype:
            return value
        self.casts.append(value.size * dtype.itemsize)
        return jax.lax.convert_element_type(value, dtype)

    def repeated(self, value: Any, dtype: np.dtype, step: Step, like: Sequence[Any]) -> Any:
        """Return ``value`` in ``dtype``, broadcast as in ``step``.

        If a ``jax.vmap`` maps over an array of ``like``, the result is repeated for each example.
        """
        aval = step.eqn.outvars[0].aval if step.eqn.primitive.name in BROADCAST else jax.typeof(value)
        if value.shape == aval.shape and (not like or has_explicit_axes(value)):
            return self.cast(value, dtype)
        if value.dtype != dtype:
            self.casts.append(value.size * dtype.itemsize)
        return cast_repeated(value, dtype, aval, like)

    def results_of(self, step: Step, values: list[Any]) -> Sequence[Any]:
        """Return the results of an equation that changes.

        ``values`` are its operands before the casts.
        """
        eqn, node = step.eqn, step.node
        operands = self.operands_of(step, values)
        step.operand_types = [jax.typeof(operand) for operand in operands]
        if eqn.primitive.name == _CAST and node is not None and node.kind is not KEPT:
            return [self.cast_by_author(step, node, values[0], operands[0])]
        if step.bodies is not None:
            return self.results_of_bodies(step, values, operands)
        if step.float8 is not None:
            results, step.operand_types = emit_float8(step, step.float8, operands)
            return results
        is_repeat = node is not None and eqn.primitive.name in REPEATS
        if is_repeat and must_widen(eqn, eqn.invars[0], operands[0], self.examples):
            return summed_in_float32(eqn, operands)
        dtype = None if node is None else node.compute
        params = eqn.params
        if dtype is not None and node is not None:
            precision = self.rules.precision_of(eqn, step.names) if eqn.primitive.name in PRODUCTS else None
            params = params_in_dtype(eqn, dtype, precision)
        if "precision" in params and asks_for_what_is_missing(params):
            params = {**params, "precision": None}
        return bind_equation(eqn, operands, params)

    def operands_of(self, step: Step, values: list[Any]) -> list[Any]:
        """Return the operands of an equation that changes, in the dtypes that it reads."""
        eqn = step.eqn
        repeats: Collection[int] = range(len(values)) if eqn.primitive.name in MEETS else ()
        if self.examples.are_many:
            self.examples.at(eqn, values)
            repeats = repeats or self.examples.repeated(step.bodies)
        operands = list(values)
        for n, (node, dtype) in enumerate(zip(step.operands, _wants(step), strict=True)):
            if node is not None and dtype is not None:
                repeat = _Repeat(step, values) if n in repeats else None
                operands[n] = self.read_as(values[n], eqn.invars[n], node, dtype, repeat)
        return operands

    def cast_by_author(self, step: Step, node: Node, value: Any, operand: Any) -> Any:
        """Return the result of a cast that the author wrote.

        ``operand`` is ``value`` in the dtype that the cast reads.
        """
        if not _is_widening(step):
            step.operand_types = [jax.typeof(value)]
        result = self.cast(operand, node.dtype)
        if step.eqn.invars[0].aval.dtype != step.eqn.outvars[0].aval.dtype:
            del self.casts[-1:]  # the author wrote this cast, so autocast did not add it
        return result

    def results_of_bodies(self, step: Step, values: list[Any], operands: list[Any]) -> list[Any]:
        """Return the results of an equation whose bodies change."""
        name, same = step.eqn.primitive.name, self.examples.same
        make = functools.partial(_program, self.rules, step, same)
        if name == "jit":  # layers with the same jitted body share one program, which JAX traces once
            return list(_result_of_equal_step(self.rules, step, same, make)(*operands))
        # Outside of jit, JAX compiles each of these as a whole, and the next call finds the program in JAX's cache.
        is_compiled = step.bodies is not None and (step.bodies.kind != "call" or name == "shard_map")
        is_jitted = is_compiled and not is_tracing()
        run = _result_of_equal_step(self.rules, step, same, lambda: jax.jit(make())) if is_jitted else make()
        results = list(run(*operands))
        for number in step.unchanged:
            assert step.bodies is not None
            results[number] = values[step.bodies.start + number]
        return results


def _program(rules: Rules, step: Step, same: Same) -> Callable[..., list[Any]]:
    """Return a rewritten equation with bodies, as a function of its operands."""
    assert step.bodies is not None
    inside = enumerate(same_in_bodies(step.bodies, same))
    functions = [functools.partial(_run_body, rules, step, position, of_body) for position, of_body in inside]
    rule = RuleEvaluation(
        functools.partial(_derived, rules, step), functools.partial(tracing, rules, step.region.products)
    )
    return rebuilt(step.eqn, step.bodies, functions, rule)


def _over_turns(step: Step) -> list[tuple[int, np.dtype]]:
    """Return the half operands that many iterations of a scan read.

    Each entry is the position and the dtype of an operand.
    """
    if step.bodies is None or step.bodies.kind != "scan" or step.node is None or step.node.in_rule:
        return []
    places = [*range(step.bodies.start), *(step.bodies.start + n for n in step.unchanged)]
    halves = [(n, operand) for n in places if (operand := step.operands[n]) and operand.dtype.itemsize == 2]
    return [(place, operand.dtype) for place, operand in halves if read_often(step.eqn, place)]


def _batched_operands(repeat: _Repeat, others: Sequence[Any], node: Node) -> Sequence[Any]:
    """Return operands over which a ``jax.vmap`` maps, or may map later.

    ``others`` are the operands over which a ``jax.vmap`` maps now. If there are none and ``node`` is a weight, return
    an activation over which a later ``jax.vmap`` may map.
    """
    step, operands = repeat
    if WITH_RULE in step.names:  # operands may be tangents, and primal values must not depend on tangents
        return ()
    if others or node.is_cast_once:
        return others
    pairs = zip(operands, step.operands, strict=True)
    return [value for value, operand in pairs if operand and operand.is_cast_once and is_staged(value)][:1]


def _run_body(rules: Rules, step: Step, position: int, same: Same, *args: Any) -> list[Any]:
    """Return the results of a body of ``step``.

    Carries and the results of branches are cast to the dtypes of their joins.
    """
    assert step.bodies is not None
    kind, body = step.bodies.kind, step.inner[position]
    evaluation = _Evaluation(rules, body, args, same)
    # Cast these operands back to half. The scan reads them in float32, so that their cotangents are summed in float32.
    for operand, dtype in _over_turns(step):
        half = jax.lax.convert_element_type(args[operand], dtype)
        evaluation.env[body.jaxpr.invars[operand]] = half
    results = evaluation.results()
    if kind != "call" or step.eqn.primitive.name in _WITH_RULES:
        pairs = zip(results, body.results, strict=True)
        results = [
            evaluation.cast(value, node.deferred_cast) if node and node.deferred_cast else value
            for value, node in pairs
        ]
    if kind == "while" and position == 0:  # the condition
        return results
    for number in step.unchanged:  # JAX hoists a carry out of the loop if the body returns it unchanged
        results[number] = args[step.bodies.start + number]
    for number, join in enumerate(step.joins):
        if join is not None:
            results[number] = evaluation.cast(results[number], join.dtype)
    return results


def _result_of_equal_step(
    rules: Rules, step: Step, same: Same, make: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the rewritten program of an equal earlier step, or else ``make()``."""
    if rules.programs is None:
        return make()
    names = step.names if rules.paths else ours(step.names)  # derivative rules are decided later, under these names
    key = (step.eqn.primitive.name, *step.eqn.params.values(), names, _decisions(step), same)
    program = rules.programs.get(key) or make()
    if len(rules.programs) >= 256:  # each entry keeps the constants of its program alive
        rules.programs.clear()
    rules.programs[key] = program
    return program


def _is_unchanged(step: Step, changed: set[Node]) -> bool:
    """Return whether an equation is emitted unchanged, with its bodies."""
    node, params = step.node, step.eqn.params
    if not changed.isdisjoint(step.operands) or not changed.isdisjoint(step.nodes) or step.float8 is not None:
        return False
    if "precision" in params and asks_for_what_is_missing(params):
        return False
    if step.bodies is None:
        return node is None or (node.compute is None and (node.dtype.itemsize > 2 or not sums_half(step.eqn)))
    # Derivative rules are decided when they run.
    has_rule = step.eqn.primitive.name in _WITH_RULES and step.region.level != "written"
    inside = (inner for body in step.inner for inner in body.steps)
    return not has_rule and not _over_turns(step) and all(inner.is_unchanged for inner in inside)


def _is_widening(step: Step) -> bool:
    """Return whether an equation casts a value that is now half to float32."""
    node, operand = step.node, step.operands[0] if step.eqn.primitive.name == _CAST else None
    return node is not None and operand is not None and operand.value_dtype.itemsize < node.dtype.itemsize


def _wants(step: Step) -> list[np.dtype | None]:
    """Return the dtype in which an equation reads each operand; None for no cast."""
    if step.bodies is not None:
        return _wants_of_bodies(step, step.bodies)
    name, node, operands = step.eqn.primitive.name, step.node, step.operands
    if node is None and name in COMPARISONS:
        largest: list[Node] = []
        if name in _EQUALITIES:
            # The derivative of a maximum compares the maximum with its operands, so all of them must be rounded alike.
            bounded = [operand for operand in operands if operand and operand.name in BOUNDS]
            largest = [bound for bound in bounded if {*bound.inputs} & {*operands}]
        dtypes = {operand.value_dtype for operand in largest or operands if operand and operand.const != (0.0, 0.0)}
        if len(dtypes) == 1 and (largest or dtypes != {np.dtype(np.float32)}):
            return [None if operand is None else next(iter(dtypes)) for operand in operands]
    if node is None:
        return [None if operand is None else operand.written for operand in operands]
    if name == _CAST and (node.kind is KEPT or _is_widening(step)):  # the cast may read any dtype
        return [None if operand is None else operand.deferred_cast for operand in operands]
    return [None if operand is None else read_in(node, operand) for operand in operands]


def _wants_of_bodies(step: Step, bodies: Bodies) -> list[np.dtype | None]:
    # Half operands stay half, because a `jax.vmap` may broadcast them for each example.
    wants = [
        operand.dtype if operand and operand.dtype.itemsize == 2 and not operand.deferred_cast else None
        for operand in step.operands
    ]
    if bodies.is_loop:
        for n, join in enumerate(step.joins, bodies.start):
            wants[n] = join.dtype if join else wants[n]
        for place, _ in _over_turns(step):
            wants[place] = _FLOAT32
    elif bodies.kind == "call":
        for position, operand in enumerate(step.operands):
            if operand is not None and operand.is_cast_once:  # so that the call does not save a float32 copy
                wants[position] = _half_wanted(step.inner[0], position)
            # The body is traced in the original dtypes.
            if operand is not None and step.eqn.primitive.name in _WITH_RULES:
                wants[position] = wants[position] or operand.deferred_cast
    return wants


def _half_wanted(body: Body, position: int) -> np.dtype | None:
    """Return the half dtype in which all readers read a body's operand, or None."""
    if body.wanted is None:
        body.wanted = {}
        for step in body.steps:
            # A value that the author casts to half may already be half before this cast.
            wants = [step.node.dtype] if step.eqn.primitive.name == _CAST and step.node else _wants(step)
            for atom, dtype in zip(step.eqn.invars, wants, strict=True):
                if not is_literal(atom):
                    body.wanted.setdefault(atom, set()).add(dtype)
    var = body.jaxpr.invars[position]
    dtypes = body.wanted.get(var, set()) if var not in body.jaxpr.outvars else set()
    return next((dtype for dtype in dtypes if len(dtypes) == 1 and dtype and dtype.itemsize == 2), None)


def _decisions(step: Step) -> Any:
    decisions: tuple[Any, ...] = tuple(
        (node.compute, node.dtype, node.deferred_cast) for node in step.nodes if node is not None
    )
    shared = tuple(operand is not None and (operand.is_cast_once, operand.deferred_cast) for operand in step.operands)
    decisions = (*decisions, step.is_unchanged, step.float8, step.float8 is not None and may_be_skipped())
    # `_wants` is part of the key, because the dtypes of comparisons also depend on constants.
    return (decisions, shared, tuple(_wants(step)), tuple(tuple(map(_decisions, body.steps)) for body in step.inner))
