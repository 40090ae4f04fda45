"""Sums in half precision that lead to a gradient, found in the program that computes it.

From a gradient the walk goes back through what moves, casts or adds up values, into loops, branches and calls and out
again, to the operations that compute the cotangents: products and pointwise arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.equations import bodies_of, in_dtype_of_scatter, is_literal, opened
from jaxmp._internals.jax.sources import names_of
from jaxmp._internals.jax.walk import equations

FACTORS = frozenset({"mul", "div"})  # moves where the other operand is a number
# Of a gather or a scatter the indices are operands too: they are integers, and the walk follows floats only.
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
    """An addition in half precision: how many terms, and the scopes that it stands in."""

    primitive: str
    dtype: str
    terms: float
    scope: str


def half_sums(jaxpr: Any, least: int = 257) -> list[Sum]:
    """The sums of at least so many terms in half precision between the results of ``jaxpr`` and what computes them.

    A sum of two cotangents of an activation, as a residual stream has them, is none of a param: behind a sum over rows
    or turns they do not count.
    """
    place = _Place(opened(jaxpr)[0])
    found: dict[Sum, None] = {}
    seen: set[Any] = set()
    todo = [(place, atom, False) for atom in place.jaxpr.outvars]
    while todo:
        place, atom, summed = todo.pop()
        if is_literal(atom) or not jnp.issubdtype(atom.aval.dtype, jnp.floating) or (id(place), atom, summed) in seen:
            continue
        seen.add((id(place), atom, summed))
        for own in place.sums(atom):
            if not (summed and own.primitive == "add_any"):
                found[own] = None
        # What is added up turn by turn or over an axis is a sum of many cotangents, in float32 too.
        summed = summed or place.adds_up(atom)
        todo += [(*source, summed) for source in place.sources(atom)]
    longest = max((each.terms for each in found if each.primitive == "add_any"), default=0)  # of a chain of uses
    return [each for each in found if each.terms >= (longest if each.primitive == "add_any" else least) >= least]


class _Place:
    """A jaxpr where it stands: at the top, or as a body of an equation in another place."""

    def __init__(self, jaxpr: Any, eqn: Any = None, around: _Place | None = None) -> None:
        self.jaxpr, self.eqn, self.around = jaxpr, eqn, around
        self.made = {var: (eqn, index) for eqn in jaxpr.eqns for index, var in enumerate(eqn.outvars)}
        self.index = {var: index for index, var in enumerate(jaxpr.invars)}
        read = [atom for eqn in [*jaxpr.eqns, jaxpr] for atom in {*_variables(_read(eqn))}]
        self.readers = Counter(read)
        self._bodies: dict[int, list[_Place]] = {}

    def bodies(self, eqn: Any) -> list[_Place]:
        """The bodies of ``eqn``, of a while loop the one that computes its carries."""
        if id(eqn) not in self._bodies:
            bodies = bodies_of(eqn)
            jaxprs = () if bodies is None else bodies.jaxprs[-1:] if bodies.kind == "while" else bodies.jaxprs
            self._bodies[id(eqn)] = [_Place(opened(jaxpr)[0], eqn, self) for jaxpr in jaxprs]
        return self._bodies[id(eqn)]

    def sources(self, var: Any) -> list[tuple[_Place, Any]]:
        """Where the value of ``var`` was before it was moved, cast or added up; nothing if it is computed here."""
        if var not in self.made:
            return self._outside(var)
        eqn, index = self.made[var]
        if bodies := self.bodies(eqn):
            return [(body, body.jaxpr.outvars[index]) for body in bodies]
        name = eqn.primitive.name
        if name in MOVES | SUMS or (name in FACTORS and any(map(is_literal, eqn.invars))):
            return [(self, atom) for atom in eqn.invars]
        assert name in COMPUTES, f"{name} is neither known as a move or sum nor as what computes cotangents"
        return []

    def _outside(self, var: Any) -> list[tuple[_Place, Any]]:
        if self.around is None or var not in self.index:
            return []
        index, bodies = self.index[var], bodies_of(self.eqn)
        assert bodies is not None
        before = {"cond": 1, "while": bodies.consts}.get(bodies.kind, 0)
        found = [(self.around, self.eqn.invars[before + index])]
        turn = index - (bodies.start - bodies.consts) if bodies.kind in ("scan", "while") else -1
        return [*found, (self, self.jaxpr.outvars[turn])] if 0 <= turn < bodies.carry + self._while_carry() else found

    def _while_carry(self) -> int:
        return len(self.jaxpr.outvars) if self.eqn.primitive.name == "while" else 0

    def sums(self, var: Any) -> Iterator[Sum]:
        """The half sums that ``var`` is the result of."""
        if var not in self.made:
            return
        eqn, index = self.made[var]
        terms, dtype = _terms(self, eqn), var.aval.dtype
        if (way := self._turns(eqn, index)) is not None:
            terms = eqn.params.get("length", math.inf)
            dtype = min((atom.aval.dtype for atom in way), key=lambda dtype: dtype.itemsize)
        if terms is not None and dtype.itemsize < 4:
            yield Sum(eqn.primitive.name, dtype.name, terms, "/".join(names_of(eqn)))

    def adds_up(self, var: Any) -> bool:
        """Return whether ``var`` is a sum over an axis or over the turns of a loop."""
        eqn, index = self.made.get(var, (None, 0))
        if eqn is None:
            return False
        return eqn.primitive.name in SUMS - {"add_any", "add"} or self._turns(eqn, index) is not None

    def _turns(self, eqn: Any, index: int) -> list[Any] | None:
        """The values that a carry takes on its way round a loop, if all that happens to it is that more is added.

        Who reads it otherwise computes with it: then it is no sum, but a stream of activations.
        """
        bodies = bodies_of(eqn)
        if bodies is None or bodies.kind not in ("scan", "while"):
            return None
        (body,) = self.bodies(eqn)
        first = bodies.start - bodies.consts
        if index >= (bodies.carry if bodies.kind == "scan" else len(body.jaxpr.outvars)):
            return None
        goal = body.jaxpr.invars[first + index]
        way = body._way(body.jaxpr.outvars[index], body, goal, set())
        return None if way is None or not any(added for _, added in way) else [atom for atom, _ in way]

    def _way(self, atom: Any, end: _Place, goal: Any, seen: set[Any]) -> list[tuple[Any, bool]] | None:
        if is_literal(atom) or self.readers[atom] != 1 or (id(self), atom) in seen:
            return None
        seen.add((id(self), atom))
        if self is end and atom in self.index:
            return [(atom, False)] if atom is goal else None
        eqn, _ = self.made.get(atom, (None, 0))
        if eqn is not None and eqn.primitive.name not in MOVES | SUMS and not self.bodies(eqn):
            return None
        for place, source in self.sources(atom):
            if (way := place._way(source, end, goal, seen)) is not None:
                return [(atom, eqn is not None and eqn.primitive.name in SUMS), *way]
        return None


def _read(eqn: Any) -> list[Any]:
    return eqn.outvars if hasattr(eqn, "eqns") else eqn.invars


def _variables(atoms: list[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not is_literal(atom))


def _terms(place: _Place, eqn: Any) -> float | None:
    """How many terms each element of the result of ``eqn`` is the sum of; None if it is no sum."""
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
    """How many are added up by an addition and those that made its operands."""
    count, additions = 0, [eqn]
    while additions:
        for atom in additions.pop().invars:
            made = None if is_literal(atom) else place.made.get(atom, (None,))[0]
            if made is not None and made.primitive.name == "add_any":
                additions.append(made)
            else:
                count += 1
    return count


def has_loops(jaxpr: Any) -> bool:
    """Return whether a program has loops or branches."""
    return any(bodies is not None and bodies.kind != "call" for bodies in map(bodies_of, equations(jaxpr)))


def with_exact_sums(jaxpr: Any) -> Callable[..., list[Any]]:
    """A program without loops in float64, its half results rounded as they are, but for its sums, which are not."""

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
    if hasattr(value, "eqns"):  # the addition of a scatter
        return in_dtype_of_scatter(value, np.float64)
    return np.dtype(np.float64) if isinstance(value, np.dtype) and _is_float(value) else value


def _rounded(value: Any, var: Any) -> Any:
    is_half = _is_float(var.aval.dtype) and var.aval.dtype.itemsize < 4
    return value.astype(var.aval.dtype).astype(np.float64) if is_half else value
