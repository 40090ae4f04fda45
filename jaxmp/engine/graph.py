"""The graph of a program, with a node for each floating value.

A step is an equation with its nodes. One graph covers all nested programs: arguments and results of a ``jit``, a branch
or a loop are the same nodes inside and outside. A join is a node in which several values become one. The carry of a
loop joins its initial value and the result of the body. The result of a conditional joins the results of the branches.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._internals.jax.sources import Names, names_of
from jaxmp.base.dtypes import is_castable, range_of
from jaxmp.engine.marks import DECIDED, WITH_RULE, Region, ours, region_of
from jaxmp.engine.rules import Rules
from jaxmp.engine.states import CLEAR, FULL, HALF, JOIN, KEPT, SOURCE, STRICT, Kind, Rule, State
from jaxmp.policy.float8 import Float8
from jaxmp.program.equations import Bodies, Literal, bodies_of, extremes_of, is_literal, opened
from jaxmp.program.invariants import unchanged
from jaxmp.program.primitives import BOUNDS, EXTREMES, PRODUCTS, Trait, with_trait


@dataclasses.dataclass(slots=True, eq=False)
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

    # Set by jaxmp.engine.decide. The functions in RAISERS run before `activation_of` and `has_half_copy` are set.
    after_product: bool = False  # whether it depends on a product or a half argument
    before_product: bool = False  # whether a product or a half result depends on it
    activation_of: int = 0  # the number of the last product from which it is computed elementwise; 0 if none
    has_half_copy: bool = False  # whether it is also read in half
    needs_float32: bool = False  # whether it is a float32 result, or its small differences decide integers or bools
    state: State = State.UNDECIDED
    rule: Rule | None = None  # the rule that raised the state
    cause: Node | None = None  # the node that triggered the rule
    compute: np.dtype | None = None  # its compute dtype; None if it keeps its original dtypes or only moves data
    # The half dtype of the author's postponed cast, which each reader performs. The value itself is float32.
    deferred_cast: np.dtype | None = None

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


class Float8Product(NamedTuple):
    """How a float8 product is emitted."""

    weight: str  # the operand that is the weight, "lhs" or "rhs"
    recipe: Float8
    is_fused: bool  # whether XLA may fuse the operations that read the result into the product


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """An equation with its nodes, its bodies, and notes for emitting it."""

    eqn: Any
    names: Names
    operands: Sequence[Node | None]
    nodes: Sequence[Node | None]
    kind: Kind = KEPT
    reason: str = ""
    region: Region = _UNMARKED
    recipe: Float8 | None = None  # the recipe of the code around a product
    float8: Float8Product | None = None  # set for a float8 product by jaxmp.engine.float8_products
    no_float8: str = ""  # the reason why a half product with a recipe is not float8
    bodies: Bodies | None = None
    inner: Sequence[Body] = ()
    unchanged: Collection[int] = ()  # for a scan, the numbers of the carries that no iteration changes
    is_unchanged: bool = False  # whether it is emitted unchanged
    operand_types: Sequence[Any] = ()  # the types of its operands after casts; empty if it is unchanged
    casts: Sequence[int] = ()  # the bytes of each cast that is added for it
    node: Node | None = None  # the node of the first floating result
    loops: range = range(0)  # for a loop, the numbers of its body and of the loops inside

    @property
    def joins(self) -> Sequence[Node | None]:
        """Return the joins of its results: a loop's carries, or the results of a cond."""
        nodes = self.nodes[: self.bodies.carry if self.bodies.kind != "cond" else None] if self.bodies else []
        return [None if n in self.unchanged else node for n, node in enumerate(nodes)]


@dataclasses.dataclass(slots=True, eq=False)
class Body:
    """A jaxpr with the nodes of its results."""

    jaxpr: Any
    consts: list[Any]
    steps: list[Step]
    results: list[Node | None]
    wanted: dict[Any, set[np.dtype | None]] | None = None
    casts: list[int] = dataclasses.field(default_factory=list)  # the bytes of each cast that is added for its results


@dataclasses.dataclass(slots=True)
class Graph:
    """A program and its nodes in topological order.

    The order has one exception: a carry comes before the value that the loop's body returns for the carry, although
    the carry reads this value.
    """

    nodes: list[Node]
    body: Body
    steps: list[Step]  # all equations; equations inside of a body come before the equation around the body
    sources: list[Node | None]
    patterns: list[Any] = dataclasses.field(default_factory=list)  # see jaxmp.engine.operation_patterns
    wanted: Collection[Node] = ()  # the results that are requested in half
    changes: bool = False  # False if `decide` found no product; then every operation keeps its dtypes


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
    builder = _Builder(rules, in_rule)
    sources = [builder.value(builder.source(var.aval)) for var in jaxpr.invars]
    body, _ = builder.body(jaxpr, consts, sources, names)
    return Graph(builder.nodes, body, builder.steps, [node for node, *_ in sources])


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


