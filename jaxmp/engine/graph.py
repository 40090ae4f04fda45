"""Build the graph of a program. ``nodes.py`` describes it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.sources import Names
from jaxmp.base.dtypes import is_castable, is_half
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.marks import DECIDED, WITH_RULE, Region, names_with_trial, ours, region_of
from jaxmp.engine.nodes import Graph, Node, Step, StepBody
from jaxmp.engine.overrides import FLOAT32_RESULT
from jaxmp.engine.product_flow import mark_looked_up, mark_products
from jaxmp.engine.small_products import make_sums
from jaxmp.engine.states import CLEAR, FULL, HALF, JOIN, KEPT, SOURCE, STRICT, Kind, State
from jaxmp.program.equations import Array, Opened, bodies_of, extremes_of, is_mask, is_one_hot
from jaxmp.program.primitives import BOUNDS, CAST, EXTREMES, PRODUCTS, Trait, with_trait
from jaxmp.program.reading import read_program
from jaxmp.program.values import BRANCHES, CARRY, CONSTANT, LAST_CARRY, Body, Equation, Value

_STATES = {HALF: State.HALF, FULL: State.FLOAT32, STRICT: State.BEYOND_HALF}


def build(
    program: Opened,
    args: Sequence[Array],
    dtypes: Sequence[np.dtype | None],
    classifier: Classifier,
    names: Names = (),
    *,
    in_rule: bool = False,
    force: bool = False,
) -> Graph:
    """Return the graph of a program.

    Args:
      program: an open jaxpr and its constants.
      args: the arguments, or their types. Their dtypes may differ from the traced dtypes.
      dtypes: for each result, its requested dtype or None.
      classifier: the classifier of operations.
      names: the scopes around the program.
      in_rule: whether the program is part of a custom_vjp, whose rule may not be the true derivative.
      force: whether dtypes may change even if the program has no product. A derivative rule needs this, because it
        belongs to a larger program.
    """
    read = read_program(*program, names, counts_as_one=_is_emitted, scopes_inside=_scopes_inside)
    builder = _Builder(classifier, in_rule)
    for value, argument in zip(read.arguments, args, strict=True):
        builder.add_source(value, jax.typeof(argument).dtype)
    body = builder.body(read.body)
    make_sums(builder.nodes, builder.fixed_nodes())
    wanted = _results_wanted_in_half(body, dtypes)
    changes = force or any(map(_is_product_to_decide, builder.nodes))
    if changes:
        mark_products(builder.nodes, wanted)
        mark_looked_up(builder.nodes)
    return Graph(builder.nodes, body, builder.steps, wanted, changes)


def _is_product_to_decide(node: Node) -> bool:
    """Return whether the engine decides the dtype of a product, or of an operation that counts as one."""
    return node.kind is HALF or (node.kind is FULL and node.name in PRODUCTS)


def _results_wanted_in_half(body: StepBody, dtypes: Sequence[np.dtype | None]) -> list[Node]:
    """Return the results that are requested in half, and mark those that are requested in float32."""
    wanted = list[Node]()
    for node, dtype in zip(body.results, dtypes, strict=True):
        if node is not None and is_half(dtype) and node not in wanted:
            wanted.append(node)
        elif node is not None and dtype is not None:
            node.needs_float32 = True
    return wanted


def _is_emitted(eqn: JaxprEqn, names: Names) -> bool:
    """Return whether the engine has emitted an equation before."""
    return DECIDED in names


def _scopes_inside(eqn: JaxprEqn) -> Names:
    bodies = bodies_of(eqn)
    return (WITH_RULE,) if bodies is not None and bodies.has_rule else ()


_NO_MOVES = EXTREMES | with_trait(Trait.ROUNDS)
"""Operations of the kind ``CLEAR`` whose results are other values than their operands."""
_EQUALITIES = with_trait(Trait.EQUATES)


def _tells_apart(name: str, operands: Sequence[Node]) -> bool:
    """Return whether small differences of operands may change integers or bools."""
    is_largest = any(operand.name in BOUNDS and other in operand.inputs for operand in operands for other in operands)
    return name != "is_finite" and not is_largest and all(operand.const != (0.0, 0.0) for operand in operands)


def _origin_of(node: Node) -> Node:
    """Return the value before a move or a cast to float32, or the node itself."""
    is_moved = node.kind is CLEAR and node.name not in _NO_MOVES
    is_copy = is_moved or node.is_cast_to_float32
    return node.inputs[0].origin if is_copy and len(node.inputs) == 1 else node.same


def _mark_mask(node: Node, value: Value) -> None:
    """Mark a constant of zeros and ones, or a cast of bools.

    ``value`` is the constant, or the operand of the cast.
    """
    consists_of_ones = value.name == CONSTANT and bool(value.shape) and is_mask(value.constant)
    node.is_mask = consists_of_ones or value.dtype == bool
    node.is_one_hot = is_one_hot(value.constant) if consists_of_ones else value.name in _EQUALITIES


class _Builder:
    """A builder that makes the nodes and steps of a program, equation by equation."""

    def __init__(self, classifier: Classifier, in_rule: bool) -> None:
        self.classifier, self.in_rule = classifier, in_rule
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

    def fixed_nodes(self) -> set[Node]:
        """Return the nodes of operations that depend only on constants."""
        return {node for value in self.fixed if (node := self.node_of[value]) is not None}

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def add_source(self, value: Value, argument_dtype: np.dtype | None = None) -> Node | None:
        """Add the node of an argument, a constant or a literal.

        ``argument_dtype`` is the dtype of an argument, which may differ from its traced dtype.
        """
        if not is_castable(value.aval):
            self.node_of[value] = None
            return None
        node = self.add(SOURCE, "source", value, ())
        node.argument_dtype = value.dtype if argument_dtype is None else np.dtype(argument_dtype)
        node.is_constant = value.name == CONSTANT
        if node.is_constant:
            node.const = extremes_of(value.constant)
            _mark_mask(node, value)
        return node

    def add(self, kind: Kind, name: str, value: Value, inputs: Sequence[Node], requested: str = "") -> Node:
        """Add the node of a floating value."""
        dtype, half = value.dtype, self.region.half or self.classifier.half
        state = _STATES.get(kind, State.UNDECIDED)
        if kind is KEPT and self.region.level == "written" and dtype == np.float32:
            state = State.FLOAT32  # the author's float32 counts for the rules about neighbours
        if requested == FLOAT32_RESULT:
            state = State.FLOAT32
        node = Node(kind, name, dtype, value.shape, requested, half, self.loop, self.in_rule, state, inputs, [])
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
        if name == BRANCHES and nodes:
            join.origin = nodes[0].origin  # for branches that compute the same value in different ways

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, equation: Equation) -> Step:
        """Add the nodes of an equation's results, and of its bodies."""
        names = names_with_trial(equation)
        self.region = region_of(ours(names))
        operands = [self.read(value) for value in equation.operands]
        bodies = equation.bodies if equation.inside else None
        step = Step(equation.eqn, names, operands, (), region=self.region, bodies=bodies)
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
        first_node = len(self.nodes)
        for body in equation.inside:
            for value in body.inputs:
                self.add_input(value)
        loop_around, in_rule_around = self.loop, self.in_rule
        self.in_rule = self.in_rule or equation.has_backward_rule
        if equation.is_loop:
            self.last_loop += 1
            self.loop = first = self.last_loop
        step.inner = [self.body(body) for body in equation.inside]
        step.span = range(first_node, len(self.nodes))
        if equation.is_loop:
            step.loops = range(first, self.last_loop + 1)
        self.loop, self.in_rule, self.region = loop_around, in_rule_around, step.region
        self.close_carries(equation)
        for value in equation.results:
            self.add_result(value, equation)
        step.nodes = [self.node_of[value] for value in equation.results]
        step.node = next((node for node in step.nodes if node is not None), None)

    def add_input(self, value: Value) -> None:
        """Add the node of a body's input, or give it the node of the operand that enters the body."""
        if value in self.node_of:
            return
        ((_, operand), *_) = value.reads
        if value.name == CARRY:
            self.add_join(CARRY, value, [operand])
        else:
            self.node_of[value] = self.read(operand)

    def close_carries(self, equation: Equation) -> None:
        """Add the value that each iteration returns to the inputs of a carry's node."""
        for value in equation.carries:
            if (join := self.node_of[value]) is None:
                continue
            (_, (_, result)) = value.reads
            if (node := self.node_of[result]) is not None:
                join.inputs = [*join.inputs, node]
                node.users.append(join)

    def add_result(self, value: Value, equation: Equation) -> None:
        """Add the node of the result of an equation with bodies, unless a value of a body has this node."""
        if value in self.node_of:
            return
        if value.name == BRANCHES:
            branches = [operand for number, operand in value.reads if number < len(equation.inside)]
            self.add_join(BRANCHES, value, branches)
        elif value.name == LAST_CARRY:
            self.node_of[value] = self.node_of[equation.carries[value.position]]
        else:
            ((_, stacked),) = value.reads
            self.node_of[value] = self.node_of[stacked]

    def add_operation(self, step: Step, equation: Equation) -> None:
        eqn, name, operands = step.eqn, equation.name, step.operands
        inputs = [node for node in operands if node is not None]
        kind, step.reason, requested = self.classifier.kind_of(eqn, [node.const for node in inputs], step.names)
        is_moved = kind is CLEAR
        step.kind = kind
        step.recipe = self.classifier.recipe_of(name, step.names) if name in PRODUCTS else None
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
        elif name == CAST and not inputs:
            _mark_mask(step.node, equation.operands[0].outer)
        elif is_moved and len(inputs) == 1:
            step.node.const = inputs[0].const
            step.node.is_looked_up = name == "gather" and not self.is_fixed(equation.operands[1])
