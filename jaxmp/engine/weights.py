"""Find the weights of products."""

from __future__ import annotations

from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node
from jaxmp.engine.states import Kind
from jaxmp.program.primitives import CAST, Class, Trait, of_class, with_trait
from jaxmp.program.values import BRANCHES, CARRY

COPIES = of_class(Class.CLEAR) | with_trait(Trait.CONCATENATES) | {CAST, CARRY, BRANCHES}
"""Operations whose results are copies of their operands."""
_SELECTION = "select_n"


def sources_of_weight(node: Node) -> set[Node]:
    """Return ``node`` and all values that it copies by moves, casts or selections.

    If ``node`` is computed, or consists of looked-up rows, it is not a weight, and the set is empty.
    """

    def is_moved(value: Node) -> bool:
        # A value that is computed from integers has no inputs here, and is not a weight. Looked-up rows are not a
        # weight either, because they belong to an example.
        if value.name == _SELECTION:
            return all(operand.origin.shape for operand in value.inputs)  # a value selected from scalars is a mask
        return bool(value.inputs) and value.name in COPIES and not (value.is_looked_up and has_rows(value))

    copies = COPIES | {_SELECTION}  # `jax.vmap` turns a conditional into selections of its operands
    path = {*reachable([node], lambda value: value.inputs if value.name in copies else ())}
    return path if all(value.kind is Kind.SOURCE or is_moved(value) for value in path) else set()


def has_rows(node: Node) -> bool:
    """Return whether a value is several rows of a table, picked by indices."""
    return node.name == "gather" and len(node.shape) >= len(node.inputs[0].shape)
