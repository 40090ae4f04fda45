"""Groups: operations that are right only as a whole in float32, each recognised once.

exp, log and sums are float32 by their class. What feeds them must be too, or the rounding comes just before the step
that amplifies it: ``x - max`` before exp (softmax in bfloat16 errs by 7 %), the square before a sum (300² is infinite
in float16). Most of that follows backwards from who reads a value (:func:`extend`); what does not, a group says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.equations import is_literal, size_of
from jaxmp._internals.jax.primitives import COMBINES
from jaxmp._internals.jax.searches import is_search
from jaxmp._internals.jax.walk import PRODUCTS, walk
from jaxmp.engine.classes import CLEAR, FULL, HALF, INFER, JOIN, SOURCE, STRICT, Class, primitives_of
from jaxmp.engine.graph import Graph, Node, Step, users_of

_LINALG = primitives_of(Class.LINALG)
_ELEMENTWISE = primitives_of(Class.POINTWISE) | primitives_of(Class.INFER) | primitives_of(Class.WIDEST)
_CAST = "convert_element_type"
_EXTREMES = frozenset({"reduce_max", "reduce_min", "cummax", "cummin"})
_ROUNDINGS = frozenset({"floor", "ceil", "round"})
_CHANGES = _EXTREMES | _ROUNDINGS
_LOGARITHMS = frozenset({"log", "log1p", "log2"})
_ORDERINGS = frozenset({"lt", "le", "gt", "ge", "lt_to", "le_to"})  # eq is the derivative of max
_SEARCH = "call_hi_primitive"  # jnp.searchsorted from JAX 0.12 on
_READ_PLACES = _ORDERINGS | _ROUNDINGS | {"sin", "cos", "tan", "rem", _SEARCH}
_SQUARES = frozenset({"square", "integer_pow", "abs", "mul", "pow"})
_FORMS = PRODUCTS | {"mul"}
_MAY_SQUARE = _SQUARES | PRODUCTS
_MAY_HAND_PLACES = _READ_PLACES | _MAY_SQUARE | {_CAST, "complex", "neg", "exp"}
_SUMS = frozenset({"add", "sub", "add_any"})
_SCALES = frozenset({"mul", "div", "neg"})
_MEANS = _SCALES | {"reduce_sum"}
_MASKED = _SCALES | {"select_n"}
_LIMITS = frozenset({"max", "min", "clamp"})
_OFFSETS = _SUMS | _LIMITS
_PASSED_BY_STEPS = _MASKED | _LIMITS
_OF_ONE = frozenset({"acos", "acosh", "asin", "atanh", "erf_inv", "log1p"})  # what is left of 1 counts
_AFFINE = _SUMS | _PASSED_BY_STEPS
_NORMS = PRODUCTS | {"reduce_sum", "mul"}
_SUMMING = PRODUCTS | {"reduce_sum"}
_FULL = frozenset({FULL, STRICT})
SMALL_STEP = "small step"
# The largest scale of a small step: of one whose value decays as well, as 0.9 * h + 0.1 * f(h) does, and of any other.
_SMALL_BESIDE_DECAY = 0.25
_SMALL = {np.dtype(half): 8 * float(jnp.finfo(half).eps) for half in (jnp.bfloat16, jnp.float16)}


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations that belong together."""

    name: str  # what the plan calls it
    nodes: tuple[Node, ...]  # its operations; the first tells it from others of its name
    reason: str = ""  # why its products are float32, and the rest although others read it; empty where extend will do
    rounded: bool = False  # whether products read the first node rounded: no float32 copy is saved for the derivative


def find(graph: Graph) -> list[Group]:
    """The groups of a graph; those that have products become float32, but for what somebody asked for in half."""
    for node in graph.nodes:
        if node.kind is CLEAR or node.name in {"branches", "convert_element_type"}:
            node.origin = (_passed(node, ()) or node).origin
    found = list(_coordinates(graph))
    for step in [each for each in graph.steps if each.eqn.primitive.name in _BY_END]:
        for recognised in _BY_END[step.eqn.primitive.name]:
            found += recognised(step.node, step) if step.node is not None and step.node.inputs else ()
    reasons = _reasons(group for group in found if any(node.name in PRODUCTS for node in group.nodes))
    for node in graph.nodes if reasons else ():
        if node.same in reasons and (_is_product(node) or node.kind in (INFER, JOIN)):
            node.kind, node.reason = FULL, reasons[node.same]
    return found


def _reasons(groups: Iterable[Group]) -> dict[Node, str]:
    """Why the values of groups are float32, wherever they are written."""
    return {node.same: group.reason for group in groups if group.reason for node in group.nodes}


