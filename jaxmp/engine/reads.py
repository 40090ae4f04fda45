"""Find the casts of a decided program: of operands, of the results of bodies, and before moves of data.

*Half* is half precision: float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import Var

from jaxmp.base.dtypes import is_half
from jaxmp.engine.nodes import Graph, Node, Step, StepBody
from jaxmp.engine.states import CLEAR, JOIN, KEPT
from jaxmp.engine.value_decision import Decision
from jaxmp.program.equations import Bodies, is_literal, opened, size_of
from jaxmp.program.primitives import BOUNDS, CAST, COMPARISONS, MEETS, MONOTONE, Trait, with_trait
from jaxmp.program.repeated_casts import has_too_many_terms

_EQUALITIES, _FLOAT32 = with_trait(Trait.EQUATES), np.dtype(np.float32)

Reads = Sequence[np.dtype | None]
"""The dtype of each operand of an equation, or of each result of a body, after its cast; None for no cast."""
RepeatedReads = Sequence[tuple[int, np.dtype]]
"""Operands of a scan that are half, and that many iterations read: the position and the dtype of each.

The scan reads them in float32, so that their cotangents are summed in float32. Its body casts them back to half.
"""


def reads_of_steps(
    graph: Graph, decision_of: Mapping[Node, Decision]
) -> tuple[dict[Step | StepBody, Reads], dict[Step, RepeatedReads]]:
    """Return the casts of all operands and results, and the repeated reads of scans.

    The casts are those of each step's operands and of each body's results.
    """
    finder = _ReadsFinder(decision_of)
    for step in graph.steps:
        finder.add(step)
    return finder.reads, finder.repeated


def is_widening(step: Step, decision_of: Mapping[Node, Decision]) -> bool:
    """Return whether an equation casts a value that is now half to float32."""
    node, operand = step.node, step.operands[0] if step.eqn.primitive.name == CAST else None
    if node is None or operand is None:
        return False
    return decision_of[operand].stored_dtype.itemsize < decision_of[node].stored_dtype.itemsize


class _ReadsFinder:
    """A finder of reads. Add the steps in a body before the step around the body."""

    def __init__(self, decision_of: Mapping[Node, Decision]) -> None:
        self.decision_of = decision_of
        self.reads: dict[Step | StepBody, Reads] = {}
        self.repeated: dict[Step, RepeatedReads] = {}
        self._reads_in_body: dict[StepBody, Mapping[Var, set[np.dtype | None]]] = {}

    def add(self, step: Step) -> None:
        if step.bodies is None:
            self.reads[step] = _reads_of_operation(step, self.decision_of)
            return
        if repeated := _repeated_reads(step, self.decision_of):
            self.repeated[step] = repeated
        self.reads[step] = self._reads_of_bodies(step, step.bodies)
        for number, body in enumerate(step.inner):
            self.reads[body] = _reads_of_results(step, step.bodies, number, self.decision_of)

    def _reads_of_bodies(self, step: Step, bodies: Bodies) -> Reads:
        # A half operand is cast to its own dtype, for two reasons. If a `jax.vmap` repeats it for each example, the
        # emit stage sums its cotangents in float32, but only for operands with a cast. And calls of equal layers share
        # one program if the first reads a float32 argument, and the others read half activations.
        dtypes = [None if node is None else self.decision_of[node].stored_dtype for node in step.operands]
        reads = [dtype if is_half(dtype) else None for dtype in dtypes]
        if bodies.is_loop:
            for n, join in enumerate(step.joins, bodies.start):
                operand = step.operands[n]
                if join is not None and operand is not None:
                    reads[n] = self.decision_of[join].stored_dtype
            for position, _ in self.repeated.get(step, ()):
                reads[position] = _FLOAT32
        elif bodies.is_call:
            for position, operand in enumerate(step.operands):
                if operand is not None and operand.is_cast_once:  # so that the call does not save a float32 copy
                    reads[position] = self._half_read(step.inner[0], bodies, position)
        return reads

    def _half_read(self, body: StepBody, bodies: Bodies, position: int) -> np.dtype | None:
        """Return the half dtype in which all readers read a body's operand, or None."""
        if body not in self._reads_in_body:
            dtypes_of: dict[Var, set[np.dtype | None]] = {}
            for step in body.steps:
                # A value that the author casts to half may already be half before this cast.
                cast = step.node if step.eqn.primitive.name == CAST else None
                reads = self.reads[step] if cast is None else [self.decision_of[cast].stored_dtype]
                for atom, dtype in zip(step.eqn.invars, reads, strict=True):
                    if not is_literal(atom):
                        dtypes_of.setdefault(atom, set()).add(dtype)
            self._reads_in_body[body] = dtypes_of
        jaxpr, _ = opened(bodies.jaxprs[0])
        var = jaxpr.invars[position]
        if var in jaxpr.outvars:
            return None
        dtypes = self._reads_in_body[body].get(var, set())
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        return dtype if is_half(dtype) else None


