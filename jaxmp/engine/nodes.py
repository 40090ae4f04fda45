"""The graph of a program, with a node for each floating value.

A step is an equation with its nodes. One graph covers all nested programs: arguments and results of a ``jit``, a branch
or a loop are the same nodes inside and outside. A join is a node in which several values become one. The carry of a
loop joins its initial value and the result of the body. The result of a conditional joins the results of the branches.

``graph.py`` builds a graph. After that, nothing in it changes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.sources import Names
from jaxmp.base.dtypes import is_half
from jaxmp.engine.marks import Region
from jaxmp.engine.states import FULL, KEPT, Kind, State
from jaxmp.policy.float8 import Float8
from jaxmp.program.equations import Bodies, aval_of, primitive_of
from jaxmp.program.primitives import CAST


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Node:
    """A floating value and the operation that computes it."""

    kind: Kind  # how its operation is treated before any rule raises its state
    name: str  # the primitive, or "source", "carry", "branches"
    original_dtype: np.dtype  # its dtype in the traced program
    shape: tuple[int, ...]
    requested: str  # the level that a region or an override requests; empty if there is none
    half: np.dtype | None  # the half dtype (float16 or bfloat16) of the code around it
    loop: int  # the number of the innermost loop body around it, 0 outside of loops
    in_rule: bool  # it is computed in a custom_vjp, whose rule may not be the true derivative
    initial_state: State  # its state before any rule raises it
    inputs: Sequence[Node]
    users: list[Node]
    # The first node with an equal value. Equal operations on equal operands have equal values.
    same: Node = dataclasses.field(init=False)
    origin: Node = dataclasses.field(init=False)  # the value before it was moved or widened
    argument_dtype: np.dtype | None = None  # for an argument, its dtype in this call; for a constant, its dtype
    const: tuple[float, float] | None = None  # for a constant, its smallest nonzero and its largest magnitude
    step: Step | None = None  # the equation that computes it; None for arguments, constants and joins
    is_constant: bool = False  # it depends only on constants and integers
    is_looked_up: bool = False  # it comes from rows of a table, so it is not a weight
    needs_float32: bool = False  # it is a float32 result, or its small differences decide integers or bools
    is_mask: bool = False  # it is a constant of zeros and ones, or a cast of bools
    is_one_hot: bool = False  # it is a mask that picks elements, as an identity matrix does
    adds_by_mask: bool = False  # it is a product with a constant mask, which adds elements of the other operand
    after_product: bool = False  # it depends on a product or a half argument
    before_product: bool = False  # a product or a half result depends on it

    def __repr__(self) -> str:
        # without the operands, which have operands too
        return f"Node({self.name} {self.original_dtype}{list(self.shape)})"

    @property
    def is_cast_to_half(self) -> bool:
        """Return whether it is a cast to half that the author wrote."""
        is_written = self.name == CAST and self.step is not None and self.step.kind is KEPT
        return is_written and is_half(self.original_dtype)

    @property
    def is_cast_to_float32(self) -> bool:
        """Return whether it is a cast to float32 that the author wrote."""
        return self.name == CAST and self.kind is FULL

    @property
    def is_cast_once(self) -> bool:
        """Return whether all half readers share one cast.

        A weight is cast at each use instead, so that its cotangents are summed in float32.
        """
        return self.after_product or self.is_looked_up


_UNMARKED = Region()


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Step:
    """An equation with its nodes and its bodies."""

    eqn: JaxprEqn
    names: Names  # the scopes around it
    operands: Sequence[Node | None]  # None for an operand that the engine does not cast, such as an integer
    nodes: Sequence[Node | None]  # of its results
    kind: Kind = KEPT  # the kind of the equation alone; the kinds of its nodes may differ
    reason: str = ""
    is_sum: bool = False  # it is a product that counts as a sum
    region: Region = _UNMARKED
    recipe: Float8 | None = None  # the recipe of the code around a product
    bodies: Bodies | None = None
    inner: Sequence[StepBody] = ()
    node: Node | None = None  # the node of the first floating result
    loops: range = range(0)  # for a loop, the numbers of its body and of the loops inside
    span: range = range(0)  # for an equation with bodies, the positions of their nodes in the graph's nodes

    def __repr__(self) -> str:
        return f"Step({primitive_of(self.eqn)})"

    @property
    def joins(self) -> Sequence[Node | None]:
        """Return the joins of its results: a loop's carries, or the results of a cond."""
        if self.bodies is None:
            return []
        joined = self.bodies.joined(len(self.bodies.jaxprs) - 1)
        return [self.nodes[n] for n in joined]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class StepBody:
    """The steps of a jaxpr, and the nodes of its results.

    The jaxpr and its constants are left out, so that a graph does not keep them alive.
    """

    steps: list[Step]
    results: list[Node | None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Graph:
    """A program and its nodes in topological order.

    The order has one exception: a carry comes before the value that the loop's body returns for the carry, although
    the carry reads this value.

    Attributes:
      nodes: all nodes.
      body: the steps of the program, and the nodes of its results.
      steps: all equations; equations inside of a body come before the equation around the body.
      wanted: the results that are requested in half.
      changes: whether dtypes may change. False if the program has no product and was built without ``force``.
    """

    nodes: Sequence[Node]
    body: StepBody
    steps: Sequence[Step]
    wanted: Sequence[Node]
    changes: bool


inputs_of, users_of = operator.attrgetter("inputs"), operator.attrgetter("users")


def shape_read(user: Node, operand: Node) -> tuple[int, ...]:
    """Return the shape in which ``user`` reads ``operand``.

    For a scanned array, this is the shape of one element.
    """
    if user.step is not None:
        for node, atom in zip(user.step.operands, user.step.eqn.invars, strict=True):
            if node is operand:
                return tuple(aval_of(atom).shape)
    return operand.shape
