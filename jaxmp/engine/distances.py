"""Find products that cancel with squared norms, as in a distance.

The squared distance ``|x|² + |y|² - 2 x·y`` of two neighbouring points is small compared with its terms. If the product
``x·y`` were half, the distance would be mostly rounding error. JAX traces the distances between the rows of ``x`` and
``y``, ``sum(x**2, 1)[:, None] + sum(y**2, 1) - 2 * (x @ y.T)``, as (without shapes)::

    a = integer_pow[y=2] x
    b = reduce_sum a                 # |x|²
    c = broadcast_in_dim b
    d = integer_pow[y=2] y
    e = reduce_sum d                 # |y|²
    f = broadcast_in_dim e
    g = add c f
    h = transpose y
    i = dot_general x h              # x·y
    j = mul 2.0 i
    k = sub g j

The search for such products takes these steps:

1. Find each sum that is not a term of another sum: ``k``, but not ``g``. The search begins at the last sum, and visits
   each sum of a long chain once.
2. List its terms without moves and constant factors: ``b``, ``e`` and ``i``.
3. Find the terms that are squared norms: ``b`` of the vector ``x``, and ``e`` of ``y``.
4. Return the products that have one of these vectors as a factor: ``i``, whose factors are ``x`` and ``y``.

The terms of such a sum may also be a Gram matrix ``x @ x.T`` and its diagonal, which has the squared norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmp.engine.graph_paths import SCALES, SQUARES, terms_of, value_behind
from jaxmp.engine.nodes import Graph, Node, shape_read
from jaxmp.program.primitives import POWERS, PRODUCTS, SUMS, Trait, with_trait

_SQUARED = SCALES | with_trait(Trait.KEEPS_MAGNITUDE)
"""Operations that a square hides, or that multiply it by a constant: ``jnp.abs(x) ** 2``."""
_MASKED = SCALES | {"select_n"}
"""Operations that keep the diagonal of a Gram matrix before a sum: ``jnp.sum(gram * jnp.eye(n), 1)``."""


def products_of_distances(graph: Graph) -> dict[Node, Node]:
    """Return the products that cancel with squared norms, each with the first sum in which it cancels.

    Equal products are listed once, as their first one (``Node.same``).
    """
    total_of: dict[Node, Node] = {}
    inner_sums = set[Node]()
    for node in reversed(graph.nodes):  # a sum comes after the sums that are its terms
        if node.name in SUMS and node.same not in inner_sums:
            terms, sums = terms_of(node)
            inner_sums.update(sums)
            for product in _cancelled_products(terms):
                total_of[product.same] = node
    return total_of


def _cancelled_products(terms: Sequence[Node]) -> Iterator[Node]:
    """Yield the products among the terms of a sum for which another term is the squared norm of a factor."""
    vectors = {vector for term in terms if (vector := _vector_of_squared_norm(term)) is not None}
    for term in terms:
        factors = _factors(term) if term.name in PRODUCTS else None
        if factors is None:
            continue
        first, second = factors
        # The terms are without moves, so the diagonal of a Gram matrix is listed as the Gram matrix.
        is_gram_matrix_and_diagonal = first is second and terms.count(term) > 1
        if is_gram_matrix_and_diagonal or first in vectors or second in vectors:
            yield term


def _vector_of_squared_norm(value: Node) -> Node | None:
    """Return a vector if ``value`` is its squared norm, or None.

    A squared norm is a sum of squares, such as ``sum(x * x)``, or the square of a norm. A Gram matrix is not, because
    it also sums products of different vectors. The sum of its diagonal elements is.
    """
    if value.name in SQUARES:
        root = value.inputs[0].origin
        if root.name != "sqrt":
            return None
        value = value_behind(root.inputs[0])
    summed = _summed(value)
    factors = None if summed is None else _factors(summed)
    if factors is None:
        return None
    first, second = factors
    return first if first is second else None


def _summed(value: Node) -> Node | None:
    """Return the operation whose elements are summed in ``value``, or None if ``value`` sums nothing.

    A product sums elements if it has fewer axes than its operands, as ``einsum("id,id->i", x, x)``. Then the product is
    this operation itself.
    """
    if value.name == "reduce_sum":
        return value_behind(value.inputs[0], _MASKED)
    if value.name in PRODUCTS and value.inputs:  # integer operands are no inputs
        has_lost_axes = len(value.shape) < len(shape_read(value, value.inputs[0]))
        return value if has_lost_axes else None
    return None


def _factors(value: Node) -> tuple[Node, Node] | None:
    """Return the two factors of a product, an elementwise product or a square, or None.

    The factors are without moves and constant factors.
    """
    if (value.name in PRODUCTS or value.name == "mul") and len(value.inputs) == 2:
        first, second = value.inputs
        return value_behind(first), value_behind(second)
    if value.name in POWERS:
        base = value_behind(value.inputs[0], _SQUARED)
        return base, base
    return None
