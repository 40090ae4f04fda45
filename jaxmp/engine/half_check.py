"""Check that a half policy of a model changes a product.

A half policy computes in float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmp._internals.jax.sources import source_of
from jaxmp.base.dtypes import is_half, is_narrow
from jaxmp.engine.decide import Decisions
from jaxmp.engine.marks import DECIDED, OF_POLICY, names_around, path_of
from jaxmp.engine.nodes import Step
from jaxmp.policy.policies import Policy
from jaxmp.program.equations import primitive_of
from jaxmp.program.primitives import PRODUCTS, Class, classify


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
        raise ValueError(_message(products, policy))


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


def _message(products: Sequence[Step], policy: Policy) -> str:
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
