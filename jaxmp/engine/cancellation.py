"""Keep products in float32 if they sum squares, or cancel in a difference.

``|x|² + |y|² - 2xy``, ``E[x²] - E[x]²`` and ``1 - cos`` are small compared with their terms. If the terms came from
products in half precision, the results would be mostly rounding error. The same holds for a constant minus any other
product if an operation magnifies small differences, such as the root of ``1 - p²``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmp._internals.jax.primitives import SUMS
from jaxmp._internals.jax.walk import PRODUCTS, walk
from jaxmp.engine.classes import CLEAR, INFER, JOIN, Rule, State
from jaxmp.engine.graph import Graph, Node, Step, shape_read
from jaxmp.engine.paths import BOUNDS, OFFSETS, ROOTS, SCALES, SQUARES, multiple_of

Vectors = tuple[Node, Node]

_MAGNIFY = ROOTS | {"cbrt", "log", "log2", "atan2"}
"""Operations that turn a small error of a small operand into a large error. Divisions and powers do so too."""


def raise_cancelled(graph: Graph) -> None:
    """Make products float32 if they sum squares or cancel in a difference."""
    if not any(node.is_half_product for node in graph.nodes):
        return
    for node in graph.nodes:
        if node.is_half_product and _squared_vector(node) is not None:
            node.raise_to(State.FLOAT32, Rule.SQUARES)
    cancelled_in: dict[Node, Node] = {}  # the sum in which a product cancels
    for node in graph.nodes:
        if node.name in SUMS and not _is_part_of_sum(node):
            for product in (*_distances(node), *_moments(node), *_cosines(node)):
                cancelled_in.setdefault(product.same, node)
    for step in graph.steps:
        for difference in _magnified_differences(step):
            for product in _products_in(difference):
                cancelled_in.setdefault(product.same, difference)
    for node in graph.nodes:  # also products that a loop or a derivative computes again
        if node.name in PRODUCTS and node.same in cancelled_in:
            node.raise_to(State.FLOAT32, Rule.CANCELLATION, cancelled_in[node.same])


def _is_part_of_sum(node: Node) -> bool:
    """Return whether a sum is the only reader of a value or of a multiple of it."""
    while len(node.users) == 1:
        node = node.users[0]
        if node.name in SUMS:
            return True
        if multiple_of(node) is node:
            return False
    return False


def _terms(total: Node) -> list[Node]:
    """Return the terms of a sum without their constant factors.

    A repeated term is listed twice.
    """
    terms, stack = list[Node](), list(total.inputs)
    while stack:
        term = multiple_of(stack.pop())
        if term.name in SUMS and len(term.users) == 1:
            stack += term.inputs
        else:
            terms.append(term)
    return terms


def _vectors(value: Node) -> Vectors | None:
    """Return two vectors if ``value`` sums their elementwise products, else None.

    Constant factors are left out.
    """
    if value.name in PRODUCTS and len(value.inputs) == 2:
        return multiple_of(value.inputs[0]), multiple_of(value.inputs[1])
    if value.name == "reduce_sum":
        summed = multiple_of(value.inputs[0], SCALES | {"select_n"})
        return _vectors(summed) if summed.name in PRODUCTS else _factors(summed)  # the diagonal of a Gram matrix
    return None


def _factors(value: Node) -> Vectors | None:
    """Return the two factors of an elementwise product or a square, or None."""
    is_outer = value.name in PRODUCTS and value.kind is INFER
    if (value.name == "mul" or is_outer) and len(value.inputs) == 2:
        return multiple_of(value.inputs[0]), multiple_of(value.inputs[1])
    is_square = value.name == "square" or (value.name in ("integer_pow", "pow") and value.inputs)
    if is_square:
        base = multiple_of(value.inputs[0], SCALES | {"abs"})
        return base, base
    return None


def _squared_vector(value: Node) -> Node | None:
    """Return a vector if ``value`` is the sum of its squares, else None.

    A Gram matrix does not count, because it also sums products of different vectors.
    """
    if value.name in SQUARES:  # the square of a norm
        root = value.inputs[0].origin
        return _squared_vector(multiple_of(root.inputs[0])) if root.name == "sqrt" else None
    vectors = _vectors(value)
    if vectors is None:
        return None
    first, second = vectors
    is_sum = value.name == "reduce_sum" or len(value.shape) < len(shape_read(value, value.inputs[0]))
    return first if first is second and is_sum else None


def _distances(total: Node) -> Iterator[Node]:
    """Yield products in a sum, if another term is the squared norm of a factor."""
    terms = _terms(total)
    squared = {vector for term in terms if (vector := _squared_vector(term)) is not None}
    for term in terms:
        if term.name not in PRODUCTS:
            continue
        vectors = _vectors(term) or ()
        is_gram_and_diagonal = len(set(vectors)) == 1 and terms.count(term) > 1
        if is_gram_and_diagonal or not squared.isdisjoint(vectors):
            yield term


def _moments(total: Node) -> Iterator[Node]:
    """Yield products that cancel as in ``E[xy] - E[x] E[y]``."""
    terms = _terms(total)
    for term in terms:
        sums = _factors(term)
        if sums is None:
            continue
        for product in terms:
            if product.name in PRODUCTS and product.kind is not INFER and _are_same(product, sums):
                yield product
                yield from (value for value in sums if value.name in PRODUCTS)


def _are_same(product: Node, sums: Vectors) -> bool:
    """Return whether ``sums`` are the sums of the two factors of ``product``.

    ``product`` and both sums may be weighted, if all three have the same weights.
    """
    vectors = _vectors(product)
    if vectors is None:
        return False
    if all(value.name == "reduce_sum" for value in sums):
        return {multiple_of(value.inputs[0]) for value in sums} == set(vectors)
    pairs = [_vectors(value) if value.name in PRODUCTS else None for value in sums]
    for squares, weights in (vectors, vectors[::-1]):
        factors = _factors(squares)
        wanted = [{factor, weights} for factor in factors or ()]
        pairs_of_vectors = [set(pair) for pair in pairs if pair is not None]
        if wanted and (pairs_of_vectors == wanted or pairs_of_vectors == wanted[::-1]):
            return True
    return False


def _cosines(total: Node) -> Iterator[Node]:
    """Yield products of unit vectors that are subtracted from a constant."""
    if not _has_constant_term(total):
        return
    kept = walk(_terms(total), _kept_from)
    is_normalised = any(node.name in ("mul", "div") and any(map(_is_norms, node.inputs)) for node in kept)
    for node in kept:
        if node.name in PRODUCTS and (is_normalised or all(map(_is_unit_vector, _vectors(node) or (node,)))):
            yield node


def _has_constant_term(total: Node) -> bool:
    """Return whether one of the terms of a sum is a constant other than 0."""
    constants = [term for term in total.inputs if term.is_constant]
    return len(constants) == 1 and constants[0].const != (0.0, 0.0)


def _magnified_differences(step: Step) -> list[Node]:
    """Return differences of a constant and a value whose small errors a step magnifies.

    Between the difference and the step may be scales and bounds, as in ``sqrt(max(1 - x², 0))``.
    """
    sums = [multiple_of(operand, SCALES | BOUNDS | {"select_n"}) for operand in _magnified_operands(step)]
    return [total for total in sums if total.name == "sub" and _has_constant_term(total)]


def _magnified_operands(step: Step) -> list[Node]:
    operands = [operand for operand in step.operands if operand is not None]
    name = step.eqn.primitive.name
    if name == "div":
        return operands[1:]
    if name == "pow":
        return operands[:1]
    if name == "integer_pow":
        return operands if step.eqn.params["y"] < 0 else []
    return operands if name in _MAGNIFY else []


def _products_in(total: Node) -> list[Node]:
    """Return the products whose digits remain in a sum.

    Between a product and the sum may be scales, squares, divisions by norms, bounds, selections and sums over a mask.
    """
    return [node for node in walk(_terms(total), _kept_from) if node.name in PRODUCTS]


def _kept_from(node: Node) -> Sequence[Node]:
    """Return the operands whose digits a value keeps."""
    if node.kind in (CLEAR, JOIN):
        return node.inputs
    if node.name == "reduce_sum":  # over a mask, or of squares
        masked = node.inputs[0].origin
        return [masked] if masked.name == "select_n" or _is_scaled(masked) else ()
    if node.name in SQUARES | BOUNDS | {"select_n", "neg"} or _is_scaled(node):
        variables = [operand for operand in node.inputs if operand.after_product and not _is_norms(operand)]
        return variables[:1] if len(set(variables)) == 1 else ()
    return ()


def _is_scaled(node: Node) -> bool:
    """Return whether a value is another value times a scale, or divided by it, or a square."""
    if node.name not in ("mul", "div"):
        return False
    first, second = node.inputs
    scales = [operand.is_constant or not operand.after_product or _is_norms(operand) for operand in (first, second)]
    return scales[1] or (node.name == "mul" and (scales[0] or first is second))


def _is_norms(value: Node) -> bool:
    """Return whether a value is a norm, or a product of norms."""
    value = multiple_of(value, OFFSETS)
    if value.name == "mul" or (value.name in PRODUCTS and value.kind is INFER):
        return all(map(_is_norms, value.inputs))
    return _is_norm(value)


def _is_unit_vector(value: Node) -> bool:
    if value.name not in ("mul", "div"):
        return False
    return any(_is_norm(operand) for operand in value.inputs)


def _is_norm(value: Node) -> bool:
    """Return whether a value is the norm of a vector, or the inverse of a norm."""
    if value.name == "div" and value.inputs[0].is_constant:
        value = value.inputs[1]
    root = multiple_of(value, OFFSETS)
    return root.name in ROOTS and _squared_vector(multiple_of(root.inputs[0], OFFSETS)) is not None
