"""Writing the coloured program again: every equation bound once more, in its dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp._jaxpr.rebuild import Rule, rebuilt
from jaxmp.engine.classes import Class, primitives_of
from jaxmp.engine.decide import Colour, computed_in, decide, is_shared, is_widening, operand_dtypes
from jaxmp.engine.graph import Body, Node, Step, build
from jaxmp.engine.kinds import Kind, is_real
from jaxmp.engine.marks import regions_in
from jaxmp.engine.rules import Rules, asks_for_highest
from jaxmp.engine.trace import tracing

_PRODUCTS = primitives_of(Class.HALF)
# Without jit, loops are compiled as one, and found compiled by the next call.
_LOOPS = frozenset({"scan", "while", "cond", "shard_map"})
_MAX_PROGRAMS = 256


def evaluate(body: Body, rules: Rules, args: Sequence[Any]) -> list[Any]:
    """The results of a coloured body, each in the dtype of its node."""
    env: dict[Any, Any] = dict(zip(body.jaxpr.invars, args, strict=True))
    env.update(zip(body.jaxpr.constvars, body.consts, strict=True))
    shared: dict[Any, Any] = {}
    narrow: dict[Any, Any] = {}  # of what the author widened, the half value: who wants half reads that

    def read(atom: Any) -> Any:
        return atom.val if reading.is_literal(atom) else env[atom]

    def read_as(atom: Any, node: Node | None, dtype: np.dtype) -> Any:
        value = read(atom)
        if not reading.is_literal(atom) and atom in narrow and narrow[atom].dtype == dtype:
            return narrow[atom]
        # A weight is cast at each use, so that its cotangents are summed in float32; an activation or a constant once.
        # What is widened is so at each use: XLA stores what several kernels share, and that shall be the half value.
        if reading.is_literal(atom) or not (isinstance(value, np.ndarray) or is_shared(node, value.dtype, dtype)):
            return cast(value, dtype)
        if (atom, dtype) not in shared:
            shared[atom, dtype] = cast(value, dtype)
        return shared[atom, dtype]

    for step in body.steps:
        with reading.in_place_of(step.eqn):
            results = _results(step, rules, read, read_as)
        env.update(zip(step.eqn.outvars, results, strict=True))
        if is_widening(step):
            narrow[step.eqn.outvars[0]] = read(step.eqn.invars[0])
    return [read(atom) for atom in body.jaxpr.outvars]


def cast(value: Any, dtype: np.dtype) -> Any:
    """``value`` in ``dtype``; itself if it has it."""
    if isinstance(value, jax.Array):
        return value if value.dtype == dtype else jax.lax.convert_element_type(value, dtype)
    return np.asarray(value).astype(dtype)


def _results(step: Step, rules: Rules, read: Any, read_as: Any) -> Sequence[Any]:
    eqn = step.eqn
    if step.bodies is not None:
        return _with_bodies(step, rules, [read(atom) for atom in eqn.invars], read_as)
    operands = [
        read(atom) if dtype is None else read_as(atom, operand, dtype)
        for atom, operand, dtype in zip(eqn.invars, step.operands, operand_dtypes(step), strict=True)
    ]
    node = step.node
    if eqn.primitive.name == "convert_element_type" and node is not None:
        if step.kind is not Kind.KEPT:
            return operands[:1]
        operands = [read(eqn.invars[0])]  # the author's cast, from whatever dtype the value has
    params = eqn.params if node is None or node.colour <= Colour.WRITTEN else _in_dtype(eqn, computed_in(node))
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    results = list(out) if eqn.primitive.multiple_results else [out]
    return [cast(results[0], node.dtype)] if node is not None and node.colour == Colour.ROUND else results


def _in_dtype(eqn: Any, dtype: np.dtype) -> dict[str, Any]:
    params = dict(eqn.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = reading.in_dtype_of_scatter(params["update_jaxpr"], dtype)
    if eqn.primitive.name in _PRODUCTS:
        # A precision or an algorithm (jax.lax.DotAlgorithmPreset) goes with the dtypes that it was chosen for.
        if dtype != np.float32:
            params["precision"] = None
        elif not asks_for_highest(params["precision"]):
            params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return params


def _with_bodies(step: Step, rules: Rules, operands: list[Any], read_as: Any) -> Sequence[Any]:
    eqn, bodies = step.eqn, step.bodies
    assert bodies is not None
    if bodies.kind in ("scan", "while"):
        start = bodies.consts + bodies.body_consts
        for position, join in enumerate(step.joins, start):
            if join is not None:
                operands[position] = cast(operands[position], join.dtype)
    if bodies.kind == "call":
        for position, (atom, operand) in enumerate(zip(eqn.invars, step.operands, strict=True)):
            dtype = read_in(step.inner[0], position) if operand is not None and operand.is_cast_once else None
            if dtype is not None:
                operands[position] = read_as(atom, operand, dtype)
    functions = [functools.partial(_run, body, rules, _joins_of(step, n)) for n, body in enumerate(step.inner)]
    rule = Rule(functools.partial(_evaluate_rule, rules, step.names), functools.partial(tracing, rules.key))

    def program() -> Callable[..., list[Any]]:
        return rebuilt(eqn, bodies, functions, rule)

    name = eqn.primitive.name
    if name == "jit":  # layers that share a jitted body share its program
        return _shared(step, rules, program)(*operands)
    if name in _LOOPS and not reading.is_tracing():
        return _shared(step, rules, lambda: jax.jit(program()))(*operands)
    return program()(*operands)


def _shared(step: Step, rules: Rules, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What was made of an equal step before, else what ``make`` makes."""
    key = _signature(step, rules)
    made = rules.programs.get(key) or make()
    if len(rules.programs) >= _MAX_PROGRAMS:  # each holds the constants of its program
        rules.programs.clear()
    rules.programs[key] = made
    return made