def _softmaxes(node: Node, _: Step) -> Iterator[Group]:
    """Exponentials over their sum; rounded where they end, but not if their logarithm is taken: it is lost near 1."""
    above, below = (each.origin for each in node.inputs)
    inner, is_product = _exponential(above), below.name == "dot_general"
    summed = filter(None, [_added_by_ones(below)]) if is_product else below.inputs
    if inner and (is_product or below.name == "reduce_sum") and inner in map(_exponential, summed):
        is_logged = any(reader.name in _LOGARITHMS for reader in _readers(node, _AFFINE))
        reason = "the sum of a softmax" if is_product else ""
        yield Group("softmax", (node, below, *inner), reason, rounded=not is_logged)


def _exponential(node: Node) -> list[Node]:
    """The exponential that a value is, with a mask or weights too, and the ``x - max(x)`` that it may be of."""
    node = node.origin
    cases = [each.origin for each in node.inputs] if node.name in ("select_n", "mul") else [node]
    found = [case for case in cases if case.name in ("exp", "exp2")][:1]
    return [*found, *(base for each in found if (base := each.inputs[0].origin).name == "sub")]


def _probability(node: Node) -> list[Node]:
    """The exponential that a softmax is of; none of another value."""
    node = node.origin
    return _exponential(node.inputs[0]) if node.name == "div" else []


def _logarithms(node: Node, _: Step) -> Iterator[Group]:
    """Logarithms of sums of exponentials, what they are subtracted from, and the products that add or select those."""
    way, logs = [node], [node]
    total = _origin(node.inputs[0], _AFFINE | {"abs"}, way)
    inner = _exponential(total.inputs[0] if total.name == "reduce_sum" else total)
    if node.name == "log1p" and inner:
        yield Group("softplus", (node, *inner))
        return
    if inner and total.name == "reduce_sum":
        known = {each.inputs[0].origin for each in inner}
        largest = [user for user in _readers(node) if user.name == "add"]  # which was subtracted before
        logs = [user for each in (node, *largest) for user in _readers(each) if user.name == "sub"]
        of_all = [log for log in logs if log.inputs[0].origin in known]
        picked = {reader.name for log in of_all for reader in _readers(log, {"mul", "neg", "gather"})}
        is_loss = picked & {"reduce_sum", "gather"} if of_all else logs
        name = "cross-entropy" if is_loss else "log-softmax" if of_all else "logsumexp"
        yield Group(name, (*way, total, *inner, *largest, *logs))
        less = [user for each in (node, *largest) for user in _readers(each, _MEANS) if user.name in _SUMS]
        terms = [_origin(term, _MEANS) for user in less for term in user.inputs]
        if picks := [term for term in terms if term.name in PRODUCTS and known & {each.origin for each in term.inputs}]:
            yield Group("cross-entropy", (*picks, *less), "a product of what logsumexp is of")
    elif total.name in PRODUCTS and any(map(_exponential, total.inputs)):
        yield Group("logsumexp", (total, *way), "a logarithm of a product of exponentials")
    elif mixed := _mixture(node):
        yield Group("log-probabilities", (*mixed, *way), "a logarithm of a product of probabilities")
    elif total.name != "logistic" and (total.name != "div" or not _exponential(total.inputs[0])):
        return
    yield from _read_by_products("log-probabilities", logs, "a product of log-probabilities")


def _mixture(log: Node) -> list[Node]:
    """The products of probabilities that a likelihood is made of: ``q`` and ``1 - q`` by outcome, or their ratio."""
    terms, passed = [*log.inputs], _AFFINE | ({"pow"} if log.name == "log1p" else {"pow", "abs"})
    for term in itertools.islice(terms, 64):  # it grows; see _origin
        unknown = [each for each in term.inputs if each.const is None]
        # A sum by outcome has weights: one without is a residual stream, and attention no likelihood.
        is_stream = term.name in _SUMS and len(unknown) > 1 and any(each.origin.name != "mul" for each in unknown)
        is_relu = term.name == "max" and (0.0, 0.0) in [each.const for each in term.inputs]
        is_passed = term.kind in (CLEAR, JOIN) or (term.name in passed and not is_relu)
        terms += unknown if is_passed and not is_stream else ()
    return [*dict.fromkeys(each for each in terms if each.name in PRODUCTS and any(map(_probability, each.inputs)))]


def _read_by_products(name: str, terms: Sequence[Node], reason: str) -> Iterator[Group]:
    """The products that add terms up or select some, each masked, scaled or compared or some summed before."""
    read = {reader: None for term in terms for reader in _readers(term, (_AFFINE | _MEANS) - {"add", "add_any"})}
    if products := [reader for reader in read if reader.name in PRODUCTS]:
        yield Group(name, (*products, *terms), reason)


