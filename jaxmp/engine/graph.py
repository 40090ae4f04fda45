"""The graph of a program, with a node for each floating value.

A step is an equation with its nodes. One graph covers all nested programs: arguments and results of a ``jit``, a branch
or a loop are the same nodes inside and outside. A join is a node in which several values become one. The carry of a
loop joins its initial value and the result of the body. The result of a conditional joins the results of the branches.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxmp._internals.jax.sources import Names
from jaxmp.base.dtypes import is_castable, range_of
from jaxmp.engine.marks import DECIDED, WITH_RULE, Region, ours, region_of
from jaxmp.engine.rules import Rules
from jaxmp.engine.states import CLEAR, FULL, HALF, JOIN, KEPT, SOURCE, STRICT, Kind, Rule, State
from jaxmp.policy.float8 import Float8
from jaxmp.program.equations import Bodies, bodies_of, extremes_of
from jaxmp.program.primitives import BOUNDS, EXTREMES, PRODUCTS, Trait, with_trait
from jaxmp.program.reading import read_program
from jaxmp.program.values import BRANCHES, CARRY, CONSTANT, LAST_CARRY, Body, Equation, Value


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Node:
    """A floating value and the operation that computes it."""

    kind: Kind  # its kind before neighbours are considered
    name: str  # the primitive, or "source", "carry", "branches"
    written: np.dtype  # its original dtype
    shape: tuple[int, ...]
    requested: str  # the level that a region or an override requests; empty if there is none
    half: np.dtype | None  # the half dtype (float16 or bfloat16) of the code around it
    loop: int  # the number of the innermost loop body around it, 0 outside of loops
    in_rule: bool  # whether it is computed in a custom_vjp, whose rule may not be the true derivative
    dtype: np.dtype  # the decided dtype of the result
    inputs: Sequence[Node]
    users: list[Node]
    # The first node with an equal value. Equal operations on equal operands have equal values.
    same: Node = dataclasses.field(init=False)
    origin: Node = dataclasses.field(init=False)  # the value before it was moved or widened
    const: tuple[float, float] | None = None  # for a constant, its smallest nonzero and its largest magnitude
    step: Step | None = None  # the equation that computes it; None for arguments, constants and joins
    is_constant: bool = False  # whether it depends only on constants and integers
    is_looked_up: bool = False  # whether it comes from rows of a table; then it is not a weight
    needs_float32: bool = False  # whether it is a float32 result, or its small differences decide integers or bools

    # These fields are set in decide.py and casts.py, which may also change `kind`, `dtype` and `is_looked_up`. The
    # files of the rules only call `raise_to`, before `activation_of` and `has_half_copy` are set.
    after_product: bool = False  # whether it depends on a product or a half argument
    before_product: bool = False  # whether a product or a half result depends on it
    activation_of: int = 0  # the number of the last product from which it is computed elementwise; 0 if none
    has_half_copy: bool = False  # whether it is also read in half
    state: State = State.UNDECIDED  # at first, the state of its kind
    rule: Rule | None = None  # the rule that raised the state
    cause: Node | None = None  # the node that triggered the rule
    compute: np.dtype | None = None  # its compute dtype; None if it keeps its original dtypes or only moves data
    # The half dtype of the author's postponed cast, which each reader performs. The value itself is float32.
    deferred_cast: np.dtype | None = None

    def __repr__(self) -> str:
        return f"Node({self.name} {self.dtype}{list(self.shape)})"  # without the operands, which have operands too

    @property
    def is_cast_once(self) -> bool:
        """Return whether all half readers share one cast.

        A weight is cast at each use instead, so that its cotangents are summed in float32.
        """
        return self.after_product or self.is_looked_up

    @property
    def value_dtype(self) -> np.dtype:
        """Return the dtype in which readers see the value, after a postponed cast."""
        return self.deferred_cast or self.dtype

    @property
    def is_half_product(self) -> bool:
        """Return whether the node is a product in half precision."""
        return self.name in PRODUCTS and self.state is State.HALF

    def raise_to(self, state: State, rule: Rule, cause: Node | None = None) -> bool:
        """Raise the state if it is lower, and return whether it was lower.

        The state does not change if a region or an override fixes it, or if the operation keeps its dtypes.
        """
        if state <= self.state or self.requested or self.kind is KEPT:
            return False
        self.state, self.rule, self.cause = state, rule, cause
        return True


_STATES = {HALF: State.HALF, FULL: State.FLOAT32, STRICT: State.BEYOND_HALF}
_UNMARKED = Region()


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Step:
    """An equation with its nodes and its bodies."""

    eqn: Any
    names: Names
    operands: Sequence[Node | None]
    nodes: Sequence[Node | None]
    kind: Kind = KEPT
    reason: str = ""
    region: Region = _UNMARKED
    recipe: Float8 | None = None  # the recipe of the code around a product
    bodies: Bodies | None = None
    inner: Sequence[StepBody] = ()
    unchanged_carries: Collection[int] = ()  # for a scan, the numbers of the carries that no iteration changes
    node: Node | None = None  # the node of the first floating result
    loops: range = range(0)  # for a loop, the numbers of its body and of the loops inside

    def __repr__(self) -> str:
        return f"Step({self.eqn.primitive.name})"

    @property
    def joins(self) -> Sequence[Node | None]:
        """Return the joins of its results: a loop's carries, or the results of a cond."""
        if self.bodies is None:
            return []
        joined = self.bodies.joined(len(self.bodies.jaxprs) - 1)
        return [None if n in self.unchanged_carries else self.nodes[n] for n in joined]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class StepBody:
    """The steps of a jaxpr, and the nodes of its results.

    The jaxpr and its constants are left out, so that a decided graph does not keep them alive.
    """

    steps: list[Step]
    results: list[Node | None]


