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
from jaxmp._jaxpr.rebuild import Rule, rebuilt
from jaxmp._jaxpr.repeated import cast_repeated
from jaxmp._jaxpr.walk import PRODUCTS
from jaxmp.engine.classes import Kind, is_castable
from jaxmp.engine.decide import decide, is_shared, is_widening, operand_dtypes
from jaxmp.engine.graph import Body, Graph, Node, Step, build
from jaxmp.engine.marks import OF_POLICY, marks_in
from jaxmp.engine.rules import BROADCAST, Rules, asks_for_highest
from jaxmp.engine.trace import tracing

# Without jit, loops are compiled as one, and found compiled by the next call.
_LOOPS = frozenset({"scan", "while", "cond", "shard_map"})
_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
_MAX_PROGRAMS = 256


def coloured(
    jaxpr: tuple[Any, list[Any]],
    rules: Rules,
    names: reading.Names,
    args: Sequence[Any],
    dtypes: Sequence[Any],
    force: bool = False,
    in_rule: bool = False,
) -> list[Any]:
    """Evaluates an open jaxpr with its constants as the engine decides.

    Args:
      jaxpr: the program as its author wrote it.
      rules: what is asked of its operations.
      names: the scopes around it.
      args: its arguments, which may have other dtypes than those it was traced with.
      dtypes: those that its results shall have; None for as they come.
      force: decide although it has no product.
      in_rule: it is a rule of custom_vjp.
    """
    graph = build(*jaxpr, rules, names, in_rule)
    for node, value in zip(graph.sources, args, strict=True):
        if node is not None:
            node.dtype = np.dtype(jax.typeof(value).dtype)
    changed = decide(graph, dtypes, force)
    return emitted(graph, rules, args, dtypes, changed)


def emitted(
    graph: Graph,
    rules: Rules,
    args: Sequence[Any],
    dtypes: Sequence[Any],
    changed: bool,
    notes: dict[Step | Body, Note] | None = None,
) -> list[Any]:
    """The results of a decided graph; ``notes`` gets what is emitted for each step, and for the results of bodies."""
    emission, body = _Emission(rules, notes), graph.body
    results = emission.evaluate(body, args) if changed else reading.evaluate(body.jaxpr, body.consts, args)
    note = emission.note(body)
    return [
        value if dtype is None or not is_castable(jax.typeof(value)) else note.cast(note.rounded(value, node), dtype)
        for value, node, dtype in zip(results, body.results, dtypes, strict=True)
    ]


