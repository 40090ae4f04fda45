"""Decide the dtypes of a program on its whole graph.

Each value has a state: undecided, half, float32, or beyond half (float32, because half precision cannot represent the
value). Rules raise states until no state rises any more. Then the undecided values between two products become half. A
state only rises, so the dtypes do not depend on the order of the rules. docs/autocast.md lists the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from jaxmp.base.dtypes import is_half
from jaxmp.engine.activations import find_activations, find_half_copies
from jaxmp.engine.amplifiers import raise_amplified
from jaxmp.engine.cancellation import raise_cancelled
from jaxmp.engine.casts import move_casts
from jaxmp.engine.decisions import Decisions
from jaxmp.engine.float8_products import Float8Product, choose_float8
from jaxmp.engine.joins import raise_joins
from jaxmp.engine.loops import raise_in_loops
from jaxmp.engine.neighbours import Neighbours
from jaxmp.engine.nodes import Graph, Node, Step
from jaxmp.engine.raised_states import States
from jaxmp.engine.reads import reads_of_steps
from jaxmp.engine.states import CLEAR, HALF, KEPT, SOURCE, Rule, State
from jaxmp.engine.value_decision import Decision
from jaxmp.program.equations import asks_for_what_is_missing
from jaxmp.program.primitives import CAST
from jaxmp.program.repeated_casts import sums_half

RAISERS = (raise_joins, raise_amplified, raise_cancelled, raise_in_loops)
"""The rules that do not read the states of neighbours. Their order does not matter."""
_FLOAT32 = np.dtype(np.float32)


def decide_program(graph: Graph) -> Decisions:
    """Decide the dtypes of a program."""
    decision_of = decide(graph)
    if not graph.changes:
        return Decisions(graph, decision_of)
    float8 = choose_float8(graph, decision_of)
    reads, repeated_reads = reads_of_steps(graph, decision_of)
    changed = {step for step, choice in float8.items() if isinstance(choice, Float8Product)} | repeated_reads.keys()
    unchanged = _unchanged_steps(graph, decision_of, changed)
    return Decisions(graph, decision_of, reads, repeated_reads, float8, unchanged)


# -- the dtype of each value -------------------------------------------------------------------------------------------


class _Dtypes(NamedTuple):
    """The dtypes of a :class:`Decision`, under the same names."""

    compute_dtype: np.dtype | None
    stored_dtype: np.dtype
    value_dtype: np.dtype


def decide(graph: Graph) -> dict[Node, Decision]:
    """Return the decision on every value of a graph."""
    if not graph.changes:
        return {node: _decision(_original_dtypes(node), node.initial_state) for node in graph.nodes}
    states = States(graph.nodes)
    for raise_states in RAISERS:
        raise_states(graph, states)
    activations = find_activations(graph.nodes, states)
    neighbours = Neighbours(states, activations, find_half_copies(graph, states, activations))
    neighbours.settle(graph.nodes)
    neighbours.lower(graph.nodes)
    decision_of: dict[Node, Decision] = {}
    for node in graph.nodes:
        dtypes = _dtypes(node, states[node], decision_of)
        decision_of[node] = _decision(dtypes, states[node], states.rules.get(node), states.causes.get(node))
    move_casts(graph.nodes, decision_of)
    return decision_of


def _decision(dtypes: _Dtypes, state: State, rule: Rule | None = None, cause: Node | None = None) -> Decision:
    return Decision(**dtypes._asdict(), state=state, rule=rule, cause=cause)


def _original_dtypes(node: Node) -> _Dtypes:
    """Return the dtypes of an operation that keeps its original dtypes."""
    dtype = node.argument_dtype or node.original_dtype
    return _Dtypes(None, dtype, dtype)


def _dtypes(node: Node, state: State, decision_of: Mapping[Node, Decision]) -> _Dtypes:
    """Return the dtypes of an operation and of its result.

    Args:
      node: the operation.
      state: its state, which no rule raises any more.
      decision_of: the decisions on its operands.
    """
    if node.kind is CLEAR and node.inputs:
        return _dtypes_of_move(node, decision_of[node.inputs[0]])
    if node.kind in (SOURCE, CLEAR, KEPT):
        return _original_dtypes(node)
    is_half_originally = is_half(node.original_dtype)
    half = node.original_dtype if is_half_originally or node.half is None else node.half
    if node.has_float32_result:
        return _Dtypes(half, _FLOAT32, _FLOAT32)
    if state >= State.FLOAT32:
        return _Dtypes(_FLOAT32, _FLOAT32, _FLOAT32)
    if node.kind is HALF or (state is State.HALF and node.before_product):
        return _Dtypes(half, half, half)
    return _original_dtypes(node)


def _dtypes_of_move(node: Node, operand: Decision) -> _Dtypes:
    """Return the dtypes of a move of data, which computes nothing."""
    if node.is_cast_by_readers:
        return _Dtypes(None, operand.stored_dtype, node.original_dtype)
    if node.name == CAST:  # jaxmp's own cast to float32, or a cast to the same dtype
        return _Dtypes(None, operand.stored_dtype, operand.stored_dtype)
    return _Dtypes(None, operand.value_dtype, operand.value_dtype)


# -- the steps that keep their dtypes ----------------------------------------------------------------------------------


def _unchanged_steps(graph: Graph, decision_of: Mapping[Node, Decision], changed: Collection[Step]) -> set[Step]:
    """Return the steps that are emitted as they are. The steps ``changed`` are known to change."""
    changed_nodes = {node for node, decision in decision_of.items() if decision.stored_dtype != node.original_dtype}
    unchanged = set[Step]()
    for step in graph.steps:  # the steps in a body come first
        if step in changed or not changed_nodes.isdisjoint([*step.operands, *step.nodes]):
            continue
        inside = (inner for body in step.inner for inner in body.steps)
        if _keeps_dtypes(step, decision_of) and all(inner in unchanged for inner in inside):
            unchanged.add(step)
    return unchanged


def _keeps_dtypes(step: Step, decision_of: Mapping[Node, Decision]) -> bool:
    """Return whether an equation whose operands and results keep their dtypes changes nothing else.

    The equations in its bodies may change.
    """
    params = step.eqn.params
    if "precision" in params and asks_for_what_is_missing(params):
        return False
    if step.bodies is not None:  # derivative rules are decided when they run
        return not (step.bodies.has_rule and step.region.level != "written")
    if step.node is None:
        return True
    decision = decision_of[step.node]
    is_half_sum = is_half(decision.stored_dtype) and sums_half(step.eqn)
    return decision.compute_dtype is None and not is_half_sum
