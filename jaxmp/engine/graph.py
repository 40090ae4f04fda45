"""The graph that the engine decides on: one node for each floating value, over all nested programs at once.

A body is no border: what goes into and comes out of a ``jit``, a branch or a loop is the same node inside and outside.
Only where several values become one there is a node of its own, called ``join``: the carry of a loop (its initial value
and what the body returns) and the result of a conditional (what each branch returns).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.engine.classes import Kind, is_castable
from jaxmp.engine.marks import DECIDED, Region, region_of
from jaxmp.engine.rules import Rules, range_of


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A floating value and the operation that makes it.

    Attributes:
      kind: what it is by itself; the ``reason`` is a text for the plan, no more.
      name: the primitive, or ``"source"``, ``"carry"``, ``"branches"``.
      written: the dtype that the author wrote.
      asked: the level that a region or an override asks for, empty if none does.
      half: the half dtype of the code that it stands in.
      loop: a number for the innermost loop body that it is computed in, 0 outside of any.
      in_rule: it is computed in a custom_vjp, whose rule is no derivative of it.
      inputs, users: the nodes it reads and those that read it.
      const: of a constant the smallest magnitude but 0, and the largest.
      has_epsilon: an operand is a constant below the half dtype's smallest normal number, which would vanish.
      is_looked_up: it is read from a table, or computed from what is, and so belongs to an example: no weight.

    What :mod:`jaxmp.engine.decide` finds out:

    Attributes:
      after_product, before_product: a product (or a half argument, a half result) lies upstream, downstream.
      is_activation: it has an element for each element of a product, and so is no statistic of many.
      has_half_copy: it may be computed in float32, but a product or an activation reads it in half.
      is_seen: it is a result in float32, or what makes integers and bools of it tells small differences apart.
      state: what it brings along to those who read it: SOURCE, HALF, FULL or STRICT.
      compute: the dtype that it is computed in; None for the one that it was written with, or was moved in.
      dtype: that of the result.
      late: the half dtype that the author cast it to, where each reader makes that cast and the value is float32.
    """

    kind: Kind
    name: str
    written: np.dtype
    shape: tuple[int, ...]
    reason: str = ""
    asked: str = ""
    half: np.dtype | None = None
    loop: int = 0
    in_rule: bool = False
    inputs: list[Node] = dataclasses.field(default_factory=list)
    users: list[Node] = dataclasses.field(default_factory=list)
    const: tuple[float, float] | None = None
    has_epsilon: bool = False
    is_looked_up: bool = False
    after_product: bool = False
    before_product: bool = False
    is_activation: bool = False
    has_half_copy: bool = False
    is_seen: bool = False
    state: Kind = Kind.SOURCE
    compute: np.dtype | None = None
    dtype: np.dtype = dataclasses.field(init=False)
    late: np.dtype | None = None

    def __post_init__(self) -> None:
        self.dtype = self.written

    @property
    def is_cast_once(self) -> bool:
        """Whether all who want it in half share one cast. A weight is cast at each use: its cotangents are many."""
        return self.after_product or self.is_looked_up

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype that its readers see."""
        return self.late or self.dtype

    def read(self, node: Node) -> None:
        """Adds an input."""
        self.inputs.append(node)
        node.users.append(self)


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
    bodies: reading.Bodies | None = None
    inner: list[Body] = dataclasses.field(default_factory=list)
    fixed: list[bool] = dataclasses.field(default_factory=list)
    """Whether each operand is made of constants only: the positions of a sequence, the same for every example."""
    wants: list[np.dtype | None] | None = None
    stands: bool | None = None

    @property
    def node(self) -> Node | None:
        """The node of the first floating result."""
        return next((node for node in self.nodes if node is not None), None)

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


@dataclasses.dataclass(slots=True)
class Graph:
    """All nodes, each after its inputs but for the returns of loops, and the program that they belong to."""

    nodes: list[Node]
    body: Body
    sources: list[Node | None]
    groups: list[Any] = dataclasses.field(default_factory=list)
    """What :func:`jaxmp.engine.groups.find` recognised."""
    wanted: Collection[Node] = ()
    """The results that are wanted in half."""


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
    sources = [builder.source(var.aval) for var in jaxpr.invars]
    return Graph(builder.nodes, builder.body(jaxpr, consts, sources, names), sources)


_READ = 2**16
"""Constants of more elements are taken for weights, and not looked at: it would wait for the device."""


def _tells_apart(name: str, operands: Sequence[Node]) -> bool:
    """Whether what an operation makes of floating values depends on their last digits, and is no comparison with 0."""
    is_largest = any(one.name in ("max", "min") and other in one.inputs for one in operands for other in operands)
    return name != "is_finite" and not is_largest and all(operand.const != (0.0, 0.0) for operand in operands)


def _is_at_hand(value: Any) -> bool:
    if isinstance(value, jax.Array) and (isinstance(value, jax.core.Tracer) or not value.is_fully_addressable):
        return False
    return np.size(value) <= _READ


class _Builder:
    def __init__(self, rules: Rules, in_rule: bool) -> None:
        self.in_rule = in_rule
        self.nodes: list[Node] = []
        self.rules = rules
        self.region = Region()
        self.loop = 0
        self.loops = itertools.count(1)

    def node(
        self, kind: Kind, name: str, aval: Any, inputs: Sequence[Node], reason: str = "", asked: str = ""
    ) -> Node | None:
        if not is_castable(aval):
            return None
        half = self.region.half or self.rules.half
        node = Node(kind, name, aval.dtype, aval.shape, reason, asked, half, self.loop, self.in_rule)
        for operand in inputs:
            node.read(operand)
        self.nodes.append(node)
        return node

    def source(self, aval: Any, value: Any = None) -> Node | None:
        node = self.node(Kind.SOURCE, "source", aval, ())
        if node is not None and value is not None and _is_at_hand(value):
            magnitudes = np.abs(np.asarray(value, np.float32))
            finite = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]  # the rest exists in every format
            node.const = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        return node

    def body(
        self,
        jaxpr: Any,
        consts: list[Any],
        inputs: Sequence[Node | None],
        names: reading.Names,
        fixed_inputs: Sequence[bool] = (),
    ) -> Body:
        env: dict[Any, Node | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        fixed = {var for var, is_fixed in zip(jaxpr.invars, fixed_inputs, strict=False) if is_fixed}
        fixed.update(jaxpr.constvars)
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.source(var.aval, value)

        def read(atom: Any) -> Node | None:
            return self.source(atom.aval, atom.val) if reading.is_literal(atom) else env[atom]

        steps = []
        for eqn in jaxpr.eqns:
            is_fixed = [reading.is_literal(atom) or atom in fixed for atom in eqn.invars]
            step = self.step(eqn, [read(atom) for atom in eqn.invars], (*names, *reading.names_of(eqn)), is_fixed)
            if all(is_fixed):
                fixed.update(eqn.outvars)
            env.update(zip(eqn.outvars, step.nodes, strict=True))
            steps.append(step)
        results = [read(atom) for atom in jaxpr.outvars]
        return Body(jaxpr, consts, steps, results, has_floats=any(node is not None for node in env.values()))

    def step(self, eqn: Any, operands: list[Node | None], names: reading.Names, fixed: list[bool]) -> Step:
        bodies = None if DECIDED in names else reading.bodies_of(eqn)
        self.region = region_of(names)
        step = Step(eqn, names, operands, [], region=self.region, bodies=bodies, fixed=fixed)
        if bodies is None:
            self.leaf(step)
            return step
        enter = {"call": self.enter_call, "cond": self.enter_cond}.get(bodies.kind, self.enter_loop)
        enter(step, bodies)
        if not any(body.has_floats for body in step.inner):
            step.bodies, step.reason = None, "no floating value inside"  # masks and indices: bound as it is
        return step

    def inner(
        self, step: Step, jaxpr: Any, inputs: Sequence[Node | None], fixed: Sequence[bool] = ()
    ) -> list[Node | None]:
        opened, consts = reading.opened(jaxpr)
        step.inner.append(self.body(opened, consts, inputs, step.names, fixed))
        self.region = step.region
        return step.inner[-1].results

    def enter_call(self, step: Step, bodies: reading.Bodies) -> None:
        around, self.in_rule = self.in_rule, self.in_rule or step.eqn.primitive.name == "custom_vjp_call"
        step.nodes = self.inner(step, bodies.jaxprs[0], step.operands, step.fixed)
        self.in_rule = around

    def enter_loop(self, step: Step, bodies: reading.Bodies) -> None:
        start, stop, around = bodies.start, bodies.start + bodies.carry, self.loop
        carried = zip(step.eqn.invars[start:stop], step.operands[start:stop], strict=True)
        carry = [self.join("carry", atom.aval, [node]) for atom, node in carried]
        self.loop = next(self.loops)
        for condition in bodies.jaxprs[:-1]:
            self.inner(step, condition, [*step.operands[: bodies.consts], *carry])
        inputs = [*step.operands[bodies.consts : start], *carry, *step.operands[stop:]]
        results = self.inner(step, bodies.jaxprs[-1], inputs)
        self.loop = around
        for join, node in zip(carry, results, strict=False):
            if join is not None and node is not None:
                join.read(node)
                self.check_range(join)
        step.nodes = [*carry, *results[bodies.carry :]]

    def enter_cond(self, step: Step, bodies: reading.Bodies) -> None:
        results = [self.inner(step, branch, step.operands[1:]) for branch in bodies.jaxprs]
        columns = zip(step.eqn.outvars, zip(*results, strict=True), strict=True)
        step.nodes = [self.join("branches", var.aval, column) for var, column in columns]

    def join(self, name: str, aval: Any, inputs: Sequence[Node | None]) -> Node | None:
        kind = Kind.KEPT if self.region.level == "written" else Kind.JOIN
        join = self.node(kind, name, aval, [node for node in inputs if node is not None])
        self.check_range(join)
        return join

    def check_range(self, join: Node | None) -> None:
        """A join of a value that does not exist in half, the mask's ``finfo.min``, is float32."""
        largest = max((node.const[1] for node in (join.inputs if join else ()) if node.const), default=0.0)
        if join is not None and join.kind is Kind.JOIN and join.half and largest > range_of(join.half)[1]:
            join.kind, join.reason = Kind.STRICT, f"a constant beyond {join.half.name}'s largest number"

    def leaf(self, step: Step) -> None:
        eqn = step.eqn
        name, inputs = eqn.primitive.name, [node for node in step.operands if node is not None]
        constants = [node.const for node in inputs if node.const is not None]
        step.kind, step.reason, asked, has_epsilon = self.rules.kind_of(eqn, constants, step.names)
        for position, var in enumerate(eqn.outvars):
            reads = inputs
            if step.kind is Kind.CLEAR and len(eqn.outvars) == len(eqn.invars) > 1:  # one by one: barriers, sort
                one = step.operands[position]
                reads = [] if one is None else [one]
            step.nodes.append(self.node(step.kind, name, var.aval, reads, step.reason, asked))
        if step.node is None:
            for operand in inputs if _tells_apart(name, inputs) else ():
                operand.is_seen = True
        else:
            step.node.has_epsilon = has_epsilon
            if step.kind is Kind.CLEAR and len(inputs) == 1:
                step.node.const = inputs[0].const
                step.node.is_looked_up = name == "gather" and not step.fixed[1]