def _squares(node: Node, step: Step) -> Iterator[Group]:
    """Sums of squares or magnitudes, told by the root that reads them or the difference that they are of; roots."""
    if node.name == "sqrt":  # of single ones: 256² is infinite in float16
        below = node.inputs[0].origin
        terms = [term.origin for term in below.inputs] if below.name in _SUMS else [below]
        squares = [term for term in terms if term.name != "abs" and _square(term)]
        yield from [Group("root of squares", (node, below, *squares), "a root of squares")][: len(squares)]
    elif node.name in PRODUCTS:
        squares = max(map(_square, node.inputs), key=len)
        is_vdot = node.name == "dot_general" and len(node.shape) == len(step.eqn.params["dimension_numbers"][1][0])
        if len(squares) > 1 and squares[0].name != "abs":
            yield Group("squared error", (node, *squares), "a product that sums squares of differences")
        elif is_vdot and _vector(node):
            yield Group("sum of squares", (node,), "a product of a vector with itself")
    elif squares := _square(_origin(node.inputs[0], _AFFINE)):
        is_difference, is_magnitude, way = len(squares) > 1, squares[0].name == "abs", list[Node]()
        reason = "a difference whose square is summed" if is_difference else "a square that is summed"
        root = next(filter(_is_root, _readers(node, _AFFINE)), node)
        below, mean = _origin(root.inputs[0], _AFFINE, way), _origin(squares[-1].inputs[-1], _AFFINE)
        if root is not node and (below is node.same or any(map(_square, below.inputs))):  # E[x²] - E[x]²
            is_mean = below is not node.same or any(each.name in ("mul", "div") for each in way)
            divides = root.name != "sqrt" or any(user.name == "div" for user in _readers(root, _AFFINE))
            name = "L2 norm" if not is_mean else "normalisation" if divides else "standard deviation"
            yield Group(name, (root, *way, below, node, *squares), reason)
        elif is_difference and mean.name == "reduce_sum" and mean.inputs[0].origin is squares[1].inputs[0].origin:
            yield Group("variance", (node, *squares), reason)
        else:
            name = (("sum of squares", "L1 norm"), ("squared error", "absolute error"))[is_difference][is_magnitude]
            yield Group(name, (node, *squares), reason)
            yield from _read_by_products(name, [node] if is_difference else [], "a product of errors")


def _square(node: Node) -> list[Node]:
    """A square or a magnitude, and the difference that it may be of; none if it is another operation."""
    node = node.origin
    is_square = node.name in ("square", "integer_pow", "abs")
    is_square |= node.name == "mul" and len({each.origin for each in node.inputs}) == 1
    is_square |= node.name == "pow" and node.inputs[-1].const == (2.0, 2.0)
    base = _origin(node.inputs[0], {"abs"}) if is_square and node.inputs else node  # |z| of a complex one has none
    return [] if base is node else [node, base] if base.name == "sub" else [node]


def _is_root(node: Node) -> bool:
    return node.name in ("sqrt", "rsqrt") or (node.name == "pow" and node.inputs[-1].const == (0.5, 0.5))


def _cosines(node: Node, _: Step) -> Iterator[Group]:
    """Products over the norms of both factors, however they are written."""
    first, last = node.inputs[0].origin, node.inputs[-1].origin
    if node.name == "div" and (below := _origin(last, _OFFSETS)).name == "mul" and all(map(_is_norm, below.inputs)):
        yield Group("cosine similarity", (node, below, first), "divided by the norms of both")
    elif node.name == "reduce_sum" and first.name == "mul" and (units := _units(first)):
        yield Group("cosine similarity", (node, first, *units))


def _near_one(node: Node, _: Step) -> Iterator[Group]:
    """What a cosine is subtracted from if that is 1, or a multiple of both; angles."""
    first, last, way = node.inputs[0].origin, node.inputs[-1].origin, list[Node]()
    if node.name in _SUMS and not (first.const or last.const):
        return
    product = _origin(last if first.const else first, _MASKED | _SQUARES | _OFFSETS, way)
    if node.name == "add" and "neg" not in [each.name for each in way]:  # 1 + c is 2
        return
    low, high = first.const or last.const or (1.0, 1.0)
    units = _units(product, way) if product.name in PRODUCTS and low == high else []
    if units and math.isclose(_scale(way), high, rel_tol=0.1):
        yield Group("cosine similarity", (product, node, *way, *units), "a product of unit vectors, near 1")


def _units(product: Node, way: list[Node] | None = None) -> list[Node]:
    """The two factors of a product if both are unit vectors, or multiples by what ``way`` gathers."""
    units = [_origin(each, _SCALES, way) for each in product.inputs[:2]]
    norms = [each.inputs[each.name == "div" :] for each in units if each.name in ("div", "mul")]
    return units if [any(map(_is_norm, each)) for each in norms] == [True, True] else []