@dataclasses.dataclass(slots=True)
class Note:
    """What is emitted for a step, or for the results of a body, besides what its author wrote.

    Attributes:
      operands: what the equation of a step is bound with; afterwards the types of that.
      casts: of each cast the bytes that it writes.
    """

    operands: list[Any] = dataclasses.field(default_factory=list)
    casts: list[int] = dataclasses.field(default_factory=list)

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
        """``value`` in ``dtype``, as JAX would repeat it by itself, and for each example where ``like`` is batched."""
        shape = step.eqn.outvars[0].aval.shape
        if (value.shape == shape and not reading.is_batched(like)) or reading.has_explicit_axes(value):
            return self.cast(value, dtype)
        self.casts.append(value.size * dtype.itemsize)
        return cast_repeated(value, dtype, shape, like, step.node is not None and _is_normalised(step.node))


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
        if isinstance(value, np.ndarray) or is_shared(node, node.value_dtype, dtype):
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
            if is_widening(step):
                values.narrow[step.eqn.outvars[0]] = step.eqn.invars[0], step.operands[0]
            if self.notes is not None:  # values die with their trace
                values.note.operands = [jax.typeof(value) for value in values.note.operands]
        return [values.read(atom) for atom in body.jaxpr.outvars]

    def results(self, step: Step, values: _Values) -> Sequence[Any]:
        eqn, node, note = step.eqn, step.node, values.note
        note.operands = [values.read(atom) for atom in eqn.invars]
        if _stands(step):
            return _bound(eqn, note.operands, eqn.params)
        if step.bodies is not None:
            return self.with_bodies(step, values)
        cast = node if eqn.primitive.name == "convert_element_type" else None
        if cast is not None and (cast.kind is Kind.KEPT or is_widening(step)):  # from whatever dtype the value has
            note.operands = [note.rounded(note.operands[0], step.operands[0])]
            if cast.kind is Kind.KEPT:
                return _bound(eqn, note.operands, eqn.params)
            operands = [note.cast(note.operands[0], cast.dtype)]
        else:
            repeat = None
            if eqn.primitive.name in BROADCAST:
                repeat = step, next(filter(reading.is_batched, note.operands), None)
            operands = [
                values.read(atom) if dtype is None or operand is None else values.read_as(atom, operand, dtype, repeat)
                for atom, operand, dtype in zip(eqn.invars, step.operands, operand_dtypes(step), strict=True)
            ]
        if cast is not None:
            if eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype:
                del note.casts[-1:]  # which is the author's
            return operands
        note.operands = operands
        params = eqn.params if node is None or node.compute is None else _in_dtype(step, node.compute)
        if _is_missing(params):
            params = {**params, "precision": None}
        results = _bound(eqn, operands, params)
        return (
            [note.cast(results[0], node.dtype)]
            if node is not None and node.compute not in (None, node.dtype)
            else results
        )

    def with_bodies(self, step: Step, values: _Values) -> Sequence[Any]:
        eqn, bodies, name = step.eqn, step.bodies, step.eqn.primitive.name
        assert bodies is not None
        note, operands = values.note, values.note.operands
        if bodies.kind in ("scan", "while"):
            for position, join in enumerate(step.joins, bodies.start):
                if join is not None:
                    value = note.rounded(operands[position], step.operands[position])
                    operands[position] = note.cast(value, join.dtype)
        elif bodies.kind == "call":
            for position, (atom, operand) in enumerate(zip(eqn.invars, step.operands, strict=True)):
                dtype = read_in(step.inner[0], position) if operand is not None and operand.is_cast_once else None
                if operand is not None and dtype is not None:
                    operands[position] = values.read_as(atom, operand, dtype)
                elif name in _WITH_RULES:  # which are traced on the dtypes that the author wrote
                    operands[position] = note.rounded(operands[position], operand)
        functions = [functools.partial(self.run, body, step, position) for position, body in enumerate(step.inner)]
        evaluate = functools.partial(self.rule, step.names, name == "custom_vjp_call")
        rule = Rule(evaluate, functools.partial(tracing, self.rules, step.region.products))

        def program() -> Callable[..., list[Any]]:
            return rebuilt(eqn, bodies, functions, rule)

        if name == "jit":  # layers that share a jitted body share its program
            return self.shared(step, program)(*operands)
        if name in _LOOPS and not reading.is_tracing():
            return self.shared(step, lambda: jax.jit(program()))(*operands)
        return program()(*operands)

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

    def rule(
        self, names: reading.Names, in_rule: bool, jaxpr: Any, args: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """A derivative rule; its operands come, and its results go, in the dtypes of the function's."""
        return coloured(jaxpr, self.rules, names, args, dtypes, force=True, in_rule=in_rule)


def _is_normalised(node: Node) -> bool:
    """Whether a weight is added to each row before the next product, as at the end of a normalisation."""
    stack, seen, size = [node], {node}, math.prod(node.shape)
    while stack:
        for user in stack.pop().users:
            if user in seen or user.name in PRODUCTS:
                continue
            weights = [other for other in user.inputs if not other.is_cast_once and other.const is None]
            if user.name == "add" and any(math.prod(weight.shape) < size for weight in weights):
                return True
            if user.kind is Kind.CLEAR or math.prod(user.shape) == size:
                seen.add(user)
                stack.append(user)
    return False


def _bound(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _stands(step: Step) -> bool:
    """Whether an equation is bound as it stands, its bodies with it: nothing in it changes."""
    if step.stands is None:
        step.stands = _is_unchanged(step)
    return step.stands


def _is_unchanged(step: Step) -> bool:
    name, node = step.eqn.primitive.name, step.node
    known = [operand for operand in (*step.operands, *step.nodes) if operand is not None]
    if any(operand.late is not None or operand.dtype != operand.written for operand in known):
        return False
    if _is_missing(step.eqn.params):
        return False
    if step.bodies is not None:
        if name in _WITH_RULES and step.region.level != "written":
            return False  # its rules are decided when they run
        return all(map(_stands, (inner for body in step.inner for inner in body.steps)))
    if node is None or node.compute is None:
        return all(
            dtype is None or operand is None or dtype == operand.dtype
            for operand, dtype in zip(step.operands, operand_dtypes(step), strict=True)
        )
    return False


def _is_missing(params: dict[str, Any]) -> bool:
    """Whether a product asks for an algorithm that the backend lacks.

    JAX's attention tries it, and goes on without when that raises an error: while it is traced none is raised.
    """
    return params.get("precision") is jax.lax.DotAlgorithmPreset.F16_F16_F32 and jax.default_backend() == "cpu"


def _in_dtype(step: Step, dtype: np.dtype) -> dict[str, Any]:
    params, is_cheap = dict(step.eqn.params), step.node is not None and step.node.asked == "tensorfloat32"
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = reading.in_dtype_of_scatter(params["update_jaxpr"], dtype)
    if step.eqn.primitive.name in PRODUCTS:
        # A precision or an algorithm (jax.lax.DotAlgorithmPreset) goes with the dtypes that it was chosen for.
        if dtype != np.float32:
            params["precision"] = None
        elif not (is_cheap or step.region.asked_by == OF_POLICY or asks_for_highest(params["precision"])):
            params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return params


def _signature(step: Step, rules: Rules) -> Any:
    """What the program of a step depends on, besides the dtypes of its operands."""
    assert step.bodies is not None
    params = tuple((name, value if _is_hashable(value) else id(value)) for name, value in step.eqn.params.items())
    # Derivative rules are decided later, where these scopes have a say.
    names = step.names if rules.paths else marks_in(step.names)
    return (step.eqn.primitive.name, params, step.bodies.jaxprs, names, _decisions(step))


def _decisions(step: Step) -> Any:
    own = tuple((node.compute, node.dtype, node.late) for node in step.nodes if node is not None)
    shared = tuple(operand is not None and (operand.is_cast_once, operand.late) for operand in step.operands)
    casts = None if step.inner else tuple(operand_dtypes(step))  # of comparisons they depend on constants too
    return (own, shared, casts, tuple(tuple(map(_decisions, body.steps)) for body in step.inner))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def read_in(body: Body, position: int) -> np.dtype | None:
    """The half dtype that all who read an operand of a call want: then the call saves no float32 copy of it."""
    var = body.jaxpr.invars[position]
    if body.readers is None:
        body.readers = {}
        for step in body.steps:
            for n, atom in enumerate(step.eqn.invars):
                if not reading.is_literal(atom):
                    body.readers.setdefault(atom, []).append((step, n))
    dtypes = {_wanted_by(step, n) for step, n in body.readers.get(var, [])}
    dtype = dtypes.pop() if len(dtypes) == 1 and var not in body.jaxpr.outvars else None
    return dtype if dtype is not None and dtype.itemsize == 2 else None


def _wanted_by(step: Step, position: int) -> np.dtype | None:
    if step.eqn.primitive.name == "convert_element_type" and step.node is not None:
        return step.node.dtype  # what its author casts to half is half before as well
    if step.bodies is None:
        return operand_dtypes(step)[position]
    if step.bodies.kind == "call":
        return read_in(step.inner[0], position)
    carried = position - step.bodies.start
    join = step.joins[carried] if step.bodies.carry > carried >= 0 else None
    return None if join is None else join.dtype
