"""Emit the decided program: bind every equation again, in its decided dtypes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.traces import is_staged, is_tracing, may_be_skipped
from jaxmp.base.dtypes import is_half
from jaxmp.engine.checks import warn_of_unread_products
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.constant_casts import constant_in
from jaxmp.engine.decide import Decisions, decide_program
from jaxmp.engine.float8_products import emit_float8
from jaxmp.engine.float32_results import emit_with_float32_result
from jaxmp.engine.graph import build
from jaxmp.engine.marks import WIDE_SUMS, WITH_RULE, ours
from jaxmp.engine.nodes import Node, Step, StepBody
from jaxmp.engine.reads import is_widening
from jaxmp.engine.separate_casts import with_separate_cast
from jaxmp.engine.shared_programs import Programs, remember
from jaxmp.engine.states import KEPT
from jaxmp.engine.trace import tracing
from jaxmp.program.binding import bind_equation, params_in_dtype
from jaxmp.program.derivative_rules import BodyFunction, RuleEvaluation
from jaxmp.program.equations import (
    Array,
    Atom,
    Bodies,
    Opened,
    Params,
    asks_for_what_is_missing,
    aval_of,
    evaluate,
    has_explicit_axes,
    is_literal,
    opened,
)
from jaxmp.program.primitives import BROADCAST, CAST, MEETS, PRODUCTS
from jaxmp.program.repeated_casts import (
    REPEATS,
    cast_repeated,
    must_widen,
    summed_in_float32,
)
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.vmap_sharing import Examples, Same, same_in_bodies


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emission:
    """The emission of a decided program, with records for a plan.

    Attributes:
      decisions: the decisions about the program.
      classifier: the classifier of the operations in derivative rules, which are decided later.
      programs: a cache of rewritten bodies (see ``shared_programs.py``); None to share nothing.
      cast_bytes: the bytes of each cast for an equation, and for the results of a body. Casts of constants do not
        count.
      operand_types: the types of the operands of each equation that changes, after casts.
    """

    decisions: Decisions
    classifier: Classifier
    programs: Programs | None
    cast_bytes: dict[Step | StepBody, list[int]] = dataclasses.field(default_factory=dict)
    operand_types: dict[Step, Sequence[jax.core.AbstractValue]] = dataclasses.field(default_factory=dict)

    def results(self, program: Opened, args: Sequence[Array], dtypes: Sequence[np.dtype | None]) -> list[Array]:
        """Return the results of the program for its arguments.

        ``dtypes`` has the requested dtype of each result, or None. An emission does not store the program and its
        constants, because cached programs of equal steps keep the emission alive.
        """
        body = self.decisions.graph.body
        evaluation = _Evaluation(self, body, program, args)
        run = evaluation.evaluate if self.decisions.graph.changes else evaluate
        results = run(*program, args)
        return [
            value if node is None or dtype is None else evaluation.cast(value, dtype)
            for value, node, dtype in zip(results, body.results, dtypes, strict=True)
        ]


class _Repeat(NamedTuple):
    """An equation that may broadcast an operand, and the values of its operands."""

    step: Step
    operands: Sequence[Array]


class _Evaluation(Rewriter):
    """An evaluation of a body, with the casts of its values.

    A new evaluation is created each time JAX traces the body.
    """

    def __init__(
        self, emission: Emission, body: StepBody, program: Opened, args: Sequence[Array], same: Same | None = None
    ) -> None:
        self.emission, self.decisions = emission, emission.decisions
        self.body, self.steps = body, iter(body.steps)
        jaxpr, consts = program
        self.examples = Examples(jaxpr, args, consts, same)
        # the bytes of each cast for the current step, and at the end for the results
        self.cast_bytes = emission.cast_bytes[body] = list[int]()
        self.shared: dict[tuple[Atom, np.dtype], Array] = {}
        # For each result of a cast to float32, the half operand of the cast: its value, its variable and its node. Half
        # readers of the result read the operand instead.
        self.narrow: dict[Atom, tuple[Array, Atom, Node]] = {}

    def evaluate(self, jaxpr: Any, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        """Return the results of the body in the dtypes of their nodes."""
        results = super().evaluate(jaxpr, consts, args)
        self.cast_bytes = self.emission.cast_bytes[self.body]
        return results

    def evaluate_equation(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
        """Return the results of the next step of the body."""
        step = next(self.steps)
        self.cast_bytes = self.emission.cast_bytes[step] = list[int]()
        narrow = step.operands[0] if eqn.primitive.name == CAST else None
        if narrow is not None and is_widening(step, self.decisions.decision_of):
            self.narrow[eqn.outvars[0]] = operands[0], eqn.invars[0], narrow
        if step in self.decisions.unchanged and not self.examples.are_many:
            return bind_equation(eqn, operands, eqn.params)
        return self.results_of(step, operands)

    def read(self, value: Array, atom: Atom, node: Node, dtype: np.dtype, repeat: _Repeat | None = None) -> Array:
        """Return ``value`` in the ``dtype`` in which an equation reads it.

        Pass the equation as ``repeat`` if it may repeat the value. The first case that applies counts:

        - a literal or a constant: it is rounded here
        - the result of a cast to float32: a half reader reads the operand of this cast
        - a weight or a long sum that the equation repeats: cast and broadcast together, with a float32 gradient sum
        - an activation that becomes half: one cast for all readers
        - a weight that becomes half: a cast for each reader, so that its cotangents are summed in float32
        - a value that becomes float32: a cast for each reader, so that XLA stores no shared float32 copy
        """
        if is_literal(atom):
            return constant_in(value, dtype)
        if atom in self.narrow:
            narrow_value, narrow_atom, narrow_node = self.narrow[atom]
            if self.decisions.decision_of[narrow_node].stored_dtype == dtype:
                return self.read(narrow_value, narrow_atom, narrow_node, dtype, repeat)
        if isinstance(value, np.ndarray):
            return self.cast_once(value, atom, dtype)
        is_narrowed = dtype.itemsize < value.dtype.itemsize
        if repeat is not None:
            is_summed = is_half(dtype) and must_widen(repeat.step.eqn, atom, value, self.examples)
            if is_summed or (is_narrowed and not node.is_cast_once):
                return self.repeated(value, dtype, repeat.step, _batched_operands(repeat, self.examples.others, node))
        is_widened = dtype.itemsize > value.dtype.itemsize
        if node.is_cast_once and not is_widened and value.dtype != dtype:
            return self.cast_once(value, atom, dtype)
        return self.cast(value, dtype)

    def cast_once(self, value: Array, atom: Atom, dtype: np.dtype) -> Array:
        """Return ``value`` in ``dtype``, in a cast that all readers of the variable ``atom`` share."""
        if (atom, dtype) not in self.shared:
            self.shared[atom, dtype] = self.cast(value, dtype)
        return self.shared[atom, dtype]

    def cast(self, value: Array, dtype: np.dtype) -> Array:
        """Return ``value`` in ``dtype``."""
        if not isinstance(value, (jax.core.Tracer, jax.Array)):  # the test for jax.Array is slower
            return constant_in(value, dtype)
        if value.dtype == dtype:
            return value
        self.cast_bytes.append(value.size * dtype.itemsize)
        return jax.lax.convert_element_type(value, dtype)

    def repeated(self, value: Array, dtype: np.dtype, step: Step, like: Sequence[Array]) -> Array:
        """Return ``value`` in ``dtype``, broadcast as in ``step``.

        If a ``jax.vmap`` maps over an array of ``like``, the result is repeated for each example.
        """
        aval = aval_of(step.eqn.outvars[0]) if step.eqn.primitive.name in BROADCAST else jax.typeof(value)
        if value.shape == aval.shape and (not like or has_explicit_axes(value)):
            return self.cast(value, dtype)
        if value.dtype != dtype:
            self.cast_bytes.append(value.size * dtype.itemsize)
        return cast_repeated(value, dtype, aval, like)

    def results_of(self, step: Step, values: list[Array]) -> list[Array]:
        """Return the results of an equation that changes.

        ``values`` are its operands before the casts.
        """
        eqn, node = step.eqn, step.node
        operands = self.operands_of(step, values)
        self.emission.operand_types[step] = [jax.typeof(operand) for operand in operands]
        if eqn.primitive.name == CAST and node is not None and node.kind is not KEPT:
            return [self.cast_by_author(step, node, values[0], operands[0])]
        if step.bodies is not None:
            return self.results_of_bodies(step, step.bodies, values, operands)
        if (product := self.decisions.float8.get(step)) is not None:
            results, self.emission.operand_types[step] = emit_float8(step, product, operands)
            return results
        is_repeat = node is not None and eqn.primitive.name in REPEATS
        if is_repeat and must_widen(eqn, eqn.invars[0], operands[0], self.examples):
            with jax.named_scope(WIDE_SUMS):
                return summed_in_float32(eqn, operands)
        params = self.params_of(step)
        if node is not None and self.decisions.decision_of[node].has_float32_result:
            return emit_with_float32_result(eqn, operands, params)
        return bind_equation(eqn, operands, params)

    def params_of(self, step: Step) -> Params:
        """Return the parameters of an equation in its compute dtype."""
        eqn, params = step.eqn, step.eqn.params
        dtype = None if step.node is None else self.decisions.decision_of[step.node].compute_dtype
        if dtype is not None:
            is_product = eqn.primitive.name in PRODUCTS
            precision = self.emission.classifier.precision_of(eqn, step.names) if is_product else None
            params = params_in_dtype(eqn, dtype, precision)
        if "precision" in params and asks_for_what_is_missing(params):
            params = {**params, "precision": None}
        return params

    def operands_of(self, step: Step, values: list[Array]) -> list[Array]:
        """Return the operands of an equation that changes, after their casts."""
        eqn = step.eqn
        repeats: Collection[int] = range(len(values)) if eqn.primitive.name in MEETS else ()
        if self.examples.are_many:
            self.examples.at(eqn, values)
            repeats = repeats or self.examples.repeated(step.bodies)
        operands, is_float8 = list(values), step in self.decisions.float8
        for n, (node, dtype) in enumerate(zip(step.operands, self.decisions.reads[step], strict=True)):
            if node is not None and dtype is not None:
                repeat = _Repeat(step, values) if n in repeats else None
                operands[n] = self.read(values[n], eqn.invars[n], node, dtype, repeat)
                if not (node.is_cast_once or repeat or is_float8):
                    operands[n] = with_separate_cast(values[n], operands[n])
        return operands

    def cast_by_author(self, step: Step, node: Node, value: Array, operand: Array) -> Array:
        """Return the result of a cast that the author wrote.

        ``operand`` is ``value`` as the cast reads it.
        """
        if not is_widening(step, self.decisions.decision_of):
            self.emission.operand_types[step] = [jax.typeof(value)]
        return self.cast(operand, self.decisions.decision_of[node].stored_dtype)

    def results_of_bodies(self, step: Step, bodies: Bodies, values: list[Array], operands: list[Array]) -> list[Array]:
        """Return the results of an equation whose bodies change."""
        same = self.examples.same

        def make() -> BodyFunction:
            return _StepRewriter(self.emission, step, same_in_bodies(bodies, same)).rebuild(step.eqn, bodies)

        if bodies.is_jitted:  # layers with the same jitted body share one program, which JAX traces once
            return list(_result_of_equal_step(self.emission, step, same, make)(*operands))
        # Outside of jit, JAX compiles each of these as a whole, and the next call finds the program in JAX's cache.
        is_jitted = bodies.is_compiled and not is_tracing()
        run = _result_of_equal_step(self.emission, step, same, lambda: jax.jit(make())) if is_jitted else make()
        return list(run(*operands))


class _StepRewriter(Rewriter):
    """The bodies and the derivative rule of a step.

    JAX traces them when the rewritten step runs or is differentiated. The programs of equal steps are shared, so this
    object has no values of the program.
    """

    def __init__(self, emission: Emission, step: Step, same: Sequence[Same]) -> None:
        """Rewrite ``step``.

        ``same`` tells for each body which inputs all examples share.
        """
        self.emission, self.step, self.same = emission, step, same

    def evaluate_body(self, eqn: JaxprEqn, bodies: Bodies, number: int, *args: Array) -> list[Array]:
        """Return the results of a body, after their casts."""
        step, body = self.step, self.step.inner[number]
        program = opened(bodies.jaxprs[number])
        evaluation = _Evaluation(self.emission, body, program, args, self.same[number])
        decisions = self.emission.decisions
        inputs = list(args)
        for position, dtype in decisions.repeated_reads.get(step, ()):
            inputs[position] = jax.lax.convert_element_type(args[position], dtype)
        results = evaluation.evaluate(*program, inputs)
        for n, dtype_read in enumerate(decisions.reads[body]):
            results[n] = results[n] if dtype_read is None else evaluation.cast(results[n], dtype_read)
        return results

    def make_rule_evaluation(self, eqn: JaxprEqn) -> RuleEvaluation:
        """Return an evaluation that builds a graph of the rule and decides its dtypes."""
        classifier, products = self.emission.classifier, self.step.region.products
        return RuleEvaluation(self._evaluate_rule, functools.partial(tracing, classifier, products))

    def _evaluate_rule(self, program: Opened, args: Sequence[Array], dtypes: Sequence[np.dtype | None]) -> list[Array]:
        step, emission = self.step, self.emission
        in_rule = step.bodies is not None and step.bodies.has_backward_rule
        names = (*step.names, WITH_RULE)
        graph = build(program, args, dtypes, emission.classifier, names, in_rule=in_rule, force=True)
        warn_of_unread_products(graph, emission.classifier)
        inner = Emission(decide_program(graph), emission.classifier, emission.programs)
        return inner.results(program, args, dtypes)


def _batched_operands(repeat: _Repeat, mapped: Sequence[Array], node: Node) -> Sequence[Array]:
    """Return operands over which a ``jax.vmap`` maps, or may map later.

    ``mapped`` are the operands over which a ``jax.vmap`` maps now. If it is empty and ``node`` is a weight, return an
    activation over which a later ``jax.vmap`` may map.
    """
    step, operands = repeat
    if WITH_RULE in step.names:  # operands may be tangents, and primal values must not depend on tangents
        return ()
    if mapped or node.is_cast_once:
        return mapped
    pairs = zip(operands, step.operands, strict=True)
    return [value for value, operand in pairs if operand and operand.is_cast_once and is_staged(value)][:1]


def _result_of_equal_step(emission: Emission, step: Step, same: Same, make: Callable[[], BodyFunction]) -> BodyFunction:
    """Return the rewritten program of an equal earlier step, or else ``make()``."""
    if emission.programs is None:
        return make()
    # derivative rules are decided later, under these names
    names = step.names if emission.classifier.matcher.paths else ours(step.names)
    decisions = emission.decisions.key_of(step)
    # a float8 product computes its scale in another way where shards may skip it
    key = (step.eqn.primitive.name, *step.eqn.params.values(), names, decisions, may_be_skipped(), same)
    program = emission.programs.get(key) or make()
    remember(emission.programs, key, program)
    return program