def _scale(way: Sequence[Node]) -> float:
    """What a value was multiplied with on its way; NaN if that is not one number."""
    consts = [(node.name, *each.origin.const) for node in way for each in node.inputs if each.origin.const]
    factors = [(name, high if low == high != 0 else math.nan) for name, low, high in consts if name in ("mul", "div")]
    return math.prod(factor if name == "mul" else 1 / factor for name, factor in factors)


def _is_norm(node: Node) -> bool:
    root = _origin(node.inputs[1] if node.name == "div" and node.inputs[0].const else node, _AFFINE)
    return _is_root(root) and _vector(_origin(root.inputs[0], _AFFINE)) is not None


def _vector(norm: Node) -> Node | None:
    """The vector whose squares a value sums, or that a product multiplies with itself, a multiple or product of it."""
    added = norm.inputs[0] if norm.name == "reduce_sum" else _added_by_ones(norm)
    if added is not None and (square := _square(_origin(added, _AFFINE))):
        return _origin(square[0].inputs[0], _SCALES | {"abs"})
    pair = [_origin(operand, _SCALES) for operand in norm.inputs[:2]] if norm.name in PRODUCTS else []
    for one, other in zip(pair, pair[::-1], strict=True):
        if one is other or (other.name in {"mul", *PRODUCTS} and one in [_origin(x, _SCALES) for x in other.inputs]):
            return one
    return None


def _added_by_ones(product: Node) -> Node | None:
    """What a product with ones adds up."""
    pair = product.inputs[:2] if product.name in PRODUCTS else ()
    return next((one for one, other in zip(pair, pair[::-1], strict=True) if other.origin.const == (1.0, 1.0)), None)


def _differences(node: Node, _: Step) -> Iterator[Group]:
    """Squared distances, |x|² + |y|² - 2xy with |x|² summed or picked from xxᵀ; E[xy] - E[x] E[y] of products."""

    def is_twice(node: Node) -> bool:
        return sum(node in term.inputs for term in terms) > 1

    end = node
    while len(end.users) == 1 and (end.users[0].name in _SUMS or _passed(end.users[0], _SCALES) is end):
        end = end.users[0]
        if end.name in _SUMS:  # a larger sum
            return
    terms = [node, *walk(node.inputs, _terms)]
    products = {term: [_origin(each, _SCALES) for each in term.inputs] for term in terms if term.name in PRODUCTS}
    if not products:
        return
    summed = set(walk((term for term in terms if term.name == "reduce_sum"), _terms))
    parts = summed.union(walk((term for term in terms if term.name in ("gather", "slice", "dynamic_slice")), _terms))
    for norm, vector in [(term, _vector(term) or _weighed(term)) for term in terms if term.name in _NORMS]:
        is_whole = bool(products.get(norm)) and len(norm.shape) >= len(norm.inputs[0].shape)  # not a number a vector
        if vector is None or (is_whole and norm not in parts and not _added_by_ones(norm)):
            continue
        cancelled = [each for each in products if vector in products[each]]
        if cancelled := [each for each in cancelled if not (each is norm or each in summed) or is_twice(each)]:
            inner = [each for each in products.get(norm, ()) if each is not vector]  # of x A xᵀ, the product x A
            nodes = dict.fromkeys(sorted((*cancelled, norm, *inner), key=lambda each: -len(each.shape)))
            yield Group("distances", tuple(nodes), "a product that sums of squares cancel")
    has_squares = any(any(map(_square, each.inputs)) for term in summed for each in term.inputs)
    for first in products if has_squares else ():
        vectors = {_origin(each[0].inputs[0], _SCALES) for each in map(_square, first.inputs) if each}
        if pair := [each for each in products if not vectors.isdisjoint(products[each])]:  # x² @ a - 2 x @ (a y)
            yield Group("distances", (first, *pair), "a product that sums of squares cancel")
    multiplied = [[_origin(each, _SCALES) for each in term.inputs] for term in terms if _is_multiplied(term)]
    for product in (term for term in products if not _is_outer(term)):
        for means in multiplied:
            if _are_means(product, means):
                yield Group("moments", (product, *means), "a mean of a product less the product of the means")


def _is_outer(node: Node) -> bool:
    """Return whether a value is a product that sums nothing."""
    return node.name == "dot_general" and node.kind is INFER


def _is_multiplied(node: Node) -> bool:
    """Return whether a value is an elementwise product of two values."""
    return _is_outer(node) or (node.name in ("mul", "square", "integer_pow") and not _passed(node, _SCALES))


