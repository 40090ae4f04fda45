"""Islands: groups of operations that are right only as a whole in float32.

exp, log and sums are float32 by their class. What feeds them must be too, or the rounding comes just before the step
that amplifies it: ``x - max`` before exp (softmax in bfloat16 errs by 7 %), the square before a sum (a variance as
``E[x²] - E[x]²``, and 300² is infinite in float16), the difference before a squared error, the scale and mask before a
softmax (``finfo.min`` is -inf in half).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmp.autocast.classes import Class, primitives_of
from jaxmp.autocast.graph import Graph, Node
from jaxmp.autocast.kinds import PRODUCT, Kind, State

_LINALG = primitives_of(Class.LINALG)
_ELEMENTWISE = primitives_of(Class.POINTWISE) | primitives_of(Class.INFER) | primitives_of(Class.WIDEST)
_EXTREMES = frozenset({"reduce_max", "reduce_min", "cummax", "cummin"})
_CAST = "convert_element_type"
_SQUARES = frozenset({"square", "integer_pow", "abs"})


def find_activations(nodes: Sequence[Node]) -> None:
    """Marks what has an element for each element of a product, and so is no statistic of one number for many."""
    for node in nodes:
        if node.kind is Kind.HALF:
            node.is_activation = True
        elif node.kind is Kind.JOIN or (node.kind is Kind.CLEAR and node.name not in _EXTREMES):
            node.is_activation = any(operand.is_activation for operand in node.inputs)
        elif node.name in _ELEMENTWISE:
            node.is_activation = any(operand.is_activation and operand.shape == node.shape for operand in node.inputs)


def take_outer_products(nodes: Sequence[Node]) -> list[Node]:
    """Makes half the outer products of what products made: the gradient of a weight, of one example."""
    found = [node for node in nodes if node.kind is Kind.INFER and node.name == "dot_general"]
    found = [node for node in found if any(operand.after_product for operand in node.inputs)]
    for node in found:
        node.kind, node.reason = Kind.HALF, PRODUCT
    return found


def keep_log_probabilities(nodes: Sequence[Node]) -> None:
    """Makes float32 the products that read log-probabilities: they select or add them, as the CTC loss does."""
    for node in nodes:
        if node.kind is Kind.HALF and node.reason == PRODUCT and any(map(_is_log_softmax, node.inputs)):
            node.kind, node.reason = Kind.FULL, "a product of log-probabilities"


def _is_log_softmax(node: Node) -> bool:
    node = _origin(node)
    if node.name != "sub" or len(node.inputs) != 2:
        return False
    logarithm = _origin(node.inputs[1])
    total = _origin(logarithm.inputs[0]) if logarithm.name == "log" else logarithm
    return total.name == "reduce_sum" and _is_exponential(total.inputs[0])


def _is_exponential(node: Node) -> bool:
    node = _origin(node)
    return node.name == "exp" or (node.name == "select_n" and any(_origin(case).name == "exp" for case in node.inputs))


def keep_searches(graph: Graph) -> bool:
    """Makes float32 the products of while loops that end when something computed from them is small enough.

    In half it may never be: a fixed point is met up to half's rounding, and then missed by as much again and again.

    Returns:
      Whether there was one.
    """
    found = False
    for reads, inside in graph.searches:
        if any(join.after_product for join in reads):
            for node in graph.nodes[inside]:
                if node.kind is Kind.HALF and node.reason == PRODUCT:
                    node.kind, node.reason, found = Kind.FULL, "in a loop that runs until it converges", True
    return found


def extend_again(nodes: Sequence[Node]) -> None:
    """Makes float32 what feeds only what float32 was carried on to: the mean that is subtracted before a scale."""
    for node in reversed(nodes):
        if node.kind is Kind.INFER and node.state == State.HALF and not _is_stream(node):
            readers = list(_readers(node))
            if readers and all(user.state >= State.FULL and user.name != _CAST for user in readers):
                node.kind, node.state, node.reason = Kind.FULL, State.FULL, f"feeds only {_names(readers)}"


def extend(nodes: Sequence[Node]) -> None:
    """Makes float32, backwards, what feeds only float32 operations, and what an island needs though others read it."""
    solved = set()  # what is factorised or solved, and all that is computed from products just for that
    for node in reversed(nodes):
        if node.name in _LINALG:
            solved.add(node)
        if node.kind is not Kind.INFER or not node.after_product:
            continue
        readers = list(_readers(node))
        # What the author casts to float32 is the author's half up to there.
        full = [user for user in readers if user.kind in (Kind.FULL, Kind.STRICT) and user.name != _CAST]
        if not full:
            continue
        if not solved.isdisjoint(full):
            node.kind, node.reason = Kind.FULL, f"feeds {_names(full)}"
            solved.add(node)
        elif len(full) == len(readers) and not _is_stream(node):
            node.kind, node.reason = Kind.FULL, f"feeds only {_names(full)}"
        elif _is_square(node) and any(user.name == "reduce_sum" for user in full):
            node.kind, node.reason = Kind.FULL, "a square that is summed"
        elif node.name == "sub" and any(_is_square(user) for user in full):
            node.kind, node.reason = Kind.FULL, "a difference whose square is summed"


def _readers(node: Node) -> Iterator[Node]:
    """Who computes with a value, however it was moved."""
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user.kind is Kind.CLEAR:
            stack.extend(user.users)
        else:
            yield user


def _is_stream(node: Node) -> bool:
    """Whether a sum has two operands that products made: a residual stream stays half up to its last normalisation."""
    return node.name == "add" and sum(operand.is_activation for operand in node.inputs) > 1


def _is_square(node: Node) -> bool:
    return node.name in _SQUARES or (node.name == "mul" and len({id(operand) for operand in node.inputs}) == 1)


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(sorted({node.name for node in nodes}))


def softmaxes(nodes: Sequence[Node]) -> Iterator[Node]:
    """The divisions that end a softmax: of exponentials by their sum."""
    for node in nodes:
        if node.name == "div" and len(node.inputs) == 2:
            above, below = (_origin(operand) for operand in node.inputs)
            if below.name == "reduce_sum" and _origin(below.inputs[0]) is above and _is_exponential(above):
                yield node


def _origin(node: Node) -> Node:
    while node.kind is Kind.CLEAR and len(node.inputs) == 1:
        node = node.inputs[0]
    return node
