"""Find products that count as sums.

A tensor core multiplies blocks of at least 8 columns, so products of fewer columns are float32 sums. XLA computes a
product with a vector as an elementwise multiplication and a sum. A product with a constant mask, or a mean by a mask,
adds elements of the other operand. Its result is float32, and its operands are half.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import sources_of_weight
from jaxmp.engine.nodes import Node, Step, inputs_of
from jaxmp.engine.states import FULL, HALF, SOURCE, State
from jaxmp.program.equations import Size, aval_of
from jaxmp.program.primitives import PRODUCTS

_BLOCK = 8
"""The fewest rows and columns that a tensor core multiplies."""


def make_sums(nodes: Sequence[Node], fixed: Collection[Node]) -> None:
    """Make products float32 if tensor cores are no faster, and mark products with masks.

    The author's half products do not change, and neither do products that a region or an override of operations makes
    half.

    Args:
      nodes: the nodes of a graph.
      fixed: the nodes of operations that depend only on constants.
    """
    for node in nodes:
        is_decided_here = node.kind is HALF and not node.requested and node.original_dtype.itemsize == 4
        if not is_decided_here or node.name not in PRODUCTS:
            continue
        assert node.step is not None
        left, right, *sizes = node.step.operands
        if left is None or right is None or sizes:  # a ragged product also reads the sizes of its groups
            continue
        if _is_sum(node.step, left, right):
            node.kind, node.initial_state = FULL, State.FLOAT32
            node.step.kind, node.step.reason = FULL, "no faster on tensor cores"
            node.step.is_sum = True
        elif any(_adds_elements(operand) and (operand in fixed or operand.kind is SOURCE) for operand in (left, right)):
            node.adds_by_mask, node.step.reason = True, "a sum by a constant mask"


def _is_sum(step: Step, left: Node, right: Node) -> bool:
    """Return whether tensor cores would not compute a product faster."""
    if step.eqn.primitive.name == "dot_general":
        return _is_matrix_sum(step, left, right)
    return _is_convolved_window(step, left, right)


def _is_matrix_sum(step: Step, left: Node, right: Node) -> bool:
    """Return whether tensor cores would not compute a matrix product faster."""
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


def _is_convolved_window(step: Step, image: Node, window: Node) -> bool:
    """Return whether tensor cores would not compute a convolution faster.

    This is true for a constant window, as in a moving average, and for a few single channels. A learned depthwise
    convolution of many channels is a layer, which would need twice the memory in float32.
    """
    output_axis, input_axis, *_ = step.eqn.params["dimension_numbers"].rhs_spec
    shape, groups = aval_of(step.eqn.invars[1]).shape, step.eqn.params["feature_group_count"]
    inputs, outputs = shape[input_axis], shape[output_axis] // groups
    if window.is_constant and not any(leaf.is_one_hot for leaf in _leaves(window)):
        return _is_small(inputs) and _is_small(outputs)
    return inputs == outputs == 1 and _is_small(groups)


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
    """Return whether a value comes from masks and literals only, as a one-hot vector does."""
    if not node.is_constant:
        return False
    return all(leaf.is_mask or (leaf.kind is SOURCE and not leaf.shape) for leaf in _leaves(node))


def _adds_elements(node: Node) -> bool:
    """Return whether a value is a mask by which a product adds elements.

    A one-hot mask picks elements, and an initial state of zeros is no mask.
    """
    if not _is_mask(node):
        return False
    leaves = _leaves(node)
    is_zero = all(leaf.const == (0.0, 0.0) for leaf in leaves)
    return not is_zero and not any(leaf.is_one_hot for leaf in leaves)


def _leaves(node: Node) -> list[Node]:
    """Return the values without floating operands from which a value is computed."""
    return [value for value in reachable([node], inputs_of) if not value.inputs]


def _is_small(size: Size) -> bool:
    """Return whether a size is below that of a tensor core's block. Symbolic sizes of an export are not."""
    return isinstance(size, int) and size < _BLOCK