def _are_means(product: Node, means: Sequence[Node]) -> bool:
    """Return whether values are sums of the same vectors whose products another sums."""
    vectors = [each.origin for each in product.inputs]
    squared = [[each.origin for each in vector.inputs] for vector in vectors if _is_multiplied(vector)]
    first, last = means[0], means[-1]  # of a square one

    def is_sum(mean: Node, vector: Node, names: Collection[str]) -> bool:
        return mean.name in names and not _is_outer(mean) and vector in [each.origin for each in mean.inputs]

    def are_sums(pair: Sequence[Node], names: Collection[str]) -> bool:
        orders = ((pair[0], pair[-1]), (pair[-1], pair[0]))
        return any(is_sum(first, one, names) and is_sum(last, other, names) for one, other in orders)

    return are_sums(vectors, {"reduce_sum"}) or any(are_sums(pair, _SUMMING) for pair in squared)


def _weighed(term: Node) -> Node | None:
    """What a factor of a product sums up: the gradient of distances is ``x * sum(g) - g @ y``."""
    factors = [each.origin for each in term.inputs] if term.name == "mul" else []
    factors += [each.origin for factor in factors if factor.name == "add_any" for each in factor.inputs]
    sums = [each for each in factors if each.name == "reduce_sum"]
    return _origin(sums[0].inputs[0], _MEANS) if sums else None


def _terms(node: Node) -> Sequence[Node]:
    """What a value is a sum or a difference of, or a multiple or a part."""
    if (below := _passed(node, _MASKED)) is not None:
        return [below]
    is_masked = node.name == "reduce_sum" and node.inputs[0].origin.name in ("select_n", "mul") and not _vector(node)
    if (node.name in _SUMS and len(node.users) == 1) or is_masked:
        return node.inputs
    root = node.inputs[0].origin if node.name in _SQUARES and node.name != "abs" and _square(node) else node
    return root.inputs[:1] if root.name == "sqrt" else ()  # the square of a norm


def _straight_through(node: Node, _: Step) -> Iterator[Group]:
    """Sums ``z + (q - z)``, in half as coarse as z; of a q made of z, such as z rounded, half holds the difference."""

    def made_of(each: Node) -> Sequence[Node]:
        return () if each is whole or each.name in PRODUCTS else each.inputs

    for whole, rest in itertools.permutations([each.origin for each in node.inputs], 2):
        if rest.name == "sub" and rest.inputs[1].origin is whole and whole not in walk(rest.inputs[:1], made_of):
            yield Group("straight-through estimator", (node, rest), "adds again what was subtracted")


def _small_steps(node: Node, _: Step) -> Iterator[Group]:
    """Sums that add to a value a small multiple of what products make of it: steps of an integrator."""
    pairs: Any = itertools.permutations(node.inputs, 2) if node.name == "add" else [node.inputs]
    pairs = [(whole, term) for whole, term in pairs if term.origin.name in _PASSED_BY_STEPS and whole.const is None]
    for whole, term in pairs if node.half in _SMALL else ():
        kept, way = list[Node](), list[Node]()
        ends = {_origin(whole, _SCALES, kept), whole.origin}
        term = _origin(term, _PASSED_BY_STEPS, way, constant=False)
        decays = bool(kept) and 0.75 < _largest_scale(kept) < 1  # where a rate is as coarse as half
        is_small = _largest_scale(way) < (_SMALL_BESIDE_DECAY if decays else _SMALL[node.half])
        # A number that is not known is the time of a step, or a learning rate, where a carry takes it.
        is_timed = node.loop and any(each.scale and not any(one.origin.const for one in each.inputs) for each in way)
        if is_small or (is_timed and "carry" in [each.name for each in _made_of([whole], ())]):
            products = [each for each in _made_of([term], ends) if each.name in PRODUCTS and each.origin not in ends]
            if any(each.origin in ends for each in _made_of(products, ends, until=())):
                yield Group(SMALL_STEP, (node, *kept), "takes steps that half would lose")


def _largest_scale(way: Sequence[Node]) -> float:
    """The largest number that a value was multiplied with on its way, of the constants there."""
    consts = [(node.name, *each.origin.const) for node in way for each in node.inputs if each.origin.const]
    return math.prod([{"mul": high, "div": 1 / (low or math.inf)}.get(name, 1.0) for name, low, high in consts])


def is_near_one(node: Node) -> bool:
    """Whether a value is multiplied with a constant so near 1 that half holds little of what it lacks of it."""
    half, consts = node.half, [each.origin.const for each in node.inputs if node.name == "mul" and each.origin.const]
    if half is None or half not in _SMALL:
        return False
    return any(1 - _SMALL[half] < low != half.type(low) and high < 1 for low, high in consts)


def _made_of(nodes: Iterable[Node], ends: Collection[Node], until: Collection[str] = PRODUCTS) -> Iterable[Node]:
    """What values are made of, back to ``ends`` and to operations of the names in ``until``."""
    return walk(nodes, lambda each: () if each.origin in ends or each.name in until else each.inputs)


