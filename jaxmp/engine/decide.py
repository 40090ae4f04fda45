"""Decide which values are in half precision, on the whole graph.

Each value has a state: undecided, half, float32, or beyond half (float32, because half precision cannot represent the
value). Rules raise states until no state rises any more (:func:`_settle`). Then the undecided values between two
products become half. A state only rises, so the dtypes do not depend on the order of the rules. docs/autocast.md lists
the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmp.base.graphs import reachable
from jaxmp.engine.amplifiers import raise_amplified
from jaxmp.engine.cancellation import raise_cancelled
from jaxmp.engine.casts import move_casts, put_casts_off
from jaxmp.engine.graph import Graph, Node, inputs_of, shape_read, users_of
from jaxmp.engine.graph_paths import readers_of
from jaxmp.engine.loops import decide_loops
from jaxmp.engine.states import CLEAR, FULL, HALF, INFER, JOIN, KEPT, SOURCE, Rule, State
from jaxmp.program.equations import size_of
from jaxmp.program.primitives import BROADCAST, EXTREMES, MONOTONE, PRODUCTS, Class, Trait, of_class, with_trait

RAISERS = (raise_amplified, raise_cancelled, decide_loops)
"""The rules that do not read the states of neighbours. Their order does not matter."""

_FLOAT32 = np.dtype(np.float32)
_ELEMENTWISE = of_class(Class.POINTWISE, Class.INFER, Class.WIDEST)
# A nonlinearity before a product reads a float32 activation in half. These operations are not nonlinearities.
_NO_NONLINEARITIES = with_trait(Trait.SUMS, Trait.MULTIPLIES) | {"select_n"}
_CAST = "convert_element_type"


def decide(graph: Graph, wanted: Sequence[Node] = (), force: bool = False) -> bool:
    """Set the dtype of every node, and the dtype in which its operation computes.

    Args:
      graph: the graph. The ``dtype`` of a source may differ from its original dtype.
      wanted: the results that are requested in half. They count as read by a product.
      force: whether to decide even if the graph has no product. A derivative rule needs this, because it belongs to a
        larger program.

    Returns:
      False if the graph has no product. Then every operation keeps its dtypes.
    """
    nodes = [node for node in graph.nodes if node.kind is not SOURCE]
    named = [node for node in nodes if node.name in PRODUCTS]
    has_products = any(node.kind is HALF for node in nodes) or any(node.kind is FULL for node in named)
    if not force and not has_products:
        return False
    halves = [node for node in graph.nodes if node.kind is SOURCE and node.dtype.itemsize == 2]
    _find_products(wanted, nodes, named, halves)
    _find_looked_up(nodes)
    narrowed = put_casts_off(nodes)

    for raise_states in RAISERS:
        raise_states(graph)
    _find_activations(nodes)
    products = [node for node in nodes if node.kind is HALF and node.state is State.HALF]
    operands = [operand for node in products for operand in node.inputs]
    _find_half_copies([*narrowed, *operands, *wanted], nodes)
    _settle(nodes)

    _lower(nodes, halves)
    for node in nodes:
        node.compute, node.dtype = _dtypes(node)
    move_casts(nodes)
    return True


def _find_products(
    wanted: Sequence[Node], nodes: Sequence[Node], named: Sequence[Node], halves: Sequence[Node]
) -> None:
    """Mark values that depend on a product, and values on which a product depends.

    Half arguments and half results count as products here. Before this step, an outer product counts as an
    elementwise multiplication. If it depends on a product, it becomes a product.
    """
    written = [
        node for node in named if node.kind is KEPT and all(operand.written.itemsize == 2 for operand in node.inputs)
    ]
    products = [node for node in nodes if node.kind is HALF]
    for node in reachable([*products, *written, *halves], users_of):
        node.after_product = True
    for node in named:  # an outer product, as in Mamba's state, or in the gradient of a weight for one example
        if node.kind is INFER and any(operand.after_product for operand in node.inputs):
            assert node.step is not None
            node.kind, node.state, node.step.reason = HALF, State.HALF, "product"
            products.append(node)
    for node in reachable([*products, *written, *wanted], inputs_of):
        node.before_product = True


def _find_looked_up(nodes: Sequence[Node]) -> None:
    """Mark values that come from rows of a table, except rows that a reader repeats.

    Repeated rows count as a weight, whose cotangents are summed in float32.
    """
    for node in reachable([node for node in nodes if node.is_looked_up], users_of):
        node.is_looked_up = True
    for node in reversed(nodes):
        if node.is_looked_up and not node.after_product and any(_is_repeated_by(user, node) for user in node.users):
            node.is_looked_up = False


def _is_repeated_by(user: Node, operand: Node) -> bool:
    """Return whether a reader of looked-up rows, or a later reader, repeats them."""
    if user.kind is CLEAR and not user.is_looked_up:
        return True
    return user.name in (BROADCAST | {"broadcast_in_dim"}) and size_of(user.shape) > size_of(shape_read(user, operand))


def _find_activations(nodes: Sequence[Node]) -> None:
    """Give each activation the number of the last product before it.

    An activation is computed from a half product by elementwise operations and moves of data. A value that a loop
    accumulates in float32 is not an activation. A difference of activations of two products is not an activation
    either, so a sum with such a term is not a residual stream.
    """
    count = 0
    for node in nodes:
        operands: Sequence[Node] = ()
        if node.state is State.HALF and (node.kind is HALF or (node.rule is Rule.CARRY and node.name == "carry")):
            count += 1
            node.activation_of = count
        elif node.rule is Rule.CARRY:
            continue
        elif node.kind is JOIN or (node.kind is CLEAR and node.name not in EXTREMES):
            operands = node.inputs
        elif node.name in _ELEMENTWISE:
            operands = [operand for operand in node.inputs if shape_read(node, operand) == node.shape]
        products = {operand.activation_of for operand in operands}
        if _is_difference_of_activations(node, products):
            continue
        node.activation_of = max([node.activation_of, *products])


def _is_difference_of_activations(node: Node, products: set[int]) -> bool:
    """Return whether a node subtracts activations of two products.

    ``products`` are the numbers of the products from which its operands are computed.
    """
    return node.name == "sub" and len(products - {0}) > 1


def _find_half_copies(operands: Sequence[Node], nodes: Sequence[Node]) -> None:
    """Mark values that some operations read in half, even if the values are float32."""
    for node in reachable(operands, _moved_from):
        node.has_half_copy = True

    def elements_of(node: Node) -> Sequence[Node]:
        return _moved_from(node) or [operand for operand in node.inputs if _is_elementwise(node, operand)]

    heading = reachable(operands, elements_of)  # values that reach a product through elementwise operations
    starts = [
        operand
        for node in nodes
        if node in heading and node.name not in _NO_NONLINEARITIES
        for operand in node.inputs
        if operand.activation_of and _is_elementwise(node, operand)
    ]
    for node in reachable(starts, _moved_from):
        node.has_half_copy = True


def _moved_from(node: Node) -> Sequence[Node]:
    is_moved = node.kind is JOIN or (node.kind is CLEAR and node.name in MONOTONE)
    return node.inputs if is_moved else ()


def _is_elementwise(user: Node, operand: Node) -> bool:
    return user.kind is INFER and user.shape == shape_read(user, operand)


def _settle(nodes: Sequence[Node]) -> None:
    """Apply the rules about neighbours until no state rises."""
    waiting = dict.fromkeys(nodes)
    while waiting:
        node, _ = waiting.popitem()
        if _rises(node):
            waiting.update(dict.fromkeys(node.users))
            waiting.update(dict.fromkeys(_computed_from(node)))


def _computed_from(node: Node) -> list[Node]:
    """Return ``INFER`` operations that a node reads, directly or through moves."""
    below = reachable(node.inputs, lambda operand: operand.inputs if operand.kind is CLEAR else ())
    return [operand for operand in below if operand.kind is INFER]


def _rises(node: Node) -> bool:
    """Apply the rules about neighbours to a node; return whether its state rose."""
    if node.kind is CLEAR:
        highest = max(node.inputs, key=_state_key, default=None)
        return highest is not None and node.raise_to(highest.state, Rule.FOLLOWS, highest)
    if node.kind not in (INFER, JOIN) or is_stream(node):
        return False
    dragging = max((operand for operand in node.inputs if _drags(operand)), key=_state_key, default=None)
    if dragging is not None:
        return node.raise_to(dragging.state, Rule.FOLLOWS, dragging)
    if node.kind is INFER and node.after_product:
        readers = readers_of(node)
        if readers and all(_is_float32(reader) for reader in readers):
            return node.raise_to(State.FLOAT32, Rule.FEEDS, readers[0])
    return False


def _state_key(node: Node) -> State:
    return node.state


def _drags(operand: Node) -> bool:
    """Return whether a float32 operand makes its reader float32.

    An operand with a half copy does not make its reader float32, because the reader may read the copy. An operand that
    half precision cannot represent always makes its reader float32.
    """
    return operand.state is State.BEYOND_HALF or (operand.state is State.FLOAT32 and not operand.has_half_copy)


def _is_float32(reader: Node) -> bool:
    """Return whether a reader computes in float32.

    A cast to float32 that the author wrote does not count as such a reader.
    """
    return reader.state >= State.FLOAT32 and not (reader.name == _CAST and reader.kind is FULL)


def is_stream(node: Node) -> bool:
    """Return whether a node is a residual stream.

    A residual stream is a sum of activations of different products; rows of a table may be one of the terms. The terms
    of a softplus are activations of the same product, so their sum is not a stream. A half carry is a stream too.
    """
    if node.name == "carry":
        return node.state is State.HALF
    if node.name != "add" or not all([operand.activation_of or operand.is_looked_up for operand in node.inputs]):
        return False
    products = {operand.activation_of for operand in node.inputs}
    return len(products) > 1


def _lower(nodes: Sequence[Node], halves: Sequence[Node]) -> None:
    """Make undecided nodes half if they read a half value, directly or indirectly."""
    for node in halves:
        node.state = State.HALF
    for node in nodes:
        is_half_as_written = node.kind is KEPT and node.dtype.itemsize == 2
        if is_half_as_written or (node.kind is INFER and node.state is State.UNDECIDED and is_stream(node)):
            node.state = State.HALF
    starts = [
        node for node in nodes if node.state is State.HALF or node.deferred_cast is not None or _has_rounded_copy(node)
    ]

    def undecided(node: Node) -> list[Node]:
        return [user for user in node.users if user.state < State.FLOAT32 and user.kind in (INFER, CLEAR, JOIN)]

    for node in reachable([*halves, *starts], undecided):
        if node.state is State.UNDECIDED and node.kind in (INFER, JOIN):
            node.state = State.HALF


def _has_rounded_copy(node: Node) -> bool:
    return node.state is State.FLOAT32 and node.has_half_copy


def _dtypes(node: Node) -> tuple[np.dtype | None, np.dtype]:
    """Return the compute dtype of an operation, and the dtype of its result.

    The compute dtype is None if the operation keeps its original dtypes or only moves data.
    """
    if node.kind is CLEAR:
        below = node.inputs[0] if node.inputs else node
        # The node is a postponed cast, or a cast that the engine treats as a move.
        is_cast = node.deferred_cast is not None or node.name == _CAST
        return None, below.dtype if is_cast else below.deferred_cast or below.dtype
    if node.kind is KEPT:
        return None, node.written
    half = node.written if node.written.itemsize == 2 or node.half is None else node.half
    if node.state >= State.FLOAT32:
        return _FLOAT32, _FLOAT32
    if node.kind is HALF or (node.state is State.HALF and node.before_product):
        return half, half
    return None, node.written
