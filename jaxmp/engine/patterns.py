"""The names of the islands: which softmax, normalisation or loss the float32 operations of a graph belong to.

Names explain a decision and make none: what is float32 follows from the classes and from
:mod:`jaxmp.engine.islands` alone, so that a spelling unknown here is computed just as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxmp.engine.graph import Node
from jaxmp.engine.kinds import Kind

_SCALES = frozenset({"add", "sub", "mul", "div", "max", "select_n", "clamp"})


@dataclasses.dataclass(frozen=True)
class Island:
    """An island: its name (``"softmax"``) and the nodes of its operations."""

    name: str
    nodes: tuple[Node, ...]


def islands_of(nodes: Sequence[Node]) -> list[Island]:
    """The islands among the nodes of a graph, in the order in which each is complete."""
    found = [island for node in nodes for island in _ending_in(node)]
    norms = {island.nodes[0] for island in found if island.name == "L2 norm"}
    # A sum of squares on the way to a root is part of what the root belongs to.
    inside = {node for island in found if island.nodes[0].name != "reduce_sum" for node in island.nodes}
    found = [island for island in found if island.nodes[0].name != "reduce_sum" or island.nodes[0] not in inside]
    return [*found, *(island for node in nodes for island in _cosine(node, norms))]


def _ending_in(node: Node) -> Iterator[Island]:
    if node.name == "div" and len(node.inputs) == 2:
        way: list[Node] = [node]
        above, below = _origin(node.inputs[0], way), _origin(node.inputs[1], way)
        if above.name in ("exp", "exp2") and below.name == "reduce_sum" and _origin(below.inputs[0]) is above:
            yield Island("softmax", (*way, *_shift(above)))
    elif node.name in ("log", "log2") and node.inputs:
        yield from _logarithm(node)
    elif node.name == "log1p" and node.inputs and _origin(node.inputs[0]).name == "exp":
        yield Island("softplus", (node, _origin(node.inputs[0])))
    elif node.name in ("rsqrt", "sqrt") or (node.name == "pow" and any(x.const == 0.5 for x in node.inputs[1:])):
        yield from _root(node)
    elif node.name == "reduce_sum" and (square := _square(_climb(node.inputs[0], [])[0])):
        yield from _squares(node, square)


def _logarithm(node: Node) -> Iterator[Island]:
    way = [node]
    total = _origin(node.inputs[0], way)
    exp = _origin(total.inputs[0], way) if total.name == "reduce_sum" else total
    if total.name != "reduce_sum" or exp.name not in ("exp", "exp2"):
        return
    shift = _shift(exp)
    after = list(_readers(node, through=()))
    if shift and any(user.name == "sub" and _origin(user.inputs[0]) is shift[0] for user in after):
        subs = [user for user in after if user.name == "sub"]
        picks = [reader for user in subs for reader in _readers(user, through=("mul", "neg"))]
        name = "cross-entropy" if any(reader.name in ("reduce_sum", "gather") for reader in picks) else "log-softmax"
        yield Island(name, (*way, *shift, *subs))
    else:
        sums = [user for user in after if user.name == "add"]
        against = [reader for user in (node, *sums) for reader in _readers(user, through=()) if reader.name == "sub"]
        yield Island("cross-entropy" if against else "logsumexp", (*way, *shift, *sums, *against))


def _root(node: Node) -> Iterator[Island]:
    way = [node]
    origin, is_mean = _climb(node.inputs[0], way)
    if origin.name == "reduce_sum" and (square := _square(_origin(origin.inputs[0], way))):
        way += square
        divides = node.name != "sqrt" or any(user.name == "div" for user in _readers(node, through=_SCALES))
        yield Island("L2 norm" if not is_mean else "normalisation" if divides else "standard deviation", tuple(way))
    elif origin.name == "sub" and any(_square(_origin(operand)) for operand in origin.inputs):
        for operand in origin.inputs:
            total, _ = _climb(operand, way)
            if total.name == "reduce_sum":
                way += _square(_origin(total.inputs[0], way))
            else:
                way += _square(total)
        yield Island("normalisation", tuple(way))


def _squares(node: Node, square: list[Node]) -> Iterator[Island]:
    base = _origin(square[0].inputs[0])
    if base.name != "sub":
        yield Island("sum of squares", (node, *square))
        return
    left, (right, _) = _origin(base.inputs[0]), _climb(base.inputs[-1], [])
    is_mean = right.name == "reduce_sum" and _origin(right.inputs[0]) is left
    yield Island("variance" if is_mean else "squared error", (node, *square))


def _cosine(node: Node, norms: set[Node]) -> Iterator[Island]:
    """A product of two over the norms of both, however it is written."""

    def is_unit(operand: Node) -> bool:
        return operand.name in ("div", "mul") and any(_climb(x, [])[0] in norms for x in operand.inputs[-1:])

    if node.name == "reduce_sum":
        product = _origin(node.inputs[0])
        if product.name == "mul" and all(is_unit(_origin(operand)) for operand in product.inputs):
            yield Island("cosine similarity", (node, product, *map(_origin, product.inputs)))
    elif node.name == "div" and len(node.inputs) == 2:
        below, _ = _climb(node.inputs[1], [])
        if below.name == "mul" and all(_climb(operand, [])[0] in norms for operand in below.inputs):
            yield Island("cosine similarity", (node, below))


def _origin(node: Node, way: list[Node] | None = None) -> Node:
    """The operation whose result ``node`` is, however it was moved or cast; ``way`` gathers the nodes passed."""
    while True:
        if way is not None and node.kind is not Kind.SOURCE:
            way.append(node)
        if len(node.inputs) == 1 and (node.kind is Kind.CLEAR or node.name in ("convert_element_type", "abs")):
            node = node.inputs[0]
        else:
            return node


def _climb(node: Node, way: list[Node]) -> tuple[Node, bool]:
    """As ``_origin``, and through sums and products with constants; whether something was divided by a constant."""
    divided = False
    while True:
        node = _origin(node, way)
        others = [operand for operand in node.inputs if not _is_constant(operand, node)]
        if node.name not in _SCALES or len(others) != 1 or len(node.inputs) < 2:
            return node, divided
        divided |= node.name in ("div", "mul")
        node = others[0]


def _is_constant(operand: Node, user: Node, depth: int = 3) -> bool:
    """Whether an operand is one, or computed from integers and constants in few steps: the count of a mean."""
    origin = _origin(operand)
    if origin.kind is Kind.SOURCE:  # `where(n > 0, variance, nan)`: neither NaN nor 0 has a magnitude to know it by
        return origin.const is not None or user.name in ("select_n", "max")
    return depth > 0 and all(_is_constant(node, origin, depth - 1) for node in origin.inputs)


def _square(node: Node) -> list[Node]:
    """The nodes of ``x²`` (the square first), or none if it is another operation."""
    is_square = node.name in ("square", "integer_pow") or (
        node.name == "mul" and len({_origin(operand) for operand in node.inputs}) == 1
    )
    if not is_square:
        return []
    base = _origin(node.inputs[0])
    return [node, base] if base.name == "sub" else [node]


def _shift(exp: Node) -> list[Node]:
    """``x - max(x)`` before an exponential, if it is there."""
    base = _origin(exp.inputs[0])
    return [base] if base.name == "sub" else []


def _readers(node: Node, through: Sequence[str] | frozenset[str]) -> Iterator[Node]:
    """Who computes with a value, however it was moved; who does so by one of ``through`` is passed, and told too."""
    stack, seen = list(node.users), set()
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        if user.kind is not Kind.CLEAR or user.name == "gather":
            yield user
        if user.kind is Kind.CLEAR or user.name in through or user.name == "convert_element_type":
            stack.extend(user.users)
