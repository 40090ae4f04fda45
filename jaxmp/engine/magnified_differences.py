"""Find values whose small difference from a constant is magnified.

The result of ``sqrt(1 - p² + 1e-6)`` depends on the last digits of ``p`` where ``p`` is near 1. Half precision rounds
these digits away. JAX traces ``sqrt(1 - (x @ y) ** 2 + 1e-6)`` as::

    p = dot_general x y
    a = integer_pow[y=2] p
    b = sub 1.0 a
    c = add b 1e-6
    d = sqrt c

The search goes back from ``d`` in three steps:

1. Find the operand that an operation magnifies where the operand is small: ``d`` is a root, and magnifies ``c``.
2. Find the differences that make this operand small: ``c`` is small where ``b`` is small. Between them may be other
   factors, bounds and an epsilon. ``b`` is a constant minus a value.
3. Find the values whose last digits decide the difference: ``a`` and ``p``. They are returned because ``p`` is a
   product. If ``p`` were an argument of the program, half precision would round nothing, and none would be returned.

Instead of a product, step 3 may find a function that approaches 1, such as the ``tanh`` in ``log(1 - tanh(x)²)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import SCALES, only_variable, terms_of
from jaxmp.engine.nodes import Graph, Node, Step
from jaxmp.engine.states import CLEAR, HALF, JOIN
from jaxmp.program.equations import is_literal
from jaxmp.program.primitives import CHOICES, POWERS, PRODUCTS, SINGULAR, SUMS, Trait, with_trait

_BETWEEN = SCALES | with_trait(Trait.KEEPS_MAGNITUDE) | CHOICES
"""Operations between a difference and the operation that magnifies it, or between a product and the difference."""
_KEEPS_DIGITS = _BETWEEN | POWERS
_ROUNDED = PRODUCTS | with_trait(Trait.SATURATES)
"""The operations whose half result would spoil a difference."""
_SMALLEST_CONSTANT = 0.1
"""A constant below this number is an epsilon against a division by zero. A difference from it does not cancel."""


def values_of_magnified_differences(graph: Graph) -> dict[Node, Node]:
    """Return the values whose last digits decide a magnified difference, each with this difference.

    Equal values are listed once, as their first one (``Node.same``).
    """
    difference_of: dict[Node, Node] = {}
    for step in graph.steps:
        for difference in _magnified_differences(step):
            for value in _rounded_values(difference):
                difference_of.setdefault(value.same, difference)
    return difference_of


# -- step 1: the operand that is magnified -----------------------------------------------------------------------------


def _magnified_operand(step: Step) -> Node | None:
    """Return the operand that a step magnifies where the operand is small, or None.

    Examples are the operand of a root or a logarithm, and the divisor of a division.
    """
    name = step.eqn.primitive.name
    if name == "atan2":  # it is singular only where both operands are 0; elsewhere it magnifies nothing
        return None
    if name not in SINGULAR or (name in POWERS and not _is_exponent_below_1(step.eqn)):
        return None
    operand = step.operands[SINGULAR[name]]
    return operand and operand.origin


def _is_exponent_below_1(power: JaxprEqn) -> bool:
    """Return whether a power has a constant exponent below 1, as a root and the inverse of a square have."""
    if "y" in power.params:
        return bool(power.params["y"] < 1)
    exponent = power.invars[1]
    return is_literal(exponent) and np.ndim(exponent.val) == 0 and exponent.val < 1


# -- step 2: the differences that make it small ------------------------------------------------------------------------


def _magnified_differences(step: Step) -> list[Node]:
    """Return the differences of a constant and a value whose small errors a step magnifies.

    A step that the user makes half rounds its operands itself, so nothing before it needs more digits.
    """
    if step.kind is HALF:
        return []
    if step.eqn.primitive.name == "log1p":  # it adds the constant 1 itself: log1p(-x) is log(1 - x)
        operands = [operand.origin for operand in step.operands if operand is not None]
        return [operand for operand in operands if _is_negated(operand)]
    magnified = _magnified_operand(step)
    values = reachable([] if magnified is None else [magnified], _operands_that_make_small)
    return [value for value in values if _is_difference(value) and _has_large_constant(value)]


def _operands_that_make_small(node: Node) -> list[Node]:
    """Return the operands that make a value small where they are small.

    These are the factors of an elementwise product, the value before an epsilon was added, and the only variable of a
    scale or a bound. A difference has none: its terms are large, and cancel.
    """
    if node.name == "mul":
        return [operand.origin for operand in node.inputs if not operand.is_constant]
    variable = only_variable(node)
    has_epsilon = node.name in SUMS and not _is_difference(node)
    if variable is not None and (has_epsilon or node.name in _BETWEEN):
        return [variable.origin]
    return []


def _is_difference(node: Node) -> bool:
    """Return whether a sum is a constant minus a variable, or the reverse.

    It is written as ``c - x``, ``x - c`` or ``-x + c``.
    """
    has_one_constant = node.name in SUMS and only_variable(node) is not None
    return has_one_constant and (node.name == "sub" or _is_negated(node))


def _is_negated(node: Node) -> bool:
    """Return whether a value falls as its variable rises: -x, c - x, or -x + c."""
    if node.name == "neg":
        return True
    variable = only_variable(node)
    if node.name not in SUMS or variable is None:
        return False
    is_subtracted = node.name == "sub" and variable is not node.inputs[0]
    return is_subtracted or variable.origin.name == "neg"


def _has_large_constant(difference: Node) -> bool:
    """Return whether the constant of a difference is a number that is not an epsilon."""
    constants = [term.origin for term in difference.inputs if term.is_constant]
    if len(constants) != 1:
        return False
    (constant,) = constants
    return constant.shape == () and constant.const is not None and constant.const[1] >= _SMALLEST_CONSTANT


# -- step 3: the values whose digits decide the difference -------------------------------------------------------------


def _rounded_values(difference: Node) -> list[Node]:
    """Return the values whose last digits decide a difference.

    These are products, functions that approach 1, and the values between them and the difference. The result is
    empty if half precision would round none of them.
    """
    # The search does not go through sums. So it also starts at the terms of an operand that is a sum.
    terms, _ = terms_of(difference)
    values = reachable([*difference.inputs, *terms], _operands_with_same_digits)
    computed = [value for value in values if value.after_product]
    is_rounded = any(value.name in _ROUNDED for value in computed)
    return computed if is_rounded else []


def _operands_with_same_digits(node: Node) -> Sequence[Node]:
    """Return the operands whose last digits decide the last digits of a value.

    A computed value is passed if only one of its operands depends on products, as in a scale, a power or a bound. A
    cast to float32 is passed, too.
    """
    if node.kind in (CLEAR, JOIN) or node.is_cast_to_float32:
        return node.inputs
    computed = {operand for operand in node.inputs if operand.after_product}
    if node.name not in _KEEPS_DIGITS or len(computed) != 1:
        return ()
    (operand,) = computed
    is_divisor = node.name == "div" and operand is node.inputs[-1]
    return () if is_divisor else (operand,)