def _joins_of(step: Step, position: int) -> list[Node | None]:
    """The joins that the first results of a body go into."""
    is_condition = step.bodies is not None and step.bodies.kind == "while" and position == 0
    return [] if is_condition else step.joins


def _run(body: Body, rules: Rules, joins: Sequence[Node | None], *args: Any) -> list[Any]:
    results = evaluate(body, rules, args)
    for position, join in enumerate(joins):
        if join is not None:
            results[position] = cast(results[position], join.dtype)
    return results


def _evaluate_rule(
    rules: Rules, names: reading.Names, jaxpr: tuple[Any, list[Any]], args: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """A derivative rule under autocast; its operands come, and its results go, in the dtypes of the function's."""
    return coloured(jaxpr, rules, names, args, dtypes, force=True)


def coloured(
    jaxpr: tuple[Any, list[Any]],
    rules: Rules,
    names: reading.Names,
    args: Sequence[Any],
    dtypes: Sequence[Any],
    force: bool = False,
) -> list[Any]:
    """Evaluates an open jaxpr with its constants under autocast, its results in ``dtypes`` (None: as they come)."""
    graph = build(*jaxpr, rules, names)
    for node, value in zip(graph.sources, args, strict=True):
        if node is not None:
            node.dtype = np.dtype(jax.typeof(value).dtype)
    wanted = [
        node
        for node, dtype in zip(graph.body.results, dtypes, strict=True)
        if node is not None and dtype is not None and np.dtype(dtype).itemsize == 2
    ]
    changed = decide(graph, rules.half, wanted, force)
    results = evaluate(graph.body, rules, args) if changed else reading.evaluate(*jaxpr, args)
    return [
        value if dtype is None or not is_real(jax.typeof(value)) else cast(value, dtype)
        for value, dtype in zip(results, dtypes, strict=True)
    ]


def _signature(step: Step, rules: Rules) -> Any:
    """What the program of a step depends on, besides the dtypes of its operands."""
    assert step.bodies is not None
    params = tuple((name, value if _is_hashable(value) else id(value)) for name, value in step.eqn.params.items())
    # Derivative rules are decided later, where these scopes have a say.
    names = step.names if rules.paths else regions_in(step.names)
    return (step.eqn.primitive.name, params, step.bodies.jaxprs, names, _decisions(step))


def _decisions(step: Step) -> Any:
    own = tuple((node.colour, node.dtype) for node in (*step.nodes, *step.joins) if node is not None)
    shared = tuple(operand is not None and operand.is_cast_once for operand in step.operands)
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
    if step.bodies is None:
        return operand_dtypes(step)[position]
    if step.bodies.kind == "call":
        return read_in(step.inner[0], position)
    carried = position - step.bodies.consts - step.bodies.body_consts
    join = step.joins[carried] if step.bodies.carry > carried >= 0 else None
    return None if join is None else join.dtype
