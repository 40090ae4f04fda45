"""Islands: groups of operations that are right only as a whole in float32.

exp, log and sums are float32 by their class. What feeds them must be too, or the rounding comes just before the step
that amplifies it: ``x - max`` before exp (softmax in bfloat16 errs by 7 %), the square before a sum (a variance as
``E[x²] - E[x]²``, and 300² is infinite in float16), the difference before a squared error, the scale and mask before a
softmax (``finfo.min`` is -inf in half).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmp.engine.classes import Class, primitives_of
from jaxmp.engine.graph import Graph, Node
from jaxmp.engine.kinds import Asked, Kind, State

_LINALG = primitives_of(Class.LINALG)
_PRODUCTS = primitives_of(Class.HALF)
_ELEMENTWISE = primitives_of(Class.POINTWISE) | primitives_of(Class.INFER) | primitives_of(Class.WIDEST)
_EXTREMES = frozenset({"reduce_max", "reduce_min", "cummax", "cummin"})
_CAST = "convert_element_type"
_LOGARITHMS = frozenset({"log", "log1p", "log2"})
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
        node.kind, node.reason = Kind.HALF, "product"
    return found


def keep_log_probabilities(nodes: Sequence[Node]) -> None:
    """Makes float32 the products of log-probabilities, which select or add them, as the CTC loss does.

    Likewise those of exponentials of which the logarithm is taken: a logsumexp, as hidden Markov models spell it.
    """
    for node in nodes:
        if not _is_product(node):
            continue
        if any(map(_is_log_softmax, node.inputs)):
            _keep(node, "a product of log-probabilities")
        elif any(map(_is_exponential, node.inputs)) and any(user.name == "log" for user in _readers(node)):
            _keep(node, "a logarithm of a product of exponentials")


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


def keep_searches(graph: Graph) -> None:
    """Makes float32 the products of while loops that end when something computed from them is small enough.

    In half it may never be: a fixed point is met up to half's rounding, and then missed by as much again and again.
    """
    for inside in graph.searches:
        for node in graph.nodes[inside]:
            _keep(node, "in a loop that runs until it converges")


def keep_cancelled(nodes: Sequence[Node]) -> None:
    """Makes float32 the products that sums of squares are subtracted from, or the other way round.

    |x|² + |y|² - 2xy is the square of a distance, which is small where the three are large; likewise E[x²] - E[x]²
    where a filter takes the mean.
    """
    for node in nodes:
        if node.name == "reduce_sum" and _is_square(_origin(node.inputs[0])):
            _keep_distances(node, _origin(node.inputs[0]).inputs[0])
        elif node.name == "dot_general" and node.kind is Kind.FULL and len(set(map(_origin, node.inputs))) == 1:
            _keep_distances(node, node.inputs[0])
        elif _is_product(node):
            _keep_moments(node)


def _keep_distances(norm: Node, vector: Node) -> None:
    """Of a sum of squares: the products of the same vector among what it is added to or subtracted from."""
    for product in map(_scaled, _summed_with(norm)):
        if product.name in _PRODUCTS and _origin(vector) in map(_origin, product.inputs):
            _keep(product, "a product that sums of squares cancel")


def _keep_moments(second: Node) -> None:
    """Of a product: if it is the mean of xy, the means of x and y whose product is subtracted from it, and itself."""
    factors = next((_origin(node).inputs for node in second.inputs if _is_multiplied(_origin(node))), None)
    if factors is None:
        return
    known = {_origin(factor) for factor in factors}
    for first in map(_scaled, _summed_with(second)):
        means = [_origin(node) for node in first.inputs] if _is_multiplied(first) else []
        if means and all(mean.name in _PRODUCTS and not known.isdisjoint(map(_origin, mean.inputs)) for mean in means):
            for product in (second, *means):
                _keep(product, "a mean of a product less the product of the means")


def _summed_with(node: Node) -> Iterator[Node]:
    """The other operands of the sums and differences that a value goes into, however it was moved and scaled."""
    stack = [node]
    while stack:
        term = stack.pop()
        for user in term.users:
            if user.kind is Kind.CLEAR or _is_scaling(user):
                stack.append(user)
            elif user.name in ("add", "sub"):
                yield from (operand for operand in user.inputs if operand is not term)
                if user.written == node.written and len(user.users) == 1:
                    stack.append(user)


def _is_scaling(node: Node) -> bool:
    """Whether a value is multiplied or divided by a constant."""
    factors = {"mul": node.inputs, "div": node.inputs[1:]}.get(node.name, [])
    return node.name == "neg" or (len(node.inputs) == 2 and any(factor.const is not None for factor in factors))


def _scaled(node: Node) -> Node:
    """What a value was before it was moved and scaled."""
    while True:
        node = _origin(node)
        if not _is_scaling(node):
            return node
        node = next((operand for operand in node.inputs if operand.const is None), node.inputs[0])


def _is_multiplied(node: Node) -> bool:
    return node.name in ("mul", "square", "integer_pow") and not _is_scaling(node)


def _is_product(node: Node) -> bool:
    return node.kind is Kind.HALF and node.asked is Asked.NOTHING


def _keep(node: Node, reason: str) -> None:
    """Makes a product float32, if nobody asked for it in half."""
    if _is_product(node):
        node.kind, node.reason = Kind.FULL, reason


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
    logged = set()  # what a logarithm is taken of, and all that is computed from activations for that
    for node in reversed(nodes):
        if node.name in _LINALG:
            solved.add(node)
        if node.name in _LOGARITHMS:
            logged.add(node)
        if not node.after_product:
            continue
        readers = list(_readers(node))
        if _is_product(node) and readers and solved.issuperset(readers):
            _keep(node, f"feeds only {_names(readers)}")
        if node.asked is Asked.EPSILON and not logged.isdisjoint(readers):
            logged.add(node)
        if node.kind is not Kind.INFER:
            continue
        # What the author casts to float32 is the author's half up to there.
        full = [user for user in readers if user.kind in (Kind.FULL, Kind.STRICT) and user.name != _CAST]
        if not solved.isdisjoint(full):
            node.kind, node.reason = Kind.FULL, f"feeds {_names(full)}"
            solved.add(node)
        elif not logged.isdisjoint(full) and not _is_stream(node):  # 1 - x is what counts, and x near 1 has lost it
            node.kind, node.reason = Kind.FULL, f"feeds {_names(full)}"
            logged.add(node)
        elif full and len(full) == len(readers) and not _is_stream(node):
            node.kind, node.reason = Kind.FULL, f"feeds only {_names(full)}"
        elif _is_square(node) and any(user.name == "reduce_sum" for user in full):
            node.kind, node.reason = Kind.FULL, "a square that is summed"
        elif node.name == "sub" and any(_is_square(user) for user in full):
            node.kind, node.reason = Kind.FULL, "a difference whose square is summed"
        elif node.name == "sqrt" and (squares := _squares_under(node)):
            for inner in (node, *squares):  # 256² is infinite in float16
                inner.kind, inner.reason = Kind.FULL, "a root of squares"


def _squares_under(root: Node) -> list[Node]:
    """What a root is taken of, if that is a square or a sum with one: the sum and the squares."""
    below = _origin(root.inputs[0])
    terms = [_origin(node) for node in below.inputs] if below.name in ("add", "sub") else []
    squares = [node for node in (below, *terms) if _is_square(node) and node.kind is Kind.INFER and node.name != "abs"]
    return [*squares, *([below] if terms and below.kind is Kind.INFER else [])] if squares else []


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