_Value = tuple[Node | None, Any, bool]
"""A value while the graph is built: its node, its number, and whether it is constant. Equal values share a number."""


class _Builder:
    def __init__(self, rules: Rules, in_rule: bool) -> None:
        self.rules, self.in_rule = rules, in_rule
        self.nodes: list[Node] = []
        self.steps: list[Step] = []
        self.region = Region()
        self.loop, self.last_loop = 0, 0
        self.numbers: dict[Any, Any] = {}

    def value(self, node: Node | None, key: Any = None, is_fixed: bool = False) -> _Value:
        """Return the value of a node, with a number that is equal for equal keys.

        Without a key, the number is new. For an integer or bool value, the node is None.
        """
        same: Any = node or object()
        same = same if key is None else self.numbers.setdefault(key, same)
        if node is not None:
            node.same = node.origin = same
        return node, same, is_fixed

    def node(self, kind: Kind, name: str, aval: Any, inputs: Sequence[Node], requested: str = "") -> Node:
        dtype, half = aval.dtype, self.region.half or self.rules.half
        node = Node(kind, name, dtype, aval.shape, requested, half, self.loop, self.in_rule, dtype, inputs, [])
        node.state = _STATES.get(kind, State.UNDECIDED)
        if kind is KEPT and self.region.level == "written" and dtype == np.float32:
            node.state = State.FLOAT32  # the author's float32 counts for the rules about neighbours
        node.is_constant = kind is not SOURCE and kind is not JOIN and all([operand.is_constant for operand in inputs])
        for operand in inputs:
            operand.users.append(node)
        self.nodes.append(node)
        return node

    def source(self, aval: Any, value: Any = None) -> Node | None:
        if not is_castable(aval):
            return None
        node = self.node(SOURCE, "source", aval, ())
        node.const = None if value is None else extremes_of(value)
        node.is_constant = value is not None
        return node

    def literal(self, atom: Any) -> _Value:
        value = np.asarray(atom.val)
        return self.value(self.source(atom.aval, value), (value.dtype, value.tobytes()), is_fixed=True)

    def body(self, jaxpr: Any, consts: list[Any], inputs: Sequence[_Value], names: Names) -> tuple[Body, list[_Value]]:
        literal, env = self.literal, dict[Any, _Value](zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.value(self.source(var.aval, value), id(value), is_fixed=True)

        steps = list[Step]()
        for eqn in jaxpr.eqns:
            scopes = (*names, *names_of(eqn))
            self.region = region_of(ours(scopes))
            values = [literal(atom) if type(atom) is Literal else env[atom] for atom in eqn.invars]
            step, results = self.step(eqn, values, scopes)
            env.update(zip(eqn.outvars, results, strict=True))
            steps.append(step)
        ends = [self.literal(atom) if is_literal(atom) else env[atom] for atom in jaxpr.outvars]
        return Body(jaxpr, consts, steps, [node for node, *_ in ends]), ends

    def operation(self, eqn: Any) -> object:
        """Return the same object for equal primitives with equal parameters."""
        try:
            return self.numbers.setdefault((eqn.primitive.name, *eqn.params.values()), object())
        except TypeError:  # the parameters are not hashable
            return object()

    def step(self, eqn: Any, values: Sequence[_Value], names: Names) -> tuple[Step, list[_Value]]:
        operands, numbers, fixed = zip(*values, strict=True) if values else ((), (), ())
        bodies = None if DECIDED in names else bodies_of(eqn)
        step = Step(eqn, names, operands, (), region=self.region, bodies=bodies)
        if bodies is None:
            results = self.leaf(step, numbers, fixed)
        else:
            enter = {"call": self.enter_call, "cond": self.enter_cond}.get(bodies.kind, self.enter_loop)
            results = enter(step, bodies, values)
            if all(fixed):
                results = [(node, number, True) for node, number, _ in results]
            step.nodes = [node for node, *_ in results]
            varying = [node for n, node in enumerate(step.nodes) if n not in step.unchanged]
            step.node = next((node for node in varying if node is not None), None)
        self.steps.append(step)
        return step, results

    def inner(self, step: Step, jaxpr: Any, values: Sequence[_Value]) -> list[_Value]:
        names = (*step.names, WITH_RULE) if step.eqn.primitive.name.startswith("custom_") else step.names
        body, results = self.body(*opened(jaxpr), values, names)
        step.inner = (*step.inner, body)
        self.region = step.region
        return results

    def enter_call(self, step: Step, bodies: Bodies, values: Sequence[_Value]) -> list[_Value]:
        around, self.in_rule = self.in_rule, self.in_rule or step.eqn.primitive.name == "custom_vjp_call"
        results = self.inner(step, bodies.jaxprs[0], values)
        self.in_rule = around
        return results

    def enter_loop(self, step: Step, bodies: Bodies, values: Sequence[_Value]) -> list[_Value]:
        start, stop, around = bodies.start, bodies.start + bodies.carry, self.loop
        key = tuple(number for _, number, _ in values)  # assumes that loops with equal operands have equal bodies
        step.unchanged = unchanged(bodies)
        avals = [atom.aval for atom in step.eqn.invars[start:stop]]
        carry = [
            value if n in step.unchanged else self.join("carry", aval, [value], (n, *key))
            for n, (aval, value) in enumerate(zip(avals, values[start:stop], strict=True))
        ]
        self.last_loop += 1
        self.loop = first = self.last_loop
        conditions = [
            self.inner(step, condition, [*values[: bodies.consts], *carry]) for condition in bodies.jaxprs[:-1]
        ]
        turns = [(node, ("turn", number), False) for node, number, _ in values[stop:]]
        results = self.inner(step, bodies.jaxprs[-1], [*values[bodies.consts : start], *carry, *turns])
        self.loop = around
        step.loops = range(first, self.last_loop + 1)
        for n, ((join, *_), (node, *_)) in enumerate(zip(carry, results, strict=False)):
            if join is not None and node is not None and n not in step.unchanged:
                join.inputs = [*join.inputs, node]
                node.users.append(join)
                self.check_range(join)
        new_nodes = (*carry, *results, *itertools.chain(*conditions))
        key = ("turns", *map(step.eqn.params.get, ("length", "reverse")), *(number for _, number, _ in new_nodes))
        ends = list[_Value]()
        for n, value in enumerate([*carry, *results[bodies.carry :]]):
            if n in step.unchanged:
                ends.append(value)
                continue
            node, number, _ = self.value(value[0], (n, *key)) if n < bodies.carry else value
            ends.append((node, ("turns", number), False))
        return ends

    def enter_cond(self, step: Step, bodies: Bodies, values: Sequence[_Value]) -> list[_Value]:
        columns = zip(*(self.inner(step, branch, values[1:]) for branch in bodies.jaxprs), strict=True)
        which = values[0][1]
        return [
            self.join("branches", var.aval, column, (which, *(number for _, number, _ in column)))
            for var, column in zip(step.eqn.outvars, columns, strict=True)
        ]

    def join(self, name: str, aval: Any, values: Sequence[_Value], key: Any) -> _Value:
        kind = KEPT if self.region.level == "written" else JOIN
        inputs = [node for node, *_ in values if node is not None]
        node = self.node(kind, name, aval, inputs) if is_castable(aval) else None
        self.check_range(node)
        value = self.value(node, (name, *key))
        if node is not None and name == "branches" and inputs:
            node.origin = inputs[0].origin  # for branches that compute the same value in different ways
        return value

    def check_range(self, join: Node | None) -> None:
        """Make a join float32 if half precision cannot represent one of its constants.

        An example of such a constant is the ``finfo.min`` of a mask.
        """
        largest = max((node.const[1] for node in (join.inputs if join else ()) if node.const), default=0.0)
        if join is not None and join.half and largest > range_of(join.half)[1]:
            join.raise_to(State.BEYOND_HALF, Rule.RANGE)

    def leaf(self, step: Step, numbers: Sequence[Any], fixed: Sequence[bool]) -> list[_Value]:
        nodes: list[Node | None] = []
        eqn, results, name, operands = step.eqn, [], step.eqn.primitive.name, step.operands
        operation = self.operation(eqn)
        inputs: Any = operands if None not in operands else [node for node in operands if node is not None]
        constants = [node.const for node in inputs if node.const is not None]
        kind, step.reason, requested = self.rules.kind_of(eqn, constants, step.names)
        step.kind, step.nodes, is_moved = kind, nodes, kind is CLEAR
        step.recipe = self.rules.recipe_of(name, step.names) if name in PRODUCTS else None
        is_fixed = all(fixed)
        is_one_by_one = is_moved and len(eqn.outvars) == len(eqn.invars) > 1  # such as a barrier or a sort
        for position, var in enumerate(eqn.outvars):
            node: Any = None
            if is_castable(var.aval):
                moved = operands[position : position + 1] if is_one_by_one else inputs
                reads = [operand for operand in moved if operand is not None]
                node = self.node(kind, name, var.aval, reads, requested)
                if step.node is None:
                    step.node = node
                node.step = step
            same: Any = node or object()
            if not eqn.effects:
                same = self.numbers.setdefault((position, operation, *numbers), same)
            if node is not None:
                node.same = same
                node.origin = _origin_of(node)
            nodes.append(node)
            results.append((node, same, is_fixed))
        if step.node is None:
            for operand in inputs if inputs and _tells_apart(name, inputs) else ():
                operand.needs_float32 = True
        elif is_moved and len(inputs) == 1:
            step.node.const = inputs[0].const
            step.node.is_looked_up = name == "gather" and not fixed[1]
        return results
