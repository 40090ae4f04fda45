"""Search a graph: readers, the value behind constant factors, the terms of a sum, and the weights of products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node
from jaxmp.engine.states import CLEAR, Kind
from jaxmp.program.primitives import CAST, COMBINATIONS, POWERS, SUMS, Class, Trait, of_class, with_trait
from jaxmp.program.values import BRANCHES, CARRY

SQUARES = POWERS - {"pow"}
SCALES = with_trait(Trait.MULTIPLIES) | {"neg"}
TOTALS = frozenset(name for name in of_class(Class.ACCUMULATION) if COMBINATIONS.get(name) == "add") - SUMS
"""Sums of many elements of one array."""


def readers_of(node: Node) -> list[Node]:
    """Return the operations that compute with a value or with a moved copy of it."""
    after = reachable(node.users, lambda user: user.users if user.kind is CLEAR else ())
    return [user for user in after if user.kind is not CLEAR]


def value_behind(node: Node, through: Collection[str] = SCALES, has_moves: bool = True) -> Node:
    """Return the value from which ``node`` is computed with constants only.

    The search goes back through the operations in ``through``: by default, multiplications by constant factors. All
    other operands of these operations must be constants. With ``has_moves``, it also goes back through moves of data.
    """
    while True:
        node = node.origin if has_moves else node
        variable = only_variable(node) if node.name in through else None
        is_divisor = node.name == "div" and variable is not node.inputs[0]
        if variable is None or is_divisor:
            return node
        node = variable


def constant_factor(node: Node) -> float:
    """Return the constant factor of a value.

    It is the product of the largest magnitudes of the constants, and 1 for a mean and for a value without constants.
    """
    factor = 1.0
    while (node := node.origin).name in SCALES and (variable := only_variable(node)) is not None:
        constants = [operand.const for operand in node.inputs if operand is not variable]
        magnitudes = constants[0] if constants else (1.0, 1.0)  # a negation has no constant
        if magnitudes is None or (node.name == "div" and variable is not node.inputs[0]):
            break
        smallest, largest = magnitudes
        factor *= 1 / smallest if node.name == "div" and smallest else largest
        node = variable
    return 1.0 if node.name in TOTALS else factor


def only_variable(node: Node) -> Node | None:
    """Return the only operand that is not a constant, or None."""
    variables = [operand for operand in node.inputs if not operand.is_constant]
    return variables[0] if len(variables) == 1 else None


class Terms(NamedTuple):
    """The terms of a sum.

    Attributes:
      terms: the terms, without moves, signs and constant factors. A term that is added several times is listed at least
        twice.
      sums: the sums that are terms themselves. ``terms`` has their terms instead.
    """

    terms: list[Node]
    sums: Collection[Node]


def terms_of(total: Node) -> Terms:
    """Return the terms of a sum.

    A sum that several operations read, as in a residual stream, is a term of its own. Otherwise the search would go
    back to the beginning of the stream.
    """
    terms, stack = list[Node](), list(total.inputs)
    visits = Counter[Node]()
    while stack:
        term = value_behind(stack.pop())
        if term.name not in SUMS or len(term.users) > 1:
            terms.append(term)
        elif visits[term] < 2:  # without a limit, a chain of sums of slices would take exponential time
            visits[term] += 1
            stack += term.inputs
    return Terms(terms, visits.keys())


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