def _searches(_: Node, step: Step) -> Iterator[Group]:
    """While loops whose condition reads what the turn itself computed anew, such as a residual.

    In half they may never end: a fixed point is met up to half's rounding, and then missed by as much again and again.
    """
    inside = [each.node for each in _inside(step)]
    products = [node for node in inside if node is not None and _is_product(node)]
    if step.bodies is not None and products and is_search(step.bodies):
        yield Group("search", tuple(products), "in a loop that runs until it converges")


def _inside(step: Step) -> list[Step]:
    """The equations in the bodies of one, each after those inside of it."""
    return [inner for body in step.inner for each in body.steps for inner in (*_inside(each), each)]


GROUPS = (
    (_softmaxes, {"div"}),
    (_logarithms, _LOGARITHMS | {"atanh", "erf_inv"}),
    (_squares, {"reduce_sum", "sqrt", *PRODUCTS}),
    (_cosines, {"reduce_sum", "div"}),
    (_near_one, {"sub", "add", *_OF_ONE}),
    (_differences, _SUMS),
    (_straight_through, {"add"}),
    (_small_steps, {"add", "sub", "scatter-add", "scatter-sub"}),
    (_searches, {"while"}),
)
"""The functions that recognise groups, and the operations they end in; coordinates need the whole graph."""
_BY_END = {end: [recognised for recognised, own in GROUPS if end in own] for _, ends in GROUPS for end in ends}


def _coordinates(graph: Graph) -> Iterator[Group]:
    """Products that make places or phases: rounded, made integers, compared with positions or tables, in sin or cos.

    Nothing but moves, offsets and scales lies between. In bfloat16 a place of 300.4 is 300, and a phase of 300.4 noise.
    """
    steps, products = graph.steps, [node for node in graph.nodes if node.name in PRODUCTS]
    if not products or not any(_hands_places(step) for step in steps if step.eqn.primitive.name in _MAY_HAND_PLACES):
        return
    computed = walk(products, users_of)
    keeping = {node for node in graph.nodes if _keeps_places(node, computed)}

    def places_made(start: Iterable[Node]) -> set[Node]:
        return {*walk(start, lambda node: [user for user in node.users if user in keeping])}

    of_products = places_made(products)
    casts = [step for step in steps if step.eqn.primitive.name == _CAST and step.eqn.invars[0].aval.dtype != bool]
    # Of integers; a number that is written out, the 6 of `clip(x, 0, 6)`, is a bound, and an identity is no position.
    made = [(step.node, step.is_fixed) for step in casts if step.node is not None and not step.node.inputs]
    of_iota = places_made(node for node, is_fixed in made if is_fixed and node.shape)
    of_iota |= places_made(node for node in graph.nodes if node.name == "iota")
    of_positions = of_iota | places_made(node for node, is_fixed in made if not is_fixed)
    coarse = {step.operands[0] for step in casts if step.eqn.outvars[0].aval.dtype.name in ("int8", "int4", "int2")}
    read = [*filter(None, coarse), *(operand for node in products for operand in node.inputs)]
    leading = walk(read, lambda node: () if node.name in PRODUCTS else node.inputs)  # to products
    complexes: dict[Any, list[Node]] = {}  # the real numbers that a complex one is made of: exp(ix) is a wave too
    handed: dict[Node, str] = {}
    for step in steps:
        name, node = step.eqn.primitive.name, step.node
        out: Any = next(iter(step.eqn.outvars), None)
        reals = [operand for operand in step.operands if operand]
        if name in (_CAST, "complex", "mul", "neg", "exp") and out.aval.dtype.kind == "c":
            atoms = (atom for atom in step.eqn.invars if not is_literal(atom))
            reals = [*dict.fromkeys((*reals, *(real for atom in atoms for real in complexes.get(atom, ()))))]
            complexes[out] = reals
        ends = list[Node]()
        squared = _squared_difference(node) if node is not None and name in _MAY_SQUARE else None
        if squared or name in _ORDERINGS:  # |x - position|: an interpolation
            pair, known = (squared.inputs, of_iota) if squared else (reals, of_positions)
            others = [each for each in zip(pair, pair[::-1], strict=True) if each[1] not in of_products]
            size = size_of(out.aval.shape)
            tables = () if squared else [each for each in others if _is_table(*each, computed, size)]
            ends = [each[0] for each in others if each[1] in known or each in tables]
        elif name in ("sin", "cos", "tan") or (name == "exp" and node is None):
            ends = [real for real in reals if real.origin.name not in _LIMITS]  # no activation
        elif name == "rem":
            ends = reals[:1]
        elif name in (_CAST, _SEARCH) and out.aval.dtype.kind in "iu":
            ends = [real for real in reals if real not in coarse]
        elif name in _ROUNDINGS and node is not None and not (node in leading and _is_quantised(node)):
            ends = reals
        handed |= dict.fromkeys(ends, name)
    places = {*walk(handed, lambda node: node.inputs if node in keeping else ())}
    between = places_made(places.intersection(products)) & keeping & places
    found = [node for node in graph.nodes if node in between]
    reason = "handed to " + ", ".join(sorted({handed[node] for node in found if node in handed}))
    for node in [*filter(_is_product, found)]:
        yield Group("coordinates", (node, *found), reason)
        found = []  # the first says it of all between


