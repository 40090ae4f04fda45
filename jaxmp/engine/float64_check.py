"""Warn if float64 enters a program under a half policy.

The engine leaves float64 alone. Under ``jax_enable_x64``, one float64 array therefore makes every product after it
float64.
"""

from __future__ import annotations

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.sources import Names
from jaxmp.base.user_warnings import warn_user
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.marks import DECIDED, names_around
from jaxmp.engine.nodes import Graph
from jaxmp.program.equations import Opened, aval_of
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.reading import read_program
from jaxmp.program.values import ARGUMENT, Key, Value, origins

_FLOAT64 = np.dtype(np.float64)


def warn_of_float64(program: Opened, graph: Graph, classifier: Classifier) -> None:
    """Warn if products under a half policy are float64, and name the first float64 value that causes it.

    A product is not reported if the author asks for float32 or more there: by :func:`jaxmp.precision`, by an override,
    by the ``dtype`` of a module, or if all its float64 operands come from casts. JAX's own casts look the same, so they
    are not reported either: those of ``jax.nn.one_hot`` and ``jnp.eye``, and of the quotient of two integers.
    """
    if not any(_reads_float64(step.eqn) for step in graph.steps):
        return
    for equation in read_program(*program, names_around(), counts_as_one=_is_emitted).equations.values():
        if DECIDED in equation.names or not _reads_float64(equation.eqn):
            continue
        half = classifier.half_of(equation.name, equation.names)
        if half is None:
            continue
        entries = [origin for operand in equation.operands for origin in _entries_of_float64(operand)]
        if entries:
            warn_user(_message(half, min(entries, key=_key_of)))
            return


def _reads_float64(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product with a float64 operand."""
    return eqn.primitive.name in PRODUCTS and any(aval_of(atom).dtype == _FLOAT64 for atom in eqn.invars)


def _is_emitted(eqn: JaxprEqn, names: Names) -> bool:
    return DECIDED in names


def _entries_of_float64(value: Value) -> list[Value]:
    """Return the values at which float64 enters the computation of ``value``.

    Casts are left out. A cast is the author's, or JAX adds it, for example where a float64 value is combined with
    float32.
    """

    def reads_float64(value: Value) -> bool:
        return any(operand.dtype == _FLOAT64 for operand in value.inputs)

    ends = origins(value, reads_float64)
    return [end for end in ends if end.dtype == _FLOAT64 and not end.is_cast]


def _key_of(value: Value) -> Key:
    """Return the place in the program at which a value is computed, or at which a constant is first read."""
    if value.name == ARGUMENT or value.key or value.reader is None:
        return value.key
    return value.reader.key


def _message(half: np.dtype, entry: Value) -> str:
    reader = entry.reader.source if entry.reader is not None else ""
    if entry.name == ARGUMENT:
        where = f"with an argument of shape {entry.shape}" + (f", which {reader} reads" if reader else "")
        remedy = "pass it as float32, e.g. x.astype('float32')"
    else:
        where = f"at {(entry.equation.source if entry.equation is not None else reader) or 'an unknown line'}"
        remedy = "make it float32 there, e.g. with dtype=jnp.float32"
    return (
        f"the policy computes in {half.name}, but products are float64: float64 enters {where}.\n"
        f"For {half.name} products, {remedy}. To keep float64, put the products in jaxmp.precision('float32')."
    )