@dataclasses.dataclass(slots=True, repr=False)
class Graph:
    """A program and its nodes in topological order.

    The order has one exception: a carry comes before the value that the loop's body returns for the carry, although
    the carry reads this value.
    """

    nodes: list[Node]
    body: StepBody
    steps: list[Step]  # all equations; equations inside of a body come before the equation around the body
    sources: list[Node | None]


inputs_of, users_of = operator.attrgetter("inputs"), operator.attrgetter("users")


def shape_read(user: Node, operand: Node) -> tuple[int, ...]:
    """Return the shape in which ``user`` reads ``operand``.

    For a scanned array, this is the shape of one element.
    """
    if user.step is not None:
        for node, atom in zip(user.step.operands, user.step.eqn.invars, strict=True):
            if node is operand:
                return tuple(atom.aval.shape)
    return operand.shape


def build(jaxpr: Any, consts: list[Any], rules: Rules, names: Names = (), in_rule: bool = False) -> Graph:
    """Return the graph of an open jaxpr and its constants.

    ``names`` are the scopes around the jaxpr.
    """
    program = read_program(jaxpr, consts, names, counts_as_one=_is_decided, scopes_inside=_scopes_inside)
    builder = _Builder(rules, in_rule)
    sources = [builder.add_source(value) for value in program.arguments]
    body = builder.body(program.body)
    return Graph(builder.nodes, body, builder.steps, sources)


def _is_decided(eqn: Any, names: Names) -> bool:
    """Return whether the engine has emitted an equation before."""
    return DECIDED in names


def _scopes_inside(eqn: Any) -> Names:
    bodies = bodies_of(eqn)
    return (WITH_RULE,) if bodies is not None and bodies.has_rule else ()


_NO_MOVES = EXTREMES | with_trait(Trait.ROUNDS)
"""Operations of the kind ``CLEAR`` whose results are other values than their operands."""


def _tells_apart(name: str, operands: Sequence[Node]) -> bool:
    """Return whether small differences of operands may change integers or bools."""
    is_largest = any(operand.name in BOUNDS and other in operand.inputs for operand in operands for other in operands)
    return name != "is_finite" and not is_largest and all(operand.const != (0.0, 0.0) for operand in operands)


