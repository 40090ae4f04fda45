"""All decisions about a program, as one value that emission and plans read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxmp.engine.decide import decide
from jaxmp.engine.float8_products import Float8Product, choose_float8
from jaxmp.engine.nodes import Graph, Node, Step
from jaxmp.engine.reads import ReadDtypes, RepeatedReads, reads_of_steps
from jaxmp.engine.value_decision import Decision
from jaxmp.program.equations import asks_for_what_is_missing
from jaxmp.program.repeated_casts import sums_half


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Decisions:
    """The decisions about a program.

    Attributes:
      graph: the graph of the program.
      decision_of: the decision on each value.
      reads: the dtypes in which each step reads its operands.
      repeated_reads: for each scan, the half operands that it reads in float32.
      float8: the float8 products; for each other half product with a recipe, the reason why it is not float8.
      unchanged: the steps that are emitted as they are, with their bodies.
    """

    graph: Graph
    decision_of: Mapping[Node, Decision]
    reads: Mapping[Step, ReadDtypes] = dataclasses.field(default_factory=dict)
    repeated_reads: Mapping[Step, RepeatedReads] = dataclasses.field(default_factory=dict)
    float8: Mapping[Step, Float8Product | str] = dataclasses.field(default_factory=dict)
    unchanged: Collection[Step] = ()

    def float8_product(self, step: Step) -> Float8Product | None:
        """Return how a step is emitted in float8, or None."""
        choice = self.float8.get(step)
        return choice if isinstance(choice, Float8Product) else None

    def key_of(self, step: Step) -> Any:
        """Return a key of the decisions about a step and its bodies.

        Steps with equal equations and keys are emitted alike.
        """
        results = [self.decision_of[node] for node in step.nodes if node is not None]
        nodes = tuple((result.compute, result.dtype, result.postponed_cast) for result in results)
        operands = tuple(
            node is not None and (node.is_cast_once, self.decision_of[node].postponed_cast) for node in step.operands
        )
        inner = tuple(tuple(map(self.key_of, body.steps)) for body in step.inner)
        # `reads` is part of the key, because the dtypes of comparisons also depend on constants.
        reads = tuple(self.reads[step])
        return nodes, operands, step in self.unchanged, self.float8_product(step), reads, inner


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


def _unchanged_steps(graph: Graph, decision_of: Mapping[Node, Decision], changed: Collection[Step]) -> set[Step]:
    """Return the steps that are emitted as they are. The steps ``changed`` are known to change."""
    changed_nodes = set[Node]()
    for node, decision in decision_of.items():
        if decision.postponed_cast is not None or decision.dtype != node.written:
            changed_nodes.add(node)
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
    return decision.compute is None and (decision.dtype.itemsize > 2 or not sums_half(step.eqn))
