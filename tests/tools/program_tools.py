"""Find the sums in half precision in a program that computes gradients.

The search goes back from each gradient through operations that move, cast or add up values, also into and out of loops,
branches and calls. It ends at the operations that compute the cotangents: products and pointwise arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.sources import names_of
from jaxmp.program.equations import bodies_of, in_dtype_of_scatter, is_literal, opened, primitive_of
from jaxmp.program.walk import equations

FACTORS = frozenset({"mul", "div"})  # they count as moves if one operand is a literal
# The indices of a gather or a scatter are operands too, but the search follows only floating values.
MOVES, SUMS, COMPUTES = (
    frozenset(names.split())
    for names in (
        "convert_element_type reduce_precision broadcast_in_dim reshape squeeze transpose rev copy neg real pad slice "
        "dynamic_slice dynamic_update_slice gather scatter concatenate split unstack tile optimization_barrier pvary",
        "reduce_sum cumsum scatter-add scatter_add reduce_window_sum add_any add psum psum_invariant",
        "dot_general conv_general_dilated ragged_dot_general mul div sub rem max min clamp select_n sign abs exp exp2 "
        "log log1p logistic tanh sqrt rsqrt cbrt pow integer_pow square one_minus_square sin cos erf erf_inv erfc iota "
        "reduce_max reduce_min reduce_prod cumprod cummax sort select_and_scatter_add select_and_gather_add",
    )
)


class Sum(NamedTuple):
    """A sum in half precision, with its number of terms and its scopes."""

    primitive: str
    dtype: str
    terms: float
    scope: str


def half_sums(jaxpr: Any, least: int = 257) -> list[Sum]:
    """Return the half sums of at least ``least`` terms behind ``jaxpr``'s results.

    An addition of two cotangents of an activation, as in a residual stream, is not a sum over the uses of a param. So
    an ``add_any`` behind a sum over rows or iterations does not count.
    """
    place = _Place(opened(jaxpr)[0])
    sums: dict[Sum, None] = {}
    visited: set[Any] = set()
    todo = [(place, atom, False) for atom in place.jaxpr.outvars]
    while todo:
        place, atom, summed = todo.pop()
        if (
            is_literal(atom)
            or not jnp.issubdtype(atom.aval.dtype, jnp.floating)
            or (id(place), atom, summed) in visited
        ):
            continue
        visited.add((id(place), atom, summed))
        for half_sum in place.sums(atom):
            if not (summed and half_sum.primitive == "add_any"):
                sums[half_sum] = None
        # A sum over an axis or over iterations adds many cotangents, even if its own dtype is float32.
        summed = summed or place.adds_up(atom)
        todo += [(*source, summed) for source in place.sources(atom)]
    # In a chain of additions, only the last one has all terms.
    longest = max((item.terms for item in sums if item.primitive == "add_any"), default=0)
    return [item for item in sums if item.terms >= (longest if item.primitive == "add_any" else least) >= least]


class _Place:
    """A jaxpr, the equation whose body it is, and that equation's place.

    The outermost jaxpr has no context.
    """

    def __init__(self, jaxpr: Any, eqn: Any = None, around: _Place | None = None) -> None:
        self.jaxpr, self.eqn, self.around = jaxpr, eqn, around
        self.definitions = {var: (eqn, index) for eqn in jaxpr.eqns for index, var in enumerate(eqn.outvars)}
        self.index = {var: index for index, var in enumerate(jaxpr.invars)}
        read = [atom for eqn in [*jaxpr.eqns, jaxpr] for atom in {*_variables(_read(eqn))}]
        self.readers = Counter(read)
        self._bodies: dict[int, list[_Place]] = {}

    def bodies(self, eqn: Any) -> list[_Place]:
        """Return the bodies of ``eqn``.

        For a while loop, return only the body that computes the carries.
        """
        if id(eqn) not in self._bodies:
            bodies = bodies_of(eqn)
            jaxprs = () if bodies is None else bodies.jaxprs[-1:] if bodies.kind == "while" else bodies.jaxprs
            self._bodies[id(eqn)] = [_Place(opened(jaxpr)[0], eqn, self) for jaxpr in jaxprs]
        return self._bodies[id(eqn)]

    def sources(self, var: Any) -> list[tuple[_Place, Any]]:
        """Return the values from which ``var`` was moved, cast or added up.

        The list is empty if an operation computes ``var``.
        """
        if var not in self.definitions:
            return self._outside(var)
        eqn, index = self.definitions[var]
        if bodies := self.bodies(eqn):
            return [(body, body.jaxpr.outvars[index]) for body in bodies]
        name = primitive_of(eqn)
        if name in MOVES | SUMS or (name in FACTORS and any(map(is_literal, eqn.invars))):
            return [(self, atom) for atom in eqn.invars]
        assert name in COMPUTES, f"unknown primitive {name}: add it to MOVES, SUMS or COMPUTES"
        return []

    def _outside(self, var: Any) -> list[tuple[_Place, Any]]:
        if self.around is None or var not in self.index:
            return []
        index, bodies = self.index[var], bodies_of(self.eqn)
        assert bodies is not None
        before = {"cond": 1, "while": bodies.consts}.get(bodies.kind, 0)
        initial = [(self.around, self.eqn.invars[before + index])]
        carry = index - (bodies.start - bodies.consts) if bodies.kind in ("scan", "while") else -1
        is_carry = 0 <= carry < bodies.carry + self._while_carry()
        return [*initial, (self, self.jaxpr.outvars[carry])] if is_carry else initial

    def _while_carry(self) -> int:
        return len(self.jaxpr.outvars) if self.eqn.primitive.name == "while" else 0

    def sums(self, var: Any) -> Iterator[Sum]:
        """Yield the half-precision sum whose result is ``var``, if there is one."""
        if var not in self.definitions:
            return
        eqn, index = self.definitions[var]
        terms, dtype = _terms(self, eqn), var.aval.dtype
        if (cycle := self._accumulation(eqn, index)) is not None:
            terms = eqn.params.get("length", math.inf)
            dtype = min((atom.aval.dtype for atom in cycle), key=lambda dtype: dtype.itemsize)
        if terms is not None and dtype.itemsize < 4:
            yield Sum(eqn.primitive.name, dtype.name, terms, "/".join(names_of(eqn)))

    def adds_up(self, var: Any) -> bool:
        """Return whether ``var`` is a sum over an axis or over the iterations of a loop."""
        eqn, index = self.definitions.get(var, (None, 0))
        if eqn is None:
            return False
        return eqn.primitive.name in SUMS - {"add_any", "add"} or self._accumulation(eqn, index) is not None

    def _accumulation(self, eqn: Any, index: int) -> list[Any] | None:
        """Return the values on the cycle of a carry, if the loop only adds to the carry.

        If the body has another use for the carry, it is a stream of activations and not a sum. Then return None.
        """
        bodies = bodies_of(eqn)
        if bodies is None or bodies.kind not in ("scan", "while"):
            return None
        (body,) = self.bodies(eqn)
        first = bodies.start - bodies.consts
        if index >= (bodies.carry if bodies.kind == "scan" else len(body.jaxpr.outvars)):
            return None
        goal = body.jaxpr.invars[first + index]
        cycle = body._cycle(body.jaxpr.outvars[index], body, goal, set())
        return None if cycle is None or not any(is_sum for _, is_sum in cycle) else [atom for atom, _ in cycle]

    def _cycle(self, atom: Any, end: _Place, goal: Any, visited: set[Any]) -> list[tuple[Any, bool]] | None:
        """Return the values from ``goal`` in ``end`` to ``atom``, and which are sums.

        Return None if another operation than a move or a sum is between them, or a value has several readers.
        """
        if is_literal(atom) or self.readers[atom] != 1 or (id(self), atom) in visited:
            return None
        visited.add((id(self), atom))
        if self is end and atom in self.index:
            return [(atom, False)] if atom is goal else None
        eqn, _ = self.definitions.get(atom, (None, 0))
        if eqn is not None and primitive_of(eqn) not in MOVES | SUMS and not self.bodies(eqn):
            return None
        for place, source in self.sources(atom):
            if (cycle := place._cycle(source, end, goal, visited)) is not None:
                return [(atom, eqn is not None and eqn.primitive.name in SUMS), *cycle]
        return None


def _read(eqn: Any) -> list[Any]:
    return eqn.outvars if hasattr(eqn, "eqns") else eqn.invars


def _variables(atoms: list[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not is_literal(atom))


def _terms(place: _Place, eqn: Any) -> float | None:
    """Return the number of terms in each element of a sum, or None for no sum."""
    name, params, operand = eqn.primitive.name, eqn.params, eqn.invars[0].aval if eqn.invars else None
    if name == "reduce_sum":
        return math.prod(operand.shape[axis] for axis in params["axes"])
    if name == "cumsum":
        return operand.shape[params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    if name in ("scatter-add", "scatter_add"):
        indices = math.prod(eqn.invars[1].aval.shape[:-1])
        return 1 if params["unique_indices"] else indices
    if name == "add_any":
        return _operands(place, eqn)
    return None


def _operands(place: _Place, eqn: Any) -> int:
    """Return the number of terms of an addition whose operands may be additions too."""
    count, additions = 0, [eqn]
    while additions:
        for atom in additions.pop().invars:
            equation = None if is_literal(atom) else place.definitions.get(atom, (None,))[0]
            if equation is not None and equation.primitive.name == "add_any":
                additions.append(equation)
            else:
                count += 1
    return count


def has_loops(jaxpr: Any) -> bool:
    """Return whether a program has loops or branches."""
    return any(bodies is not None and bodies.kind != "call" for bodies in map(bodies_of, equations(jaxpr)))


def with_exact_sums(jaxpr: Any) -> Callable[..., list[Any]]:
    """Return a function that evaluates a program without loops, with exact sums.

    It computes in float64. Results that are half in the program are rounded to half, except those of sums.
    """

    def evaluate(jaxpr: Any, args: Any) -> list[Any]:
        jaxpr, consts = opened(jaxpr)
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_wide, consts), *args], strict=True))

        def read(atom: Any) -> Any:
            return _wide(atom.val) if is_literal(atom) else known[atom]

        for eqn in jaxpr.eqns:
            operands, bodies = [read(atom) for atom in eqn.invars], bodies_of(eqn)
            if bodies is not None:
                results = evaluate(bodies.jaxprs[0], operands)
            else:
                params = {name: _wide_param(value) for name, value in eqn.params.items()}
                results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
                results = results if eqn.primitive.multiple_results else [results]
                if eqn.primitive.name not in SUMS:
                    results = [_rounded(*pair) for pair in zip(results, eqn.outvars, strict=True)]
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return lambda *args: evaluate(jaxpr, [_wide(leaf) for leaf in jax.tree.leaves(args)])


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _wide(value: Any) -> Any:
    return jnp.asarray(value, np.float64) if _is_float(jnp.result_type(value)) else value


def _wide_param(value: Any) -> Any:
    if hasattr(value, "eqns"):  # the update function of a scatter-add
        return in_dtype_of_scatter(value, np.float64)
    return np.dtype(np.float64) if isinstance(value, np.dtype) and _is_float(value) else value


def _rounded(value: Any, var: Any) -> Any:
    is_half = _is_float(var.aval.dtype) and var.aval.dtype.itemsize < 4
    return value.astype(var.aval.dtype).astype(np.float64) if is_half else value