def _origin_of(node: Node) -> Node:
    """Return the value before a move or a cast to float32, or the node itself."""
    is_moved = node.kind is CLEAR and node.name not in _NO_MOVES
    is_cast = node.kind is FULL and node.name == "convert_element_type"
    return node.inputs[0].origin if (is_moved or is_cast) and len(node.inputs) == 1 else node.same


class _Builder:
    """A builder that makes the nodes and steps of a program, equation by equation."""

    def __init__(self, rules: Rules, in_rule: bool) -> None:
        self.rules, self.in_rule = rules, in_rule
        self.nodes: list[Node] = []
        self.steps: list[Step] = []
        self.node_of: dict[Value, Node | None] = {}  # None for integers and bools
        self.fixed = set[Value]()  # values of operations that depend only on constants
        self.region = Region()
        self.loop, self.last_loop = 0, 0

    def body(self, body: Body) -> StepBody:
        """Add the nodes of a body, and return its steps."""
        for value in body.constants:
            self.add_source(value)
        steps = [self.step(equation) for equation in body.equations]
        results = [self.read(value) for value in body.results]
        return StepBody(steps, results)

    def read(self, value: Value) -> Node | None:
        """Return the node of a value; a literal gets its own node each time."""
        return self.node_of[value] if value in self.node_of else self.add_source(value)

    def is_fixed(self, value: Value) -> bool:
        """Return whether a value depends only on constants."""
        return value.outer.name == CONSTANT or value.outer in self.fixed

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def add_source(self, value: Value) -> Node | None:
        """Add the node of an argument, a constant or a literal."""
        if not is_castable(value.aval):
            self.node_of[value] = None
            return None
        node = self.add(SOURCE, "source", value, ())
        node.is_constant = value.name == CONSTANT
        node.const = extremes_of(value.constant) if node.is_constant else None
        return node

    def add(self, kind: Kind, name: str, value: Value, inputs: Sequence[Node], requested: str = "") -> Node:
        """Add the node of a floating value."""
        dtype, half = value.aval.dtype, self.region.half or self.rules.half
        node = Node(kind, name, dtype, value.aval.shape, requested, half, self.loop, self.in_rule, dtype, inputs, [])
        node.state = _STATES.get(kind, State.UNDECIDED)
        if kind is KEPT and self.region.level == "written" and dtype == np.float32:
            node.state = State.FLOAT32  # the author's float32 counts for the rules about neighbours
        node.is_constant = kind is not SOURCE and kind is not JOIN and all([operand.is_constant for operand in inputs])
        for operand in inputs:
            operand.users.append(node)
        self.nodes.append(node)
        self.node_of[value] = node
        node.same = node.origin = self.node_of[value.same] or node
        return node

    def add_join(self, name: str, value: Value, inputs: Sequence[Value]) -> None:
        """Add the node of a value that is one of several values."""
        if not is_castable(value.aval):
            self.node_of[value] = None
            return
        kind = KEPT if self.region.level == "written" else JOIN
        nodes = [node for operand in inputs if (node := self.node_of[operand]) is not None]
        join = self.add(kind, name, value, nodes)
        self.check_range(join)
        if name == BRANCHES and nodes:
            join.origin = nodes[0].origin  # for branches that compute the same value in different ways

    def check_range(self, join: Node) -> None:
        """Make a join float32 if half precision cannot represent one of its constants.

        An example of such a constant is the ``finfo.min`` of a mask.
        """
        largest = max((node.const[1] for node in join.inputs if node.const), default=0.0)
        if join.half and largest > range_of(join.half)[1]:
            join.raise_to(State.BEYOND_HALF, Rule.RANGE)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, equation: Equation) -> Step:
        """Add the nodes of an equation's results, and of its bodies."""
        self.region = region_of(ours(equation.names))
        operands = [self.read(value) for value in equation.operands]
        bodies = equation.bodies if equation.inside else None
        step = Step(equation.eqn, equation.names, operands, (), region=self.region, bodies=bodies)
        if all([self.is_fixed(value) for value in equation.operands]):
            self.fixed.update(equation.results)
        if equation.inside:
            self.enter(step, equation)
        else:
            self.add_operation(step, equation)
        self.steps.append(step)
        return step

    def enter(self, step: Step, equation: Equation) -> None:
        """Add the nodes of an equation with bodies."""
        for body in equation.inside:
            for value in body.inputs:
                self.add_input(value)
        loop_around, in_rule_around = self.loop, self.in_rule
        if equation.carries:
            step.unchanged_carries = [n for n, carry in enumerate(equation.carries) if carry.name != CARRY]
        self.in_rule = self.in_rule or equation.has_backward_rule
        if equation.is_loop:
            self.last_loop += 1
            self.loop = first = self.last_loop
        step.inner = [self.body(body) for body in equation.inside]
        if equation.is_loop:
            step.loops = range(first, self.last_loop + 1)
        self.loop, self.in_rule, self.region = loop_around, in_rule_around, step.region
        self.close_carries(equation)
        for value in equation.results:
            self.add_result(value, equation)
        step.nodes = [self.node_of[value] for value in equation.results]
        varying = [node for n, node in enumerate(step.nodes) if n not in step.unchanged_carries]
        step.node = next((node for node in varying if node is not None), None)

    def add_input(self, value: Value) -> None:
        """Add the node of a body's input, or give it the node of the operand that enters the body."""
        if value in self.node_of:
            return
        ((_, operand, _), *_) = value.reads
        if value.name == CARRY:
            self.add_join(CARRY, value, [operand])
        else:
            self.node_of[value] = self.read(operand)

    def close_carries(self, equation: Equation) -> None:
        """Add the value that each iteration returns to the inputs of a carry's node."""
        for value in equation.carries:
            if value.name != CARRY or (join := self.node_of[value]) is None:
                continue
            (_, (_, result, _)) = value.reads
            if (node := self.node_of[result]) is not None:
                join.inputs = [*join.inputs, node]
                node.users.append(join)
                self.check_range(join)

    def add_result(self, value: Value, equation: Equation) -> None:
        """Add the node of the result of an equation with bodies, unless a value of a body has this node."""
        if value in self.node_of:
            return
        if value.name == BRANCHES:
            branches = [operand for number, operand, _ in value.reads if number < len(equation.inside)]
            self.add_join(BRANCHES, value, branches)
        elif value.name == LAST_CARRY:
            self.node_of[value] = self.node_of[equation.carries[value.position]]
        else:
            ((_, stacked, _),) = value.reads
            self.node_of[value] = self.node_of[stacked]

    def add_operation(self, step: Step, equation: Equation) -> None:
        eqn, name, operands = step.eqn, equation.name, step.operands
        inputs = [node for node in operands if node is not None]
        constants = [node.const for node in inputs if node.const is not None]
        kind, step.reason, requested = self.rules.kind_of(eqn, constants, step.names)
        is_moved = kind is CLEAR
        step.kind = kind
        step.recipe = self.rules.recipe_of(name, step.names) if name in PRODUCTS else None
        is_one_by_one = is_moved and len(eqn.outvars) == len(eqn.invars) > 1  # such as a barrier or a sort
        nodes: list[Node | None] = []
        for position, value in enumerate(equation.results):
            if not is_castable(value.aval):
                self.node_of[value] = None
                nodes.append(None)
                continue
            moved = operands[position : position + 1] if is_one_by_one else operands
            node = self.add(kind, name, value, [operand for operand in moved if operand is not None], requested)
            node.step = step
            node.origin = _origin_of(node)
            nodes.append(node)
        step.nodes = nodes
        step.node = next((node for node in nodes if node is not None), None)
        if step.node is None:
            for operand in inputs if inputs and _tells_apart(name, inputs) else ():
                operand.needs_float32 = True
        elif is_moved and len(inputs) == 1:
            step.node.const = inputs[0].const
            step.node.is_looked_up = name == "gather" and not self.is_fixed(equation.operands[1])