def _hands_places(step: Step) -> bool:
    """Whether an operation may be one that places are handed to, or a complex number."""
    name, node = step.eqn.primitive.name, step.node
    kind = step.eqn.outvars[0].aval.dtype.kind if name in (_CAST, "complex", "mul", "neg", "exp") else ""
    is_read = (name in _READ_PLACES or (name == _CAST and kind in "iu")) and any(step.operands)
    return is_read or kind == "c" or bool(node and name in _MAY_SQUARE and _squared_difference(node))


def _squared_difference(node: Node) -> Node | None:
    """The difference that a value is a square, a magnitude or a quadratic form of."""
    square = _square(node) if node.inputs else []
    if len(square) > 1 or not (square or (node.name in _FORMS and node.inputs)):
        return square[1] if square else None
    pair = [node.inputs[0 if square else end].origin for end in (0, -1)]
    made = [[one, *(each.origin for each in one.inputs if one.name in _FORMS)] for one in pair]
    return next((each for each in made[0] if each.name == "sub" and each in made[1]), None)


def _is_table(place: Node, other: Node, computed: Collection[Node], size: int) -> bool:
    """Whether a value is compared with each of a table, or with what is looked up there, as the edges of bins are."""
    sizes = [size_of(each.origin.shape) for each in (place, other)]
    is_each = max(sizes) < size and sizes[1] > 1
    is_looked_up = any(each.is_looked_up for each in walk([other], lambda node: node.inputs))
    return other not in computed and (is_each or is_looked_up)


def _keeps_places(node: Node, computed: Collection[Node]) -> bool:
    """Whether places are made of places: by products, moves, offsets, scales that no product computed, and bounds."""
    unknown = [operand for operand in node.inputs if operand in computed]
    # But no residual stream, no activation.
    if (node.name in _SUMS and len(unknown) > 1) or node.name in _LIMITS or node.name == "select_n":
        return {reader.name for reader in _readers(node)}.isdisjoint({*PRODUCTS, "reduce_sum"})
    is_moved = node.kind in (CLEAR, JOIN) or _passed(node, ()) is not None
    return len(unknown) < 2 if node.name == "mul" else is_moved or node.name in COMBINES | _AFFINE | PRODUCTS


def _is_quantised(rounded: Node) -> bool:
    """Whether rounding makes numbers of a network coarse: nobody reads what was rounded off."""
    whole = _origin(rounded.inputs[0], _SCALES, constant=False)

    def differs_from_whole(node: Node) -> bool:
        return node.name in _SUMS and whole in [_origin(each, _SCALES, constant=False) for each in node.inputs]

    rests = filter(differs_from_whole, _readers(rounded, _SCALES | _LIMITS | {"select_n"}))
    # A straight-through gradient would add it to the whole again.
    return all(rest.name == "add" or any(map(differs_from_whole, _readers(rest))) for rest in rests)


def _is_product(node: Node) -> bool:
    return node.kind is HALF and not node.asked


def _origin(node: Node, through: Collection[str], way: list[Node] | None = None, constant: bool = True) -> Node:
    """What a value was before it was moved and went ``through`` operations with constants, which ``way`` gathers."""
    # No chain that people write is longer; of a chain of thousands each would be followed to its start again and again.
    for _ in range(64):
        if (below := _passed(node, through, constant)) is None:
            break
        if way is not None and node.kind is not CLEAR:
            way.append(node)
        node = below
    return node.same


