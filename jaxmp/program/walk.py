"""Interpret a jaxpr, and find the equations of the jaxprs nested in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmp._internals.jax.hi_primitives import expansion_of, hi_primitive_of
from jaxmp.program.equations import Atom, Literal, aval_of, is_literal, opened, params_of, primitive_of
from jaxmp.program.primitives import PRODUCTS, classify

T = TypeVar("T")


def _value_of(literal: Literal) -> Any:
    return literal.val


def interpreted(
    jaxpr: Any,
    consts: Sequence[T],
    args: Sequence[T],
    equation: Callable[[Any, list[T]], Sequence[T]],
    literal: Callable[[Literal], T] = _value_of,
    variables: dict[Var, T] | None = None,
) -> list[T]:
    """Interpret an open jaxpr, with arrays or with facts about its values.

    Args:
      jaxpr: an open jaxpr, or an object with its attributes.
      consts: the arrays or facts of its constants.
      args: the arrays or facts of its arguments.
      equation: a function that takes an equation and the arrays or facts of its operands. It returns the arrays or
        facts of the equation's results.
      literal: a function that returns the array or fact of a literal.
      variables: a dictionary, which is filled with the array or fact of each variable.

    Returns:
      The arrays or facts of the jaxpr's results.
    """
    env: dict[Var, T] = {} if variables is None else variables
    env.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Atom) -> T:
        return literal(atom) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        results = equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def unused_after(jaxpr: Any) -> list[list[Any]]:
    """Return for each equation the variables that nothing reads after it."""
    last = {}
    for number, eqn in enumerate(jaxpr.eqns):
        for atom in (*eqn.invars, *eqn.outvars):
            if not is_literal(atom):
                last[atom] = number
    for atom in jaxpr.outvars:
        if not is_literal(atom):
            last.pop(atom, None)
    unused: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for var, number in last.items():
        unused[number].append(var)
    return unused


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation of a jaxpr and of the jaxprs nested in it.

    The jaxpr may be open or closed.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from equations(inner)


def jaxprs_in(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yield the jaxprs in an equation's parameters.

    If a hi primitive outside of the table has none, yield the jaxpr that JAX compiles in its place.
    """
    jaxprs = list(filter(is_jaxpr, jax.tree.leaves(list(params_of(eqn).values()), is_leaf=is_jaxpr)))
    primitive = hi_primitive_of(eqn)
    if primitive is not None and not jaxprs and classify(primitive_of(eqn)) is None:
        jaxprs = list(filter(is_jaxpr, [expansion_of(primitive)]))
    yield from jaxprs


def is_jaxpr(param: object) -> bool:
    """Return whether a parameter of an equation is a jaxpr, open or closed."""
    # `ClosedJaxpr` and `Jaxpr` became one class in JAX 0.11, so this tests their attributes.
    return hasattr(param, "eqns") or hasattr(getattr(param, "jaxpr", None), "eqns")


def product_dtypes(jaxpr: Jaxpr) -> set[str]:
    """Return the names of the operand dtypes of all products in ``jaxpr``."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS)
    return {aval_of(atom).dtype.name for eqn in products for atom in eqn.invars[:2]}


def computing_only(jaxpr: Jaxpr, is_wanted: Sequence[bool]) -> Jaxpr:
    """Return the open jaxpr that computes only the wanted results of ``jaxpr``."""
    return dce_jaxpr(opened(jaxpr)[0], list(is_wanted), True)[0]


def inputs_used(jaxpr: Jaxpr, is_wanted: Sequence[bool]) -> list[bool]:
    """Return for each input of ``jaxpr`` whether the wanted results depend on it."""
    is_used: list[bool] = dce_jaxpr(opened(jaxpr)[0], list(is_wanted), False)[1]
    return is_used
