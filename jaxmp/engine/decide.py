"""Decide the dtypes of a program on its whole graph.

Each value has a state: undecided, half, float32, or beyond half (float32, because half precision cannot represent the
value). Rules raise states until no state rises any more. Then the undecided values between two products become half. A
state only rises, so the dtypes do not depend on the order of the rules. docs/autocast.md lists the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping

from jaxmp.base.dtypes import is_half
from jaxmp.engine.activations import find_activations, find_read_in_half
from jaxmp.engine.amplifiers import raise_amplified
from jaxmp.engine.cancellation import raise_cancelled
from jaxmp.engine.float8_products import Float8Product, choose_float8
from jaxmp.engine.joins import raise_joins
from jaxmp.engine.loops import raise_in_loops
from jaxmp.engine.neighbours import Neighbours
from jaxmp.engine.nodes import Graph, Node, Step, StepBody
from jaxmp.engine.raised_states import States
from jaxmp.engine.reads import Reads, RepeatedReads, move_casts, reads_of_steps
from jaxmp.engine.states import Rule, State
from jaxmp.engine.updates import raise_updated
from jaxmp.engine.value_decision import Decision, decided_dtypes, original_dtypes
from jaxmp.program.equations import asks_for_what_is_missing
from jaxmp.program.repeated_casts import sums_half

RAISERS = (raise_joins, raise_amplified, raise_cancelled, raise_in_loops, raise_updated)
"""The rules that do not read the states of neighbours. Their order does not matter."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Decisions:
    """The decisions about a program.

    Attributes:
      graph: the graph of the program.
      decision_of: the decision on each value.
      reads: the casts of the operands of each step, and of the results of each body.
      repeated_reads: for each scan, the half operands that it reads in float32.
      float8: the float8 products.
      float8_refusals: for each other half product with a recipe, the reason why it is not float8.
      unchanged: the steps that are emitted as they are, with their bodies.
    """

    graph: Graph
    decision_of: Mapping[Node, Decision]
    reads: Mapping[Step | StepBody, Reads] = dataclasses.field(default_factory=dict)
    repeated_reads: Mapping[Step, RepeatedReads] = dataclasses.field(default_factory=dict)
    float8: Mapping[Step, Float8Product] = dataclasses.field(default_factory=dict)
    float8_refusals: Mapping[Step, str] = dataclasses.field(default_factory=dict)
    unchanged: Collection[Step] = ()

    def key_of(self, step: Step) -> Hashable:
        """Return a key of the decisions about a step and its bodies.

        Steps with equal equations and keys are emitted alike.
        """
        results = [self.decision_of[node] for node in step.nodes if node is not None]
        dtypes = tuple((result.compute_dtype, result.stored_dtype) for result in results)
        are_cast_once = tuple(node is not None and node.is_cast_once for node in step.operands)
        bodies = tuple((*map(self.key_of, body.steps), tuple(self.reads[body])) for body in step.inner)
        reads = tuple(self.reads[step])
        return dtypes, are_cast_once, step in self.unchanged, self.float8.get(step), reads, bodies


def decide_program(graph: Graph) -> Decisions:
    """Decide the dtypes of a program."""
    decision_of = decide(graph)
    if not graph.changes:
        return Decisions(graph, decision_of)
    float8, refusals = choose_float8(graph, decision_of)
    reads, repeated_reads = reads_of_steps(graph, decision_of)
    unchanged = _unchanged_steps(graph, decision_of, float8.keys() | repeated_reads.keys())
    return Decisions(graph, decision_of, reads, repeated_reads, float8, refusals, unchanged)


def decide(graph: Graph) -> dict[Node, Decision]:
    """Return the decision on every value of a graph."""
    if not graph.changes:
        return {node: Decision(*original_dtypes(node), node.initial_state) for node in graph.nodes}
    states = States(graph.nodes)
    for raise_states in RAISERS:
        raise_states(graph, states)
    for node in graph.nodes:
        if node.adds_by_mask:  # the other rules may have made the whole product float32
            states.raise_to(node, State.FLOAT32, Rule.MASK)
    activations = find_activations(graph.nodes, states)
    neighbours = Neighbours(states, activations, find_read_in_half(graph, states, activations))
    neighbours.settle(graph.nodes)
    neighbours.lower(graph.nodes)
    decision_of: dict[Node, Decision] = {}
    for node in graph.nodes:
        dtypes = decided_dtypes(node, states, decision_of)
        decision_of[node] = Decision(*dtypes, states[node], states.rules.get(node), states.causes.get(node))
    move_casts(graph.nodes, decision_of)
    return decision_of


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
    """Return whether an equation is emitted as it is if its operands and results keep their dtypes.

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
