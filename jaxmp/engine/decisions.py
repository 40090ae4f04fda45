"""All decisions about a program, as one value that emission and plans read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping

from jaxmp.engine.float8_products import Float8Product
from jaxmp.engine.nodes import Graph, Node, Step, StepBody
from jaxmp.engine.reads import Reads, RepeatedReads
from jaxmp.engine.value_decision import Decision


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Decisions:
    """The decisions about a program.

    Attributes:
      graph: the graph of the program.
      decision_of: the decision on each value.
      reads: the casts of the operands of each step, and of the results of each body.
      repeated_reads: for each scan, the half operands that it reads in float32.
      float8: the float8 products; for each other half product with a recipe, the reason why it is not float8.
      unchanged: the steps that are emitted as they are, with their bodies.
    """

    graph: Graph
    decision_of: Mapping[Node, Decision]
    reads: Mapping[Step | StepBody, Reads] = dataclasses.field(default_factory=dict)
    repeated_reads: Mapping[Step, RepeatedReads] = dataclasses.field(default_factory=dict)
    float8: Mapping[Step, Float8Product | str] = dataclasses.field(default_factory=dict)
    unchanged: Collection[Step] = ()

    def float8_product(self, step: Step) -> Float8Product | None:
        """Return how a step is emitted in float8, or None."""
        choice = self.float8.get(step)
        return choice if isinstance(choice, Float8Product) else None

    def key_of(self, step: Step) -> Hashable:
        """Return a key of the decisions about a step and its bodies.

        Steps with equal equations and keys are emitted alike.
        """
        results = [self.decision_of[node] for node in step.nodes if node is not None]
        nodes = tuple((result.compute_dtype, result.stored_dtype, result.value_dtype) for result in results)
        operands = tuple(node is not None and node.is_cast_once for node in step.operands)
        inner = tuple((*map(self.key_of, body.steps), tuple(self.reads[body])) for body in step.inner)
        reads = tuple(self.reads[step])
        return nodes, operands, step in self.unchanged, self.float8_product(step), reads, inner
