"""Mark values that depend on a product, values on which a product depends, and looked-up rows.

An outer product that depends on a product becomes a product.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxmp.base.dtypes import is_half
from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node, inputs_of, shape_read, users_of
from jaxmp.engine.states import CLEAR, HALF, INFER, KEPT, State
from jaxmp.program.equations import size_of
from jaxmp.program.primitives import BROADCAST, PRODUCTS


def mark_products(nodes: Sequence[Node], wanted: Sequence[Node]) -> None:
    """Mark values that depend on a product, and values on which a product depends.

    Half arguments and the results ``wanted``, which are requested in half, count as products here. Before this call, an
    outer product counts as an elementwise multiplication. If it depends on a product, it becomes a product.
    """
    half_arguments = [node for node in nodes if is_half(node.argument_dtype)]
    named = [node for node in nodes if node.name in PRODUCTS]
    written = [
        node for node in named if node.kind is KEPT and all(is_half(operand.original_dtype) for operand in node.inputs)
    ]
    products = [node for node in nodes if node.kind is HALF]
    for node in reachable([*products, *written, *half_arguments], users_of):
        node.after_product = True
    for node in named:  # an outer product, as in Mamba's state, or in the gradient of a weight for one example
        if node.kind is INFER and any(operand.after_product for operand in node.inputs):
            assert node.step is not None
            node.kind, node.initial_state, node.step.reason = HALF, State.HALF, "product"
            products.append(node)
    for node in reachable([*products, *written, *wanted], inputs_of):
        node.before_product = True


def mark_looked_up(nodes: Sequence[Node]) -> None:
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
