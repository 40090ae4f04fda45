"""All decisions about a program, as one value that emission and plans read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp.engine.decide import decide
from jaxmp.engine.float8_products import Float8Product, choose_float8
from jaxmp.engine.graph import Graph, Node, Step
from jaxmp.engine.operation_patterns import OperationPattern, find_patterns
from jaxmp.engine.reads import ReadDtypes, RepeatedReads, reads_of_steps
from jaxmp.program.equations import asks_for_what_is_missing
from jaxmp.program.repeated_casts import sums_half


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Decisions:
    """The decisions about a program. The nodes of the graph have their states and dtypes.

    Attributes:
      graph: the graph of the program.
      changes: False if the program has no product. Then every operation keeps its dtypes.
      wanted: the results that are requested in half.
      patterns: the float32 patterns that a plan names.
      reads: the dtypes in which each step reads its operands.
      repeated_reads: for each scan, the half operands that it reads in float32.
      float8: the float8 products; for each other half product with a recipe, the reason why it is not float8.
      unchanged: the steps that are emitted as they are, with their bodies.
    """

    graph: Graph
    changes: bool
    wanted: Sequence[Node]
    patterns: Sequence[OperationPattern]
    reads: Mapping[Step, ReadDtypes]
    repeated_reads: Mapping[Step, RepeatedReads]
    float8: Mapping[Step, Float8Product | str]
    unchanged: Collection[Step]

    def float8_product(self, step: Step) -> Float8Product | None:
        """Return how a step is emitted in float8, or None."""
        choice = self.float8.get(step)
        return choice if isinstance(choice, Float8Product) else None

    def key_of(self, step: Step) -> Any:
        """Return a key of the decisions about a step and its bodies.

        Steps with equal equations and keys are emitted alike.
        """
        nodes = tuple((node.compute, node.dtype, node.deferred_cast) for node in step.nodes if node is not None)
        operands = tuple(node is not None and (node.is_cast_once, node.deferred_cast) for node in step.operands)
        inner = tuple(tuple(map(self.key_of, body.steps)) for body in step.inner)
        # `reads` is part of the key, because the dtypes of comparisons also depend on constants.
        reads = tuple(self.reads[step])
        return nodes, operands, step in self.unchanged, self.float8_product(step), reads, inner


def decide_program(graph: Graph, args: Sequence[Any], dtypes: Sequence[Any], force: bool = False) -> Decisions:
    """Decide the dtypes of a program.

    Args:
      graph: the graph of the program. The states and dtypes of its nodes are set.
      args: the arguments, or their types. Their dtypes may differ from the traced dtypes.
      dtypes: for each result, its requested dtype or None.
      force: whether to decide all operations even if there is no product.
    """
    for node, value in zip(graph.sources, args, strict=True):
        if node is not None:
            node.dtype = np.dtype(jax.typeof(value).dtype)
    wanted = _results_wanted_in_half(graph, dtypes)
    changes = decide(graph, wanted, force)
    if not changes:
        return Decisions(graph, False, wanted, (), {}, {}, {}, ())
    float8 = choose_float8(graph)
    reads, repeated_reads = reads_of_steps(graph)
    changed = {step for step, choice in float8.items() if isinstance(choice, Float8Product)} | repeated_reads.keys()
    unchanged = _unchanged_steps(graph, changed)
    return Decisions(graph, True, wanted, find_patterns(graph), reads, repeated_reads, float8, unchanged)


def _results_wanted_in_half(graph: Graph, dtypes: Sequence[Any]) -> list[Node]:
    """Return the results that are requested in half, and mark those that are requested in float32."""
    wanted = list[Node]()
    for node, dtype in zip(graph.body.results, dtypes, strict=True):
        if node is not None and dtype is not None and dtype.itemsize == 2 and node not in wanted:
            wanted.append(node)
        elif node is not None and dtype is not None:
            node.needs_float32 = True
    return wanted


def _unchanged_steps(graph: Graph, changed: Collection[Step]) -> set[Step]:
    """Return the steps that are emitted as they are. The steps ``changed`` are known to change."""
    changed_nodes = {node for node in graph.nodes if node.deferred_cast is not None or node.dtype != node.written}
    unchanged = set[Step]()
    for step in graph.steps:  # the steps in a body come first
        inside = (inner for body in step.inner for inner in body.steps)
        if step not in changed and _keeps_dtypes(step, changed_nodes) and all(inner in unchanged for inner in inside):
            unchanged.add(step)
    return unchanged


def _keeps_dtypes(step: Step, changed: set[Node]) -> bool:
    """Return whether an equation changes nothing itself. The equations in its bodies may change."""
    node, params = step.node, step.eqn.params
    if not changed.isdisjoint(step.operands) or not changed.isdisjoint(step.nodes):
        return False
    if "precision" in params and asks_for_what_is_missing(params):
        return False
    if step.bodies is None:
        return node is None or (node.compute is None and (node.dtype.itemsize > 2 or not sums_half(step.eqn)))
    # Derivative rules are decided when they run.
    return not (step.bodies.has_rule and step.region.level != "written")