def _passed(node: Node, through: Collection[str], constant: bool = True) -> Node | None:
    """The operand of an operation that only moves it, or is one of ``through`` and has constants beside it."""
    name, inputs, is_through = node.name, node.inputs, node.name in through
    if len(inputs) == 1 or name == "branches":
        is_moved = is_through or name == "branches" or (node.kind is CLEAR and name not in _CHANGES)
        return inputs[0] if is_moved or (name == _CAST and node.kind is FULL) else None
    if not is_through or not inputs:
        return None
    # The one number of a step may be made of anything, but is no product itself.
    numbers = [] if constant or node.shape == () else [one for one in node.scale if one.origin.name not in PRODUCTS]
    unknown = [operand for operand in inputs if operand not in numbers and not _is_given(operand, constant)]
    if name in ("select_n", "max"):  # `where(n > 0, variance, nan)`, whose NaN is no number to know it by
        unknown = [operand for operand in unknown if operand.origin.kind is not SOURCE]
    elif len(unknown) > 1 and not constant and name in _SCALES:  # a number may stand in any factor: 1e-3 * m / (r + 1)
        unknown = [operand for operand in unknown if operand.origin.name in through][:1]
    return unknown[0] if len(unknown) == 1 and (name != "div" or unknown[0] is inputs[0]) else None


def _is_given(operand: Node, constant: bool, depth: int = 4) -> bool:
    """Whether a value is a constant, or at least an argument, or computed from such and from integers in few steps."""
    origin = operand.origin
    if not origin.inputs:
        return origin.kind is not SOURCE or not constant or origin.const is not None
    if depth == 0 or origin.name in PRODUCTS:
        return False
    return all(map(_is_given, origin.inputs, itertools.repeat(constant), itertools.repeat(depth - 1)))


def _readers(node: Node, through: Collection[str] = ()) -> list[Node]:
    """Who computes with a value, however it was moved; who does so by one of ``through`` is told and passed."""
    if not through and CLEAR not in [user.kind for user in node.users]:
        return [*dict.fromkeys(node.users)]
    after = walk(node.users, lambda user: user.users if user.kind is CLEAR or user.name in through else ())
    return [user for user in after if user.kind is not CLEAR or user.name in through]


def find_activations(nodes: Sequence[Node]) -> None:
    """Number each value by the last product that it has an element for each element of."""
    count = 0
    for node in nodes:
        operands: Sequence[Node] = ()
        if node.kind is HALF:
            count += 1
            node.activation_of = count
        elif node.kind is JOIN or (node.kind is CLEAR and node.name not in _EXTREMES):
            operands = node.inputs
        elif node.name in _ELEMENTWISE:
            operands = [operand for operand in node.inputs if operand.shape == node.shape]
        for operand in operands:
            if operand.activation_of > node.activation_of:
                node.activation_of = operand.activation_of


def are_of_one_product(values: Sequence[Node]) -> bool:
    """Return whether all values are activations of one product, like a softplus's terms."""
    first, *others = {value.activation_of for value in values}
    return first > 0 and not others


def take_outer_products(nodes: Sequence[Node]) -> list[Node]:
    """Gives outer products of what products made half precision: the gradient of a weight, of one example."""
    found = [node for node in nodes if node.kind is INFER and node.name == "dot_general"]
    found = [node for node in found if any(operand.after_product for operand in node.inputs)]
    for node in found:
        node.kind, node.reason = HALF, "product"
    return found


def extend(nodes: Sequence[Node], groups: Sequence[Group]) -> None:
    """Makes float32, backwards, what feeds only float32 operations, and what a group needs though others read it.

    Once states are known, also what feeds only what float32 was carried on to: the mean, subtracted before a scale.
    """
    needed = _reasons(groups)
    # What is factorised or solved and what a logarithm is taken of, and all that is computed from products for that.
    solved = {node for node in nodes if node.name in _LINALG}
    logged = {node for node in nodes if node.name in _LOGARITHMS}
    known = [node for node in reversed(nodes) if node.after_product and node.state < FULL]
    for node in [each for each in known if each.kind is INFER or each.has_epsilon or _is_product(each)]:
        readers = _readers(node)
        if readers and _is_product(node) and solved.issuperset(readers):
            node.kind, node.reason = FULL, f"feeds only {_names(readers)}"
        if node.has_epsilon and not logged.isdisjoint(readers):
            logged.add(node)
        if node.kind is not INFER:
            continue
        # What the author casts to float32 is the author's half up to there.
        full = [user for user in readers if user.name != _CAST and (user.kind in _FULL or user.state >= FULL)]
        is_solved = not solved.isdisjoint(full)
        # A sum of two operands that products made, a residual stream, stays half up to its last normalisation.
        is_stream = node.name == "add" and all([operand.activation_of for operand in node.inputs])
        is_stream = is_stream and not are_of_one_product(node.inputs)
        reason = needed.get(node.same, "")
        # Of a logarithm 1 - x is what counts, and x near 1 has lost it.
        if is_solved or (not is_stream and not logged.isdisjoint(full)):
            (solved if is_solved else logged).add(node)
            reason = f"feeds {_names(full)}"
        elif full and len(full) == len(readers) and not is_stream:
            reason = f"feeds only {_names(full)}"
        if reason:
            node.kind, node.state, node.reason = FULL, FULL, reason


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(sorted({node.name for node in nodes}))
