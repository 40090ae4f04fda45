"""Keep the sum of a float32 value and a product in float32, as type promotion does.

In these examples, no product computes the coordinates ``x``, which are an argument or a constant array::

    a = x + h @ w                             # coordinates that a network updates
    b = jnp.clip(0.5 * a, 0.0, 512.0) + g @ v # a sum with `a`, which is scaled and clipped

A half sum would round ``x``, too. So the sums are float32, and so are the scaled and clipped values between them.
Products read a rounded copy. The residual stream of a network stays half, because it begins with a product or with rows
of a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import SCALES, has_rows, readers_of
from jaxmp.engine.nodes import Graph, Node, shape_read, users_of
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, INFER, JOIN, SOURCE, Rule, State
from jaxmp.program.equations import aval_of, size_of
from jaxmp.program.primitives import CAST, CHOICES, SUMS
from jaxmp.program.values import BRANCHES


def raise_updated(graph: Graph, states: States) -> None:
    """Make sums of a value without products and a value after a product float32."""
    is_bias = functools.cache(_is_bias)
    arrays = [node for node in graph.nodes if _is_array(node)]
    tables = [node for node in graph.nodes if node.is_looked_up or (node.inputs and has_rows(node))]
    candidates = reachable(arrays, users_of).keys() - reachable(tables, users_of).keys()
    updated = set[Node]()  # the sums, and the values that keep their low digits
    for node in graph.nodes:
        if node.after_product and node.before_product and node.original_dtype == np.float32:
            keeps_sum = any(operand in updated for operand in _operands_kept(node))
            values = [value for value in node.inputs if node.name in SUMS and value in candidates]
            if keeps_sum or any(_is_updated(value, node, is_bias) for value in values):
                updated.add(node)
    sums = [node for node in updated if node.name in SUMS]
    for node in reachable(sums, lambda node: [operand for operand in _operands_kept(node) if operand in updated]):
        if node.kind in (INFER, JOIN):
            states.raise_to(node, State.FLOAT32, Rule.UPDATED)


def _is_array(node: Node) -> bool:
    """Return whether a node is an array argument, a constant array, or a cast of integers.

    A pixel grid is a cast of integers. Zeros, masks and noise do not count.
    """
    if node.kind is SOURCE:
        return bool(node.shape) and node.const != (0.0, 0.0)
    if node.name != CAST or node.inputs or node.step is None:
        return node.name == "iota"
    return jnp.issubdtype(aval_of(node.step.eqn.invars[0]).dtype, jnp.integer)


def _operands_kept(node: Node) -> Sequence[Node]:
    """Return the operands whose low digits the result of ``node`` keeps."""
    if node.kind is CLEAR or node.name == BRANCHES:
        return node.inputs
    if node.name in SUMS or node.name in CHOICES:
        return [operand for operand in node.inputs if shape_read(node, operand) == node.shape]
    if node.name in SCALES:
        computed = [operand for operand in node.inputs if operand.after_product]
        return computed if len(computed) == 1 else ()
    return ()


def _is_updated(value: Node, total: Node, is_bias: Callable[[Node], bool]) -> bool:
    """Return whether a sum adds a product to a value that no product computed.

    Values that are repeated do not count, such as biases and tables of positions.
    """
    if value.after_product or shape_read(total, value) != total.shape:
        return False
    is_vector = sum(size != 1 for size in total.shape) <= 1  # a single example: the bias of a layer has its shape
    return not (_is_repeated(value) or (is_vector and is_bias(value.origin)))


def _is_repeated(value: Node) -> bool:
    """Return whether a value repeats elements of another value."""
    while value.kind is CLEAR and len(value.inputs) == 1:
        (operand,) = value.inputs
        if size_of(value.shape) > size_of(shape_read(value, operand)):
            return True
        value = operand
    return False


def _is_bias(value: Node) -> bool:
    """Return whether only sums read a value."""
    return all(reader.name in SUMS for reader in readers_of(value))
