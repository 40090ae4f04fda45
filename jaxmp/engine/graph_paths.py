"""Find the readers of a value, and search back past its constant factors."""

from __future__ import annotations

from collections.abc import Collection

from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node
from jaxmp.engine.states import CLEAR
from jaxmp.program.primitives import BOUNDS, SUMS, Trait, with_trait

SQUARES = with_trait(Trait.POWER) - {"pow"}
ROOTS = with_trait(Trait.SQUARE_ROOT)
SCALES = with_trait(Trait.MULTIPLIES) | {"neg"}
OFFSETS = SUMS | SCALES | BOUNDS


def readers_of(node: Node) -> list[Node]:
    """Return the operations that compute with a value or with a moved copy of it."""
    after = reachable(node.users, lambda user: user.users if user.kind is CLEAR else ())
    return [user for user in after if user.kind is not CLEAR]


def multiple_of(node: Node, through: Collection[str] = SCALES, has_moves: bool = True) -> Node:
    """Return the value from which ``node`` is computed with constants only.

    The search goes back through the operations in ``through``: by default, multiplications by constant factors. All
    other operands of these operations must be constants. With ``has_moves``, it also goes back through moves of data.
    """
    while True:
        node = node.origin if has_moves else node
        below = _only_variable(node) if node.name in through else None
        if below is None or (node.name == "div" and below is not node.inputs[0]):
            return node
        node = below


def _only_variable(node: Node) -> Node | None:
    """Return the only operand that is not a constant, or None."""
    variable = [operand for operand in node.inputs if not operand.is_constant]
    return variable[0] if len(variable) == 1 else None
