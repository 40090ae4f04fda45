"""Check a program for products that stay float32 or float64 by mistake, and warn or raise an error.

- A half policy (float16 or bfloat16) of a model must change a product.
- Under ``jax_enable_x64``, one float64 array makes every product after it float64, because the engine leaves float64
  alone.
- The engine cannot look into some equations, so their products stay float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.sources import Names, source_of, user_source_of
from jaxmp.base.dtypes import is_half, is_narrow
from jaxmp.base.user_warnings import warn_user
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.decide import Decisions
from jaxmp.engine.marks import DECIDED, OF_POLICY, names_around, path_of
from jaxmp.engine.nodes import Graph, Step
from jaxmp.policy.policies import Policy
from jaxmp.program.equations import Opened, aval_of, primitive_of
from jaxmp.program.primitives import PRODUCTS, Class, classify
from jaxmp.program.reading import read_program
from jaxmp.program.values import ARGUMENT, Key, Value, origins
from jaxmp.program.walk import equations, jaxprs_in


def check_half_products(decisions: Decisions, policy: Policy) -> None:
    """Check that a half policy changes a product in a call of a whole model.

    Raises:
      ValueError: overrides or the dtypes of modules keep every product.
    """
    if not is_half(policy.compute_dtype) or names_around():  # a region may change all products
        return
    steps = decisions.graph.steps
    products = [step for step in steps if step.eqn.primitive.name in PRODUCTS]
    if not products or any(_is_half_product(step, decisions) for step in products):
        return
    if all(map(_is_kept_by_policy, products)) and not any(map(_may_multiply, steps)):
        raise ValueError(_message_of_kept_products(products, policy))


def _is_half_product(step: Step, decisions: Decisions) -> bool:
    """Return whether a product has half operands or a half result, or is float8."""
    compute_dtype = None if step.node is None else decisions.decision_of[step.node].compute_dtype
    if compute_dtype is not None:
        return is_narrow(compute_dtype)
    return any(map(_is_narrow_array, (*step.eqn.invars, *step.eqn.outvars)))


def _is_kept_by_policy(step: Step) -> bool:
    """Return whether an override, or the author's dtype of a module, keeps a product as it was."""
    if DECIDED in step.names:
        return False
    is_requested = step.node is not None and bool(step.node.requested)
    return step.region.asked_by == OF_POLICY or (is_requested and step.region.level is None)


def _may_multiply(step: Step) -> bool:
    """Return whether an opaque equation reads several half arrays.

    The engine does not look into an opaque equation, such as a kernel of cuDNN.
    """
    is_closed = step.bodies is None and classify(primitive_of(step.eqn)) in (Class.OPAQUE, Class.RECURSE, None)
    return is_closed and sum(map(_is_narrow_array, step.eqn.invars)) > 1


def _is_narrow_array(atom: Any) -> bool:
    return is_narrow(getattr(atom.aval, "dtype", None))


def _message_of_kept_products(products: Sequence[Step], policy: Policy) -> str:
    """Return the message that all products stay as they were, with their places and the reasons."""
    reasons = {"/".join(path_of(step.names)) or source_of(step.eqn): step.reason for step in products}
    places = [f"{place} ({reason})" for place, reason in reasons.items()]
    shown = ", ".join(places[:8]) + (", …" if len(places) > 8 else "")
    if any(step.region.level == "written" for step in products):
        prefix = "" if is_half(policy.param_dtype) else "mixed_"
        name = f"{prefix}{policy.compute_dtype.name}"
        remedy = f"A module with its own dtype runs as it is written; override it: overrides={{'**': {name!r}}}."
    else:
        remedy = "Drop the override, or narrow its pattern."
    computes = f"the policy computes in {policy.compute_dtype.name}"
    return f"{computes}, but every product stays as it was: {shown}.\n{remedy}"


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
            warn_user(_message_of_float64(half, min(entries, key=_key_of)))
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


def _message_of_float64(half: np.dtype, entry: Value) -> str:
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


def warn_of_unread_products(graph: Graph, classifier: Classifier) -> None:
    """Warn of products that stay float32 because autocast cannot read the equation around them.

    The primitive of the equation is one that the table of primitives does not know, or whose bodies are not rebuilt.
    Kernels and solvers are not reported: they are opaque on purpose. Nor are regions that ask for float32.
    """
    unread = Counter[tuple[str, str]]()
    for step in graph.steps:
        name = primitive_of(step.eqn)
        if step.bodies is not None or DECIDED in step.names or classify(name) not in (None, Class.RECURSE):
            continue
        if step.region.level == "written" or classifier.half_of("dot_general", step.names) is None:
            continue
        for jaxpr in jaxprs_in(step.eqn):
            for eqn in equations(jaxpr):
                is_float32 = eqn.primitive.name in PRODUCTS and aval_of(eqn.invars[0]).dtype == np.float32
                unread[name, user_source_of(step.eqn)] += is_float32
    for (name, source), count in unread.items():
        if count:
            where = f" at {source}" if source else ""
            warn_user(
                f"autocast cannot read the primitive {name!r}{where}; products in it that stay float32: {count}.\n"
                "Cast their operands to half there, e.g. with x.astype(jaxmp.autocast_dtype()), or put the call in "
                "jaxmp.precision('float32') if float32 is right."
            )
