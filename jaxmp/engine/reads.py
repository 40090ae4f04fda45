"""The dtypes in which each equation of a decided program reads its operands.

*Half* is half precision: float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import Var

from jaxmp.base.dtypes import is_half
from jaxmp.engine.casts import read_in
from jaxmp.engine.nodes import Graph, Node, Step, StepBody
from jaxmp.engine.states import KEPT
from jaxmp.engine.value_decision import Decision
from jaxmp.program.equations import Bodies, is_literal, opened
from jaxmp.program.primitives import BOUNDS, CAST, COMPARISONS, Trait, with_trait
from jaxmp.program.repeated_casts import read_often

_EQUALITIES, _FLOAT32 = with_trait(Trait.EQUATES), np.dtype(np.float32)

ReadDtypes = Sequence[np.dtype | None]
"""The dtype in which an equation reads each operand; None for no cast."""
RepeatedReads = Sequence[tuple[int, np.dtype]]
"""Operands of a scan that are half, and that many iterations read: the position and the dtype of each.

The scan reads them in float32, so that their cotangents are summed in float32. Its body casts them back to half.
"""


def reads_of_steps(
    graph: Graph, decision_of: Mapping[Node, Decision]
) -> tuple[dict[Step, ReadDtypes], dict[Step, RepeatedReads]]:
    """Return the dtypes in which each step reads its operands, and the repeated reads of scans."""
    reader = _ReadsOfSteps(decision_of)
    for step in graph.steps:
        reader.add(step)
    return reader.reads, reader.repeated


def is_widening(step: Step, decision_of: Mapping[Node, Decision]) -> bool:
    """Return whether an equation casts a value that is now half to float32."""
    node, operand = step.node, step.operands[0] if step.eqn.primitive.name == CAST else None
    if node is None or operand is None:
        return False
    return decision_of[operand].value_dtype.itemsize < decision_of[node].stored_dtype.itemsize


class _ReadsOfSteps:
    """A reader of steps. It reads the steps in a body before the step around the body."""

    def __init__(self, decision_of: Mapping[Node, Decision]) -> None:
        self.decision_of = decision_of
        self.reads: dict[Step, ReadDtypes] = {}
        self.repeated: dict[Step, RepeatedReads] = {}
        self._reads_in_body: dict[StepBody, Mapping[Var, set[np.dtype | None]]] = {}

    def add(self, step: Step) -> None:
        if step.bodies is None:
            self.reads[step] = _reads_of_operation(step, self.decision_of)
            return
        if repeated := _repeated_reads(step, self.decision_of):
            self.repeated[step] = repeated
        self.reads[step] = self._reads_of_bodies(step, step.bodies)

    def _reads_of_bodies(self, step: Step, bodies: Bodies) -> ReadDtypes:
        # Half operands stay half, because a `jax.vmap` may broadcast them for each example.
        reads = [_half_dtype_of(operand, self.decision_of) for operand in step.operands]
        if bodies.is_loop:
            for n, join in enumerate(step.joins, bodies.start):
                reads[n] = self.decision_of[join].stored_dtype if join else reads[n]
            for position, _ in self.repeated.get(step, ()):
                reads[position] = _FLOAT32
        elif bodies.is_call:
            for position, operand in enumerate(step.operands):
                if operand is not None and operand.is_cast_once:  # so that the call does not save a float32 copy
                    reads[position] = self._half_read(step.inner[0], bodies, position)
                # The body of a derivative rule is traced in the original dtypes, so a postponed cast comes before it.
                if operand is not None and bodies.has_rule:
                    reads[position] = reads[position] or self.decision_of[operand].postponed_cast
        return reads

    def _half_read(self, body: StepBody, bodies: Bodies, position: int) -> np.dtype | None:
        """Return the half dtype in which all readers read a body's operand, or None."""
        if body not in self._reads_in_body:
            dtypes_of: dict[Var, set[np.dtype | None]] = {}
            for step in body.steps:
                # A value that the author casts to half may already be half before this cast.
                is_cast = step.eqn.primitive.name == CAST and step.node is not None
                reads = [self.decision_of[step.node].stored_dtype] if is_cast and step.node else self.reads[step]
                for atom, dtype in zip(step.eqn.invars, reads, strict=True):
                    if not is_literal(atom):
                        dtypes_of.setdefault(atom, set()).add(dtype)
            self._reads_in_body[body] = dtypes_of
        jaxpr, _ = opened(bodies.jaxprs[0])
        var = jaxpr.invars[position]
        if var in jaxpr.outvars:
            return None
        dtypes = self._reads_in_body[body].get(var, set())
        return next((dtype for dtype in dtypes if len(dtypes) == 1 and is_half(dtype)), None)


def _half_dtype_of(operand: Node | None, decision_of: Mapping[Node, Decision]) -> np.dtype | None:
    """Return the dtype of a value that is half itself, not by a postponed cast, or None."""
    dtype = None if operand is None else decision_of[operand].stored_dtype
    return dtype if is_half(dtype) else None


def _repeated_reads(step: Step, decision_of: Mapping[Node, Decision]) -> RepeatedReads:
    bodies = step.bodies
    if bodies is None or not (bodies.is_loop and bodies.has_gradient) or step.node is None or step.node.in_rule:
        return []
    repeated = []
    for position in (*range(bodies.start), *(bodies.start + n for n in step.unchanged_carries)):
        operand = step.operands[position]
        dtype = decision_of[operand].stored_dtype if operand is not None else None
        if is_half(dtype) and read_often(step.eqn, position):
            repeated.append((position, dtype))
    return repeated


def _reads_of_operation(step: Step, decision_of: Mapping[Node, Decision]) -> ReadDtypes:
    name, node, operands = step.eqn.primitive.name, step.node, step.operands
    if node is None and name in COMPARISONS:
        largest: list[Node] = []
        if name in _EQUALITIES:
            # The derivative of a maximum compares the maximum with its operands, so all of them must be rounded alike.
            bounded = [operand for operand in operands if operand and operand.name in BOUNDS]
            largest = [bound for bound in bounded if {*bound.inputs} & {*operands}]
        compared = [operand for operand in largest or operands if operand and operand.const != (0.0, 0.0)]
        dtypes = {decision_of[operand].value_dtype for operand in compared}
        if len(dtypes) == 1 and (largest or dtypes != {_FLOAT32}):
            return [None if operand is None else next(iter(dtypes)) for operand in operands]
    if node is None:
        return [None if operand is None else operand.original_dtype for operand in operands]
    if name == CAST and (node.kind is KEPT or is_widening(step, decision_of)):  # the cast may read any dtype
        return [None if operand is None else decision_of[operand].postponed_cast for operand in operands]
    return [None if operand is None else read_in(node, operand, decision_of) for operand in operands]
