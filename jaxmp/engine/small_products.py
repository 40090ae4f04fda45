"""Find products that tensor cores would not compute faster. Such a product counts as a sum.

A tensor core multiplies blocks of at least 8 columns. XLA computes a product with a vector as an elementwise
multiplication and a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node, Step, inputs_of
from jaxmp.engine.states import FULL, HALF, SOURCE, State
from jaxmp.engine.weights import sources_of_weight
from jaxmp.program.equations import Size, aval_of
from jaxmp.program.primitives import CAST

_BLOCK = 8
"""The fewest rows and columns that a tensor core multiplies."""


def make_sums(nodes: Sequence[Node]) -> None:
    """Make matrix products float32 if tensor cores would not compute them faster.

    The author's half products do not change, and neither do products that a region or an override of operations makes
    half.
    """
    for node in nodes:
        if (
            node.name == "dot_general"
            and node.kind is HALF
            and not node.requested
            and node.original_dtype.itemsize == 4
        ):
            assert node.step is not None
            if _is_sum(node.step):
                node.kind, node.initial_state = FULL, State.FLOAT32
                node.step.kind, node.step.reason = FULL, "no faster on tensor cores"
                node.step.is_sum = True


def _is_sum(step: Step) -> bool:
    """Return whether tensor cores would not compute a matrix product faster."""
    left, right = step.operands
    if left is None or right is None:
        return False
    (left_axes, right_axes), (left_batch, right_batch) = step.eqn.params["dimension_numbers"]
    left_shape, right_shape = (aval_of(atom).shape for atom in step.eqn.invars)
    terms = math.prod(left_shape[axis] for axis in left_axes)
    rows = [size for axis, size in enumerate(left_shape) if axis not in (*left_axes, *left_batch)]
    columns = [size for axis, size in enumerate(right_shape) if axis not in (*right_axes, *right_batch)]
    if _is_small(terms) and (_is_small(math.prod(rows)) or _is_small(math.prod(columns))):
        return True
    if _is_mask(left) and _is_mask(right):
        return True
    left_sums = _is_narrow(left, rows) and not _is_weight_matrix(right, columns)
    right_sums = _is_narrow(right, columns) and not _is_weight_matrix(left, rows)
    return left_sums or right_sums


def _is_narrow(operand: Node, sizes: Sequence[Size]) -> bool:
    """Return whether an operand is a vector, or a constant of few columns.

    Args:
      operand: one side of a matrix product.
      sizes: its rows or columns: the sizes of the axes that the product keeps, without batch axes.
    """
    columns = math.prod(sizes)
    return columns == 1 or (_is_small(columns) and operand.is_constant)


def _is_weight_matrix(operand: Node, sizes: Sequence[Size]) -> bool:
    """Return whether an operand is an argument or a constant with rows or columns.

    A single example times a weight is no sum, so that a layer has the same dtypes for one example as for many.
    """
    return bool(sizes) and bool(sources_of_weight(operand))


def _is_mask(node: Node) -> bool:
    """Return whether a value comes from bools and literals only, as a one-hot vector does."""
    if not node.is_constant:
        return False
    leaves = [value for value in reachable([node], inputs_of) if not value.inputs]
    return all(_is_cast_of_bools(leaf) or (leaf.kind is SOURCE and not leaf.shape) for leaf in leaves)


def _is_cast_of_bools(node: Node) -> bool:
    return node.name == CAST and node.step is not None and aval_of(node.step.eqn.invars[0]).dtype == bool


def _is_small(size: Size) -> bool:
    """Return whether a size is below that of a tensor core's block. Symbolic sizes of an export are not."""
    return isinstance(size, int) and size < _BLOCK
