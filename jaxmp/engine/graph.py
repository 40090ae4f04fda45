"""The graph that the engine decides on: one node for each floating value, over all nested programs at once.

A body is no border: what goes into and comes out of a ``jit``, a branch or a loop is the same node inside and outside.
Only where several values become one there is a node of its own, called ``join``: the carry of a loop (its initial value
and what the body returns) and the result of a conditional (what each branch returns).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp import _float8_products
from jaxmp._jaxpr import reading
from jaxmp._jaxpr.walk import PRODUCTS
from jaxmp.engine.classes import Kind, is_castable
from jaxmp.engine.marks import DECIDED, WITH_RULE, Region, region_of
from jaxmp.engine.rules import Rules, range_of


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A floating value and the operation that makes it."""

    kind: Kind  # what it is by itself
    name: str  # the primitive, or "source", "carry", "branches"
    written: np.dtype  # the dtype that the author wrote
    shape: tuple[int, ...]
    reason: str = ""  # why it is of this kind: a text for the plan, no more
    asked: str = ""  # the level that a region or an override asks for
    half: np.dtype | None = None  # the half dtype of the code that it stands in
    loop: int = 0  # a number for the innermost loop body that it is computed in, 0 outside of any
    in_rule: bool = False  # it is computed in a custom_vjp, whose rule is no derivative of it
    # The first node of this value, which is written again where an equal operation has equal operands.
    same: Node = dataclasses.field(init=False)
    inputs: list[Node] = dataclasses.field(default_factory=list)
    users: list[Node] = dataclasses.field(default_factory=list)
    const: tuple[float, float] | None = None  # of a constant the smallest magnitude but 0, and the largest
    has_epsilon: bool = False  # an operand is a constant below half's smallest normal number, which would vanish
    is_looked_up: bool = False  # read from a table, or made of what is: it belongs to an example, and is no weight
    float8: _float8_products.Asked | None = None  # of a product, as its step has it

    # What jaxmp.engine.decide finds out.
    after_product: bool = False  # a product, or a half argument, lies upstream
    before_product: bool = False  # a product, or a half result, lies downstream
    is_activation: bool = False  # it has an element for each element of a product, and so is no statistic of many
    has_half_copy: bool = False  # it may be computed in float32, but a product or an activation reads it in half
    is_seen: bool = False  # a float32 result, or integers and bools are made of it that tell small differences apart
    state: Kind = Kind.SOURCE  # what it brings along to those who read it: SOURCE, HALF, FULL or STRICT
    compute: np.dtype | None = None  # what it is computed in; None: as it was written, or was moved in
    dtype: np.dtype = dataclasses.field(init=False)  # that of the result
    late: np.dtype | None = None  # the half dtype of a cast by its author that each reader makes; the value is float32

    def __post_init__(self) -> None:
        self.dtype, self.same = self.written, self

    @property
    def is_cast_once(self) -> bool:
        """Whether all who want it in half share one cast. A weight is cast at each use: its cotangents are many."""
        return self.after_product or self.is_looked_up

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype that its readers see."""
        return self.late or self.dtype


_UNMARKED = Region()


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """An equation in its place: the nodes of its floating results and the bodies in it; what emit made out of it."""

    eqn: Any
    names: reading.Names
    operands: list[Node | None]
    nodes: list[Node | None]
    kind: Kind = Kind.KEPT
    reason: str = ""
    region: Region = _UNMARKED
    float8: _float8_products.Asked | None = None  # of a product in code whose policy has a recipe: true if it is float8
    bodies: reading.Bodies | None = None
    inner: list[Body] = dataclasses.field(default_factory=list)
    # Whether each operand is made of constants only: the positions of a sequence, the same for every example.
    fixed: list[bool] = dataclasses.field(default_factory=list)
    wants: list[np.dtype | None] | None = None
    stands: bool | None = None
    bound: Sequence[Any] = ()  # the types of its operands after casts; empty if it stands
    casts: list[int] = dataclasses.field(default_factory=list)  # the bytes of each cast that is added for it
    node: Node | None = None  # that of the first floating result

    @property
    def joins(self) -> list[Node | None]:
        """What has several origins: the carry of a loop, which its first results are, and the results of a cond."""
        return self.nodes[: self.bodies.carry if self.bodies.kind != "cond" else None] if self.bodies else []


@dataclasses.dataclass(slots=True, eq=False)
class Body:
    """A jaxpr in its place, with the nodes of its results."""

    jaxpr: Any
    consts: list[Any]
    steps: list[Step]
    results: list[Node | None]
    has_floats: bool
    wanted: dict[Any, set[np.dtype | None]] | None = None
    casts: list[int] = dataclasses.field(default_factory=list)  # the bytes of each cast that is added for its results


@dataclasses.dataclass(slots=True)
class Graph:
    """All nodes, each after its inputs but for the returns of loops, and the program that they belong to."""

    nodes: list[Node]
    body: Body
    sources: list[Node | None]
    groups: list[Any] = dataclasses.field(default_factory=list)  # what jaxmp.engine.groups.find recognised
    wanted: Collection[Node] = ()  # the results that are wanted in half
    changes: bool = False  # whether anything is computed in another dtype than it was written in


def walk(start: Iterable[Node], follow: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """The nodes that one comes to, each once."""
    stack = [*dict.fromkeys(start)]
    found = {*stack}
    yield from stack
    while stack:
        for node in follow(stack.pop()):
            if node not in found:
                found.add(node)
                stack.append(node)
                yield node


def build(jaxpr: Any, consts: list[Any], rules: Rules, names: reading.Names = (), in_rule: bool = False) -> Graph:
    """The graph of an open jaxpr and its constants; ``names`` are the scopes around it."""
    builder = _Builder(rules, in_rule)
    sources = [builder.value(builder.source(var.aval)) for var in jaxpr.invars]
    body, _ = builder.body(jaxpr, consts, sources, names)
    return Graph(builder.nodes, body, [value.node for value in sources])


def _tells_apart(name: str, operands: Sequence[Node]) -> bool:
    """Whether what an operation makes of floating values depends on their last digits, and is no comparison with 0."""
    is_largest = any(one.name in ("max", "min") and other in one.inputs for one in operands for other in operands)
    return name != "is_finite" and not is_largest and all(operand.const != (0.0, 0.0) for operand in operands)


class _Value(NamedTuple):
    """A value while the graph is built; equal operations make of equal values those of an equal ``number``."""

    node: Node | None
    number: Any
    is_fixed: bool = False


class _Builder:
    def __init__(self, rules: Rules, in_rule: bool) -> None:
        self.rules, self.in_rule = rules, in_rule
        self.nodes: list[Node] = []
        self.region = Region()
        self.loop, self.loops = 0, itertools.count(1)
        self.numbers: dict[Any, Any] = {}

    def value(self, node: Node | None, key: Any = None, is_fixed: bool = False) -> _Value:
        """A node, or a value without one, as that of its key; one without a key is like no other."""
        number: Any = node or object()
        try:
            same = number if key is None else self.numbers.setdefault(key, number)
        except TypeError:  # parameters that are not hashable: no other is known to be equal
            same = number
        if node is not None:
            node.same = same
        return _Value(node, same, is_fixed)

    def node(
        self, kind: Kind, name: str, aval: Any, inputs: Sequence[Node], reason: str = "", asked: str = ""
    ) -> Node | None:
        if not is_castable(aval):
            return None
        half = self.region.half or self.rules.half
        node = Node(kind, name, aval.dtype, aval.shape, reason, asked, half, self.loop, self.in_rule)
        node.inputs += inputs
        for operand in inputs:
            operand.users.append(node)
        self.nodes.append(node)
        return node

    def source(self, aval: Any, value: Any = None) -> Node | None:
        node = self.node(Kind.SOURCE, "source", aval, ())
        if node is not None and value is not None:
            node.const = reading.extremes_of(value)
        return node

    def body(
        self, jaxpr: Any, consts: list[Any], inputs: Sequence[_Value], names: reading.Names
    ) -> tuple[Body, list[_Value]]:
        env: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.value(self.source(var.aval, value), id(value), is_fixed=True)

        def read(atom: Any) -> _Value:
            if not reading.is_literal(atom):
                return env[atom]
            value = np.asarray(atom.val)
            return self.value(self.source(atom.aval, value), (value.dtype, value.tobytes()), is_fixed=True)

        steps, stack, scopes = list[Step](), None, names
        for eqn in jaxpr.eqns:
            if eqn.source_info.name_stack is not stack:  # a scope has many equations, one after the other
                stack, scopes = eqn.source_info.name_stack, (*names, *reading.names_of(eqn))
                self.region = region_of(scopes)
            step, values = self.step(eqn, [read(atom) for atom in eqn.invars], scopes)
            env.update(zip(eqn.outvars, values, strict=True))
            steps.append(step)
        results = [read(atom) for atom in jaxpr.outvars]
        has_floats = any(value.node is not None for value in env.values())
        return Body(jaxpr, consts, steps, [value.node for value in results], has_floats), results

    def step(self, eqn: Any, values: Sequence[_Value], names: reading.Names) -> tuple[Step, list[_Value]]:
        bodies = None if DECIDED in names else reading.bodies_of(eqn)
        fixed = [value.is_fixed for value in values]
        step = Step(eqn, names, [value.node for value in values], [], region=self.region, bodies=bodies, fixed=fixed)
        if bodies is None:
            results = self.leaf(step, values)
        else:
            enter = {"call": self.enter_call, "cond": self.enter_cond}.get(bodies.kind, self.enter_loop)
            results = enter(step, bodies, values)
            if not any(body.has_floats for body in step.inner):
                step.bodies, step.reason = None, "no floating value inside"  # masks and indices: bound as it is
        step.nodes = [value.node for value in results]
        step.node = next(filter(None, step.nodes), None)
        return step, [value._replace(is_fixed=True) for value in results] if all(fixed) else results

    def inner(self, step: Step, jaxpr: Any, values: Sequence[_Value]) -> list[_Value]:
        names = (*step.names, WITH_RULE) if step.eqn.primitive.name.startswith("custom_") else step.names
        body, results = self.body(*reading.opened(jaxpr), values, names)
        step.inner.append(body)
        self.region = step.region
        return results

    def enter_call(self, step: Step, bodies: reading.Bodies, values: Sequence[_Value]) -> list[_Value]:
        around, self.in_rule = self.in_rule, self.in_rule or step.eqn.primitive.name == "custom_vjp_call"
        results = self.inner(step, bodies.jaxprs[0], values)
        self.in_rule = around
        return results

    def enter_loop(self, step: Step, bodies: reading.Bodies, values: Sequence[_Value]) -> list[_Value]:
        start, stop, around = bodies.start, bodies.start + bodies.carry, self.loop
        key = tuple(value.number for value in values)  # as if equal loops had equal bodies
        avals = [atom.aval for atom in step.eqn.invars[start:stop]]
        carry = [
            self.join("carry", aval, [value], (n, *key))
            for n, (aval, value) in enumerate(zip(avals, values[start:stop], strict=True))
        ]
        self.loop = next(self.loops)
        for condition in bodies.jaxprs[:-1]:
            self.inner(step, condition, [*values[: bodies.consts], *carry])
        turns = [_Value(value.node, ("turn", value.number)) for value in values[stop:]]
        results = self.inner(step, bodies.jaxprs[-1], [*values[bodies.consts : start], *carry, *turns])
        self.loop = around
        for join, value in zip(carry, results, strict=False):
            if join.node is not None and value.node is not None:
                join.node.inputs.append(value.node)
                value.node.users.append(join.node)
                self.check_range(join.node)
        key = ("turns", *(value.number for value in (*carry, *results)))
        ends = [self.value(join.node, (n, *key)) for n, join in enumerate(carry)]
        return [_Value(value.node, ("turns", value.number)) for value in (*ends, *results[bodies.carry :])]

    def enter_cond(self, step: Step, bodies: reading.Bodies, values: Sequence[_Value]) -> list[_Value]:
        columns = zip(*(self.inner(step, branch, values[1:]) for branch in bodies.jaxprs), strict=True)
        which = values[0].number
        return [
            self.join("branches", var.aval, column, (which, *(value.number for value in column)))
            for var, column in zip(step.eqn.outvars, columns, strict=True)
        ]

    def join(self, name: str, aval: Any, values: Sequence[_Value], key: Any) -> _Value:
        kind = Kind.KEPT if self.region.level == "written" else Kind.JOIN
        node = self.node(kind, name, aval, [value.node for value in values if value.node is not None])
        self.check_range(node)
        return self.value(node, (name, *key))

    def check_range(self, join: Node | None) -> None:
        """A join of a value that does not exist in half, the mask's ``finfo.min``, is float32."""
        largest = max((node.const[1] for node in (join.inputs if join else ()) if node.const), default=0.0)
        if join is not None and join.kind is Kind.JOIN and join.half and largest > range_of(join.half)[1]:
            join.kind, join.reason = Kind.STRICT, f"a constant beyond {join.half.name}'s largest number"

    def leaf(self, step: Step, values: Sequence[_Value]) -> list[_Value]:
        eqn, found = step.eqn, list[_Value]()
        name, inputs = eqn.primitive.name, [node for node in step.operands if node is not None]
        constants = [node.const for node in inputs if node.const is not None]
        step.kind, step.reason, asked, has_epsilon = self.rules.kind_of(eqn, constants, step.names)
        step.float8 = _float8_products.asked(step, self.rules) if name in PRODUCTS else None
        key = None if eqn.effects else (name, *eqn.params.values(), *[value.number for value in values])
        for position, var in enumerate(eqn.outvars):
            reads = inputs
            if step.kind is Kind.CLEAR and len(eqn.outvars) == len(eqn.invars) > 1:  # one by one: barriers, sort
                one = step.operands[position]
                reads = [] if one is None else [one]
            node = self.node(step.kind, name, var.aval, reads, step.reason, asked)
            found.append(self.value(node, key and (position, *key)))
        node = next((value.node for value in found if value.node is not None), None)
        if node is None:
            for operand in inputs if _tells_apart(name, inputs) else ():
                operand.is_seen = True
        else:
            node.has_epsilon, node.float8 = has_epsilon, step.float8
            if step.kind is Kind.CLEAR and len(inputs) == 1:
                node.const = inputs[0].const
                node.is_looked_up = name == "gather" and not step.fixed[1]
        return found
