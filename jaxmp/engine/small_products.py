"""Find products that tensor cores would not compute faster. Such a product counts as a sum.

A tensor core multiplies blocks of at least 8 columns. XLA computes a product with a vector as an elementwise
multiplication and a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node, Step, inputs_of
from jaxmp.engine.states import FULL, HALF, SOURCE, State
from jaxmp.engine.weights import sources_of_weight
from jaxmp.program.primitives import CAST

_BLOCK = 8
"""The fewest rows and columns that a tensor core multiplies."""


class _Sizes(NamedTuple):
    """The sizes of a matrix product, without its batch axes. In an export, they may be symbolic."""

    rows: Any
    columns: Any
    terms: Any  # the length of its sums


def make_sums(nodes: Sequence[Node]) -> None:
    """Make matrix products float32 if tensor cores would not compute them faster.

    The author's half products do not change, and neither do products that a region or an override of operations makes
    half.
    """
    for node in nodes:
        if node.name == "dot_general" and node.kind is HALF and not node.requested and node.written.itemsize == 4:
            assert node.step is not None
            if _is_sum(node.step):
                node.kind, node.initial_state = FULL, State.FLOAT32
                node.step.kind, node.step.reason = FULL, "no faster on tensor cores"
                node.step.is_sum = True


def _is_sum(step: Step) -> bool:
    """Return whether tensor cores would not compute a matrix product faster.

    These are products with a vector, products with a constant of few columns (a grid of coordinates), products of small
    matrices (a rotation of points), and counts, whose operands come from integers. A vector times a weight is none of
    them, because it is the product of a batch with one example.
    """
    left, right = step.operands
    if left is None or right is None:
        return False
    if _is_from_integers(left) and _is_from_integers(right):
        return True
    rows, columns, terms = _sizes(step)
    has_few_rows = rows == 1 or (_is_small(rows) and (left.is_constant or _is_small(terms)))
    has_few_columns = columns == 1 or (_is_small(columns) and (right.is_constant or _is_small(terms)))
    if not (has_few_rows or has_few_columns):
        return False
    # If both operands could be the weight, the right one is: `x @ w`.
    right_is_source = bool(sources_of_weight(right))
    right_is_weight = right_is_source and not (_is_small(columns) or _is_small(terms))
    left_is_source = not right_is_source and bool(sources_of_weight(left))
    left_is_weight = left_is_source and not (_is_small(rows) or _is_small(terms))
    return (has_few_rows and not right_is_weight) or (has_few_columns and not left_is_weight)


def _is_from_integers(node: Node) -> bool:
    """Return whether a value comes from integers, bools and literals only, as a one-hot vector does.

    Random numbers do not, because their bits become floats without a cast.
    """
    if not node.is_constant:
        return False
    leaves = (value for value in reachable([node], inputs_of) if not value.inputs)
    return all(leaf.name in (CAST, "iota") or (leaf.kind is SOURCE and not leaf.shape) for leaf in leaves)


def _is_small(size: Any) -> bool:
    """Return whether a size is below that of a tensor core's block. Symbolic sizes of an export are not."""
    return isinstance(size, int) and size < _BLOCK


def _sizes(step: Step) -> _Sizes:
    (left_axes, right_axes), (left_batch, right_batch) = step.eqn.params["dimension_numbers"]
    left, right = (atom.aval.shape for atom in step.eqn.invars)

    def free_size(shape: Sequence[Any], bound: Sequence[int]) -> Any:
        return math.prod(size for axis, size in enumerate(shape) if axis not in bound)

    rows, columns = free_size(left, (*left_axes, *left_batch)), free_size(right, (*right_axes, *right_batch))
    return _Sizes(rows, columns, math.prod(left[axis] for axis in left_axes))