def _reads_of_results(step: Step, bodies: Bodies, number: int, decision_of: Mapping[Node, Decision]) -> Reads:
    """Return the dtypes of the results of body ``number`` of a step.

    A result that becomes a join is cast to the dtype of the join. The readers outside of the body cast the others.
    """
    joins, joined = step.joins, bodies.joined(number)
    reads = list[np.dtype | None]()
    for n, node in enumerate(step.inner[number].results):
        join = joins[n] if n in joined else None
        reads.append(None if node is None or join is None else decision_of[join].stored_dtype)
    return reads


def _repeated_reads(step: Step, decision_of: Mapping[Node, Decision]) -> RepeatedReads:
    """Return the half operands that many iterations of a loop read, and whose cotangents are summed."""
    bodies = step.bodies
    if bodies is None or not (bodies.is_loop and bodies.has_gradient) or step.node is None or step.node.in_rule:
        return []
    if not has_too_many_terms(size_of([bodies.iterations])):
        return []
    repeated = []
    for position in range(bodies.start):
        operand = step.operands[position]
        dtype = decision_of[operand].stored_dtype if operand is not None else None
        if is_half(dtype):
            repeated.append((position, dtype))
    return repeated


def _reads_of_operation(step: Step, decision_of: Mapping[Node, Decision]) -> Reads:
    """Return the casts of the operands of an equation without bodies."""
    node = step.node
    compared_in = _dtype_of_comparison(step, decision_of) if node is None else None
    is_kept_cast = node is not None and node.name == CAST and node.kind is KEPT
    reads_any_dtype = is_kept_cast or is_widening(step, decision_of)
    reads = list[np.dtype | None]()
    for operand in step.operands:
        if operand is None or reads_any_dtype:
            reads.append(None)
        elif node is None:
            reads.append(compared_in or operand.original_dtype)
        else:
            reads.append(dtype_read_by(node, operand, decision_of))
    return reads


def _dtype_of_comparison(step: Step, decision_of: Mapping[Node, Decision]) -> np.dtype | None:
    """Return the dtype in which a comparison reads all operands.

    The result is None if it reads them in their original dtypes.
    """
    name, operands = step.eqn.primitive.name, step.operands
    if name not in COMPARISONS:
        return None
    largest: list[Node] = []
    if name in _EQUALITIES:
        # The derivative of a maximum compares the maximum with its operands, so all of them must be rounded alike.
        bounded = [operand for operand in operands if operand and operand.name in BOUNDS]
        largest = [bound for bound in bounded if {*bound.inputs} & {*operands}]
    compared = [operand for operand in largest or operands if operand and operand.const != (0.0, 0.0)]
    dtypes = {decision_of[operand].stored_dtype for operand in compared}
    is_rounded = len(dtypes) == 1 and (largest or dtypes != {_FLOAT32})
    return dtypes.pop() if is_rounded else None


def dtype_read_by(user: Node, operand: Node, decision_of: Mapping[Node, Decision]) -> np.dtype | None:
    """Return the dtype in which an operation reads an operand; None if it reads any dtype."""
    if (compute_dtype := decision_of[user].compute_dtype) is not None:
        return compute_dtype
    return None if user.kind in (CLEAR, JOIN) else operand.original_dtype


def move_casts(nodes: Sequence[Node], decision_of: dict[Node, Decision]) -> None:
    """Cast before a move of data if all readers of the move want one half dtype.

    So ``jax.checkpoint`` saves a value with a ``checkpoint_name`` in half. If several readers, a loop or a broadcast
    repeat a weight, each reader casts the weight instead.

    Args:
      nodes: the nodes of the graph.
      decision_of: the decisions on all nodes. Those on moves are replaced.
    """
    for node in reversed(nodes):
        decision = decision_of[node]
        is_moved = node.kind is CLEAR and node.name in MONOTONE and len(node.inputs) == 1 and not node.needs_float32
        if not is_moved or decision.stored_dtype != _FLOAT32:
            continue
        wanted = {dtype_read_by(user, node, decision_of) for user in node.users}
        dtype = wanted.pop() if len(wanted) == 1 else None
        if dtype is not None and is_half(dtype) and (node.is_cast_once or not _is_repeated(node)):
            decision_of[node] = decision._replace(compute_dtype=dtype, stored_dtype=dtype)


def _is_repeated(node: Node) -> bool:
    """Return whether a weight has several readers, or a reader that may repeat it."""
    return len(node.users) > 1 or any(user.loop != node.loop or user.name in MEETS for user in node.users)
