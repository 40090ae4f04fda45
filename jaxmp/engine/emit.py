"""Writing the decided program again: every equation bound once more, in its dtypes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp._jaxpr.rebuild import Rule, bound, linear_solve, params_in_dtype, rebuilt
from jaxmp._jaxpr.repeated import cast_repeated
from jaxmp._jaxpr.walk import PRODUCTS
from jaxmp.engine.classes import Kind, is_castable
from jaxmp.engine.decide import decide, read_in
from jaxmp.engine.graph import Body, Graph, Node, Step, build, walk
from jaxmp.engine.marks import OF_POLICY, marks_in
from jaxmp.engine.rules import BROADCAST, Rules
from jaxmp.engine.trace import tracing

# Without jit, loops are compiled as one, and found compiled by the next call.
_LOOPS = frozenset({"scan", "while", "cond", "shard_map"})
_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_CAST = "convert_element_type"
_MAX_PROGRAMS = 256


def evaluated(
    graph: Graph,
    rules: Rules,
    args: Sequence[Any],
    dtypes: Sequence[Any],
    force: bool = False,
    notes: dict[Step | Body, Note] | None = None,
) -> list[Any]:
    """The results of a program as the engine decides.

    Args:
      graph: the program as its author wrote it.
      rules: what is asked of its operations.
      args: its arguments, which may have other dtypes than those it was traced with.
      dtypes: those that its results shall have; None for as they come.
      force: decide although it has no product.
      notes: gets what is emitted for each step, and for the results of bodies.
    """
    for node, value in zip(graph.sources, args, strict=True):
        if node is not None:
            node.dtype = np.dtype(jax.typeof(value).dtype)
    decide(graph, dtypes, force)
    emission, body = _Emission(rules, notes), graph.body
    results = emission.evaluate(body, args) if graph.changes else reading.evaluate(body.jaxpr, body.consts, args)
    note = emission.note(body)
    return [
        value if dtype is None or not is_castable(jax.typeof(value)) else note.cast(note.rounded(value, node), dtype)
        for value, node, dtype in zip(results, body.results, dtypes, strict=True)
    ]


@dataclasses.dataclass(slots=True)
class Note:
    """What is emitted for a step, or for the results of a body, besides what its author wrote."""

    operands: list[Any] = dataclasses.field(default_factory=list)  # what an equation is bound with; later their types
    casts: list[int] = dataclasses.field(default_factory=list)  # of each cast the bytes that it writes

    def cast(self, value: Any, dtype: np.dtype) -> Any:
        """``value`` in ``dtype``; itself if it has it."""
        if not isinstance(value, jax.Array):
            return np.asarray(value).astype(dtype)
        if value.dtype == dtype:
            return value
        self.casts.append(value.size * dtype.itemsize)
        return jax.lax.convert_element_type(value, dtype)

    def rounded(self, value: Any, node: Node | None) -> Any:
        """``value`` with the cast of its author that was put off."""
        return value if node is None or node.late is None else self.cast(value, node.late)

    def repeat(self, value: Any, dtype: np.dtype, step: Step, like: Any) -> Any:
        """``value`` in ``dtype``, as JAX would repeat it by itself, and for each example of what it meets."""
        shape = step.eqn.outvars[0].aval.shape
        if (value.shape == shape and like is None) or reading.has_explicit_axes(value):
            return self.cast(value, dtype)
        self.casts.append(value.size * dtype.itemsize)
        return cast_repeated(value, dtype, shape, like, step.node is not None and _is_normalised(step.node))


def _met(step: Step, operands: Sequence[Any]) -> Any:
    """What a weight among ``operands`` meets of which there is, or may come to be, one for each example."""
    if (batched := next(filter(reading.is_batched, operands), None)) is not None:
        return batched
    nodes = zip(operands, step.operands, strict=True)
    return next((value for value, node in nodes if node and node.is_cast_once and reading.is_staged(value)), None)


class _Values:
    """The values of one body while it is evaluated, and the casts of them that there are."""

    def __init__(self, body: Body, args: Sequence[Any]) -> None:
        self.env: dict[Any, Any] = dict(zip(body.jaxpr.invars, args, strict=True))
        self.env.update(zip(body.jaxpr.constvars, body.consts, strict=True))
        self.note = Note()  # of the step at hand
        self.shared: dict[Any, Any] = {}
        # Of what the author widened what was half, and its node: who wants half reads that.
        self.narrow: dict[Any, tuple[Any, Any]] = {}

    def read(self, atom: Any) -> Any:
        """The value as it is."""
        return atom.val if reading.is_literal(atom) else self.env[atom]

    def read_as(self, atom: Any, node: Node, dtype: np.dtype, repeat: tuple[Step, Any] | None = None) -> Any:
        """The value in ``dtype``, for an operation that may repeat it.

        Args:
          atom: the variable or literal.
          node: its node.
          dtype: the dtype that is wanted.
          repeat: the step of the operation and another operand of it; None if it repeats nothing.
        """
        value = self.read(atom)
        if reading.is_literal(atom):
            return self.note.cast(value, dtype)
        if atom in self.narrow and self.narrow[atom][1].value_dtype == dtype:
            return self.read_as(*self.narrow[atom], dtype, repeat)
        # A weight is cast at each use, so that its cotangents are summed in float32; an activation or a constant once.
        # What is widened is so at each use: XLA stores what several kernels share, and that shall be the half value.
        is_shared = node.is_cast_once and dtype.itemsize <= node.value_dtype.itemsize
        if is_shared or isinstance(value, np.ndarray):
            if (atom, dtype) not in self.shared:
                self.shared[atom, dtype] = self.note.cast(self.note.rounded(value, node), dtype)
            return self.shared[atom, dtype]
        if repeat is not None and dtype.itemsize < value.dtype.itemsize and node.late in (None, dtype):
            return self.note.repeat(value, dtype, *repeat)
        return self.note.cast(self.note.rounded(value, node), dtype)


class _Emission:
    """The writing of one program."""

    def __init__(self, rules: Rules, notes: dict[Step | Body, Note] | None = None) -> None:
        self.rules, self.notes = rules, notes

    def note(self, place: Step | Body) -> Note:
        """A new note. JAX may trace a body again: the last time counts."""
        note = Note()
        if self.notes is not None:
            self.notes[place] = note
        return note

    def evaluate(self, body: Body, args: Sequence[Any]) -> list[Any]:
        """The results of a body, each in the dtype of its node."""
        values = _Values(body, args)
        for step in body.steps:
            values.note = self.note(step)
            with reading.in_place_of(step.eqn):
                results = self.results(step, values)
            values.env.update(zip(step.eqn.outvars, results, strict=True))
            if _is_widening(step):
                values.narrow[step.eqn.outvars[0]] = step.eqn.invars[0], step.operands[0]
            if self.notes is not None:  # values die with their trace
                values.note.operands = [jax.typeof(value) for value in values.note.operands]
        return [values.read(atom) for atom in body.jaxpr.outvars]

    def results(self, step: Step, values: _Values) -> Sequence[Any]:
        eqn, node, note = step.eqn, step.node, values.note
        note.operands = [values.read(atom) for atom in eqn.invars]
        if _stands(step):
            return bound(eqn, note.operands, eqn.params)
        repeat = None
        if eqn.primitive.name in BROADCAST:
            repeat = step, _met(step, note.operands)
        wanted = zip(note.operands, eqn.invars, step.operands, _wants(step), strict=True)
        operands = [
            value if dtype is None or operand is None else values.read_as(atom, operand, dtype, repeat)
            for value, atom, operand, dtype in wanted
        ]
        if _is_widening(step) and node is not None:
            note.operands, operands = operands, [note.cast(operands[0], node.dtype)]
        if eqn.primitive.name == _CAST and node is not None and node.kind is not Kind.KEPT:
            if eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype:
                del note.casts[-1:]  # which is the author's
            return operands
        note.operands = operands
        if step.bodies is not None:
            return self.with_bodies(step, step.bodies, operands)
        params = eqn.params
        if node is not None and node.compute is not None:
            if eqn.primitive.name == "custom_linear_solve" and node.compute != node.written:
                return linear_solve(eqn, functools.partial(self.derived, step), operands)
            is_exact = node.asked != "tensorfloat32" and step.region.asked_by != OF_POLICY
            params = params_in_dtype(eqn, node.compute, is_exact)
        if reading.asks_for_what_is_missing(params):
            params = {**params, "precision": None}
        results = bound(eqn, operands, params)
        return results if node is None or node.compute in (None, node.dtype) else [note.cast(results[0], node.dtype)]

    def with_bodies(self, step: Step, bodies: reading.Bodies, operands: Sequence[Any]) -> Sequence[Any]:
        eqn, name = step.eqn, step.eqn.primitive.name
        functions = [functools.partial(self.run, body, step, position) for position, body in enumerate(step.inner)]

        def program() -> Callable[..., list[Any]]:
            rule = Rule(
                functools.partial(self.derived, step), functools.partial(tracing, self.rules, step.region.products)
            )
            return rebuilt(eqn, bodies, functions, rule)

        if name == "jit":  # layers that share a jitted body share its program
            return self.shared(step, program)(*operands)
        if name in _LOOPS and not reading.is_tracing():
            return self.shared(step, lambda: jax.jit(program()))(*operands)
        return program()(*operands)

    def derived(self, step: Step, jaxpr: reading.Opened, args: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
        """A derivative rule, or a part of a solver; its operands come, and its results go, in those dtypes."""
        graph = build(*jaxpr, self.rules, step.names, in_rule=step.eqn.primitive.name == "custom_vjp_call")
        return evaluated(graph, self.rules, args, dtypes, force=True)

    def shared(self, step: Step, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """What was made of an equal step before, else what ``make`` makes."""
        if self.notes is not None:  # each step gets its own
            return make()
        programs, key = self.rules.programs, _signature(step, self.rules)
        made = programs.get(key) or make()
        if len(programs) >= _MAX_PROGRAMS:  # each holds the constants of its program
            programs.clear()
        programs[key] = made
        return made

    def run(self, body: Body, step: Step, position: int, *args: Any) -> list[Any]:
        """The results of a body of ``step``; those that go into joins in the dtypes of these."""
        results = self.evaluate(body, args)
        assert step.bodies is not None
        kind, note = step.bodies.kind, self.note(body)
        if kind != "call" or step.eqn.primitive.name in _WITH_RULES:
            results = [note.rounded(value, node) for value, node in zip(results, body.results, strict=True)]
        if kind == "while" and position == 0:  # the condition
            return results
        for number, join in enumerate(step.joins):
            if join is not None:
                results[number] = note.cast(results[number], join.dtype)
        return results


def _is_normalised(node: Node) -> bool:
    """Whether a weight is added to each row before the next product, as at the end of a normalisation."""
    size = math.prod(node.shape)

    def readers(node: Node) -> list[Node]:
        return [user for user in node.users if user.name not in PRODUCTS]

    def as_large(node: Node) -> list[Node]:
        return [user for user in readers(node) if user.kind is Kind.CLEAR or math.prod(user.shape) == size]

    adds = (user for passed in walk([node], as_large) for user in readers(passed) if user.name == "add")
    weights = (other for add in adds for other in add.inputs if not other.is_cast_once and other.const is None)
    return any(math.prod(weight.shape) < size for weight in weights)


def _stands(step: Step) -> bool:
    """Whether an equation is bound as it stands, its bodies with it: nothing in it changes."""
    if step.stands is None:
        known = [node for node in (*step.operands, *step.nodes) if node is not None]
        has_rules = step.eqn.primitive.name in _WITH_RULES and step.region.level != "written"  # decided when they run
        is_changed = any(node.late is not None or node.dtype != node.written for node in known)
        if is_changed or reading.asks_for_what_is_missing(step.eqn.params) or (step.bodies is not None and has_rules):
            step.stands = False
        elif step.bodies is not None:
            step.stands = all(_stands(inner) for body in step.inner for inner in body.steps)
        else:
            wanted = zip(step.operands, _wants(step), strict=True)
            is_computed = step.node is not None and step.node.compute is not None
            step.stands = not is_computed and all(op is None or dtype in (None, op.dtype) for op, dtype in wanted)
    return step.stands


def _is_widening(step: Step) -> bool:
    """Whether an equation is a cast to float32 of what is half now."""
    node, operand = step.node, step.operands[0] if step.eqn.primitive.name == _CAST else None
    return node is not None and operand is not None and operand.value_dtype.itemsize < node.dtype.itemsize


def _wants(step: Step) -> list[np.dtype | None]:
    """The dtypes that an equation reads its operands in; None for those that it takes as they are."""
    if step.wants is None:
        step.wants = _wants_of_bodies(step, step.bodies) if step.bodies is not None else _wants_of_leaf(step)
    return step.wants


def _wants_of_leaf(step: Step) -> list[np.dtype | None]:
    name, node, operands = step.eqn.primitive.name, step.node, step.operands
    if node is None and name in _COMPARISONS:
        # The derivative of a maximum asks which operand it is: rounded as it is, the operand still equals it.
        largest = [one for one in operands if one and one.name in ("max", "min") and {*one.inputs} & {*operands}]
        largest = largest if name in ("eq", "ne") else []
        dtypes = {operand.value_dtype for operand in largest or operands if operand and operand.const != (0.0, 0.0)}
        if len(dtypes) == 1 and (largest or dtypes != {np.dtype(np.float32)}):
            return [None if operand is None else next(iter(dtypes)) for operand in operands]
    if node is None:
        return [None if operand is None else operand.written for operand in operands]
    if name == _CAST and (node.kind is Kind.KEPT or _is_widening(step)):  # from whatever dtype the value has
        return [None if operand is None else operand.late for operand in operands]
    return [None if operand is None else read_in(node, operand) for operand in operands]


def _wants_of_bodies(step: Step, bodies: reading.Bodies) -> list[np.dtype | None]:
    wants: list[np.dtype | None] = [None] * len(step.operands)
    if bodies.kind in ("scan", "while"):
        wants[bodies.start : bodies.start + bodies.carry] = [join.dtype if join else None for join in step.joins]
    elif bodies.kind == "call":
        for position, operand in enumerate(step.operands):
            if operand is not None and operand.is_cast_once:  # then the call saves no float32 copy of it
                wants[position] = _half_wanted(step.inner[0], position)
            if operand is not None and step.eqn.primitive.name in _WITH_RULES:  # traced on what the author wrote
                wants[position] = wants[position] or operand.late
    return wants


def _half_wanted(body: Body, position: int) -> np.dtype | None:
    """The half dtype that all who read an operand of a body want; None if there is none."""
    if body.wanted is None:
        body.wanted = {}
        for step in body.steps:
            # What its author casts to half is half before as well.
            wants = [step.node.dtype] if step.eqn.primitive.name == _CAST and step.node else _wants(step)
            for atom, dtype in zip(step.eqn.invars, wants, strict=True):
                if not reading.is_literal(atom):
                    body.wanted.setdefault(atom, set()).add(dtype)
    var = body.jaxpr.invars[position]
    dtypes = body.wanted.get(var, set()) if var not in body.jaxpr.outvars else set()
    return next((dtype for dtype in dtypes if len(dtypes) == 1 and dtype and dtype.itemsize == 2), None)


def _signature(step: Step, rules: Rules) -> Any:
    """What the program of a step depends on, besides the dtypes of its operands."""
    # Derivative rules are decided later, where these scopes have a say.
    names = step.names if rules.paths else marks_in(step.names)
    return (step.eqn.primitive.name, *step.eqn.params.values(), names, _decisions(step))


def _decisions(step: Step) -> Any:
    own = tuple((node.compute, node.dtype, node.late) for node in step.nodes if node is not None)
    shared = tuple(operand is not None and (operand.is_cast_once, operand.late) for operand in step.operands)
    # What is wanted of comparisons depends on constants too.
    return (own, shared, tuple(_wants(step)), tuple(tuple(map(_decisions, body.steps)) for body in step.inner))
