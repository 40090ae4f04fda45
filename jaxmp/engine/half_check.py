"""Check that a half policy changes the products of a model.

A half policy computes in float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.base.dtypes import is_half, is_narrow
from jaxmp.base.user_warnings import warn_user
from jaxmp.engine.decide import Decisions
from jaxmp.engine.marks import names_around
from jaxmp.engine.nodes import Step
from jaxmp.engine.overrides import Level, is_float32
from jaxmp.policy.patterns import EVERY, Pattern, pattern_text
from jaxmp.policy.policies import Policy
from jaxmp.program.equations import primitive_of
from jaxmp.program.primitives import PRODUCTS, Class, classify


class Reason(NamedTuple):
    """The reason why a module does not compute in half.

    Attributes:
      override: the key of the override that causes it; None if the module's own dtype causes it.
      dtype: the dtype in which the module computes.
    """

    override: str | None
    dtype: np.dtype

    def __str__(self) -> str:
        return f"its own dtype={self.dtype.name}" if self.override is None else f"override {self.override!r}"


def reason_not_half(
    policy: Policy, computes: np.dtype, pattern: Pattern | None, operations: Iterable[tuple[str, Level]] = ()
) -> Reason | None:
    """Return the reason why a module does not compute in half; None if it does.

    Args:
      policy: the policy of the module.
      computes: the dtype in which the module computes: the policy's, or the author's.
      pattern: the override that sets the module's policy, if any.
      operations: the overrides of operations. An override counts only if it covers every product and ``pattern`` is
        None.
    """
    if not is_half(computes):
        is_written = computes != policy.compute_dtype
        return Reason(None if is_written else pattern_text(pattern or "**"), computes)
    if pattern is not None:
        return None
    for key, level in operations:
        if key in (f"class:{Class.HALF}", EVERY) and is_float32(level):
            return Reason(key, np.dtype("float32"))
    return None


class NotHalf(NamedTuple):
    """A module that does not compute in half precision under a half policy.

    Attributes:
      name: its path; for a root module, the name of its class.
      reason: the override or the author's dtype.
      has_matrix: whether it has params with two or more axes, which products may read.
    """

    name: str
    reason: Reason
    has_matrix: bool


def check_half_products(decisions: Decisions, policy: Policy, modules: Sequence[NotHalf]) -> None:
    """Check that a half policy changes the products in a call of a whole model.

    Warn if most products stay as they were, because modules have their author's dtype. A few such modules, for example
    a float32 head, are no reason for a warning.

    Args:
      decisions: the decisions about the program of the call.
      policy: the policy of the model.
      modules: the modules that are not half. If it is empty, nothing is checked: pass an empty sequence after a call
        of only a part of the model.

    Raises:
      ValueError: marks or overrides cover products, but no product is half.
    """
    if not (modules and is_half(policy.compute_dtype)) or names_around():  # a region may change all products
        return
    steps = decisions.graph.steps
    products = [step for step in steps if step.eqn.primitive.name in PRODUCTS]
    number_in_half = sum(_is_half_product(step, decisions) for step in products)
    with_products = [module for module in modules if module.has_matrix]
    if number_in_half == 0:
        are_covered = any(step.region.level or (step.node and step.node.requested) for step in products)
        has_sum = any(step.is_sum for step in products)  # such a product is float32 without an override, too
        if are_covered and not has_sum and not any(map(_may_multiply, steps)):
            raise ValueError(_unchanged("every product stays as it was", policy, with_products or modules))
        return
    with_own_dtype = [module for module in with_products if module.reason.override is None]
    number_unchanged = len(products) - number_in_half
    if with_own_dtype and number_unchanged > number_in_half:
        extent = f"{number_unchanged} of {len(products)} products stay as they were"
        warn_user(_unchanged(extent, policy, with_own_dtype))


def _is_half_product(step: Step, decisions: Decisions) -> bool:
    """Return whether a product has half operands or a half result, or is float8."""
    compute_dtype = None if step.node is None else decisions.decision_of[step.node].compute_dtype
    if compute_dtype is not None:
        return is_narrow(compute_dtype)
    return any(map(_is_narrow_array, (*step.eqn.invars, *step.eqn.outvars)))


def _may_multiply(step: Step) -> bool:
    """Return whether an opaque equation reads several half arrays.

    The engine does not look into an opaque equation, such as a kernel of cuDNN.
    """
    is_closed = step.bodies is None and classify(primitive_of(step.eqn)) in (Class.OPAQUE, Class.RECURSE, None)
    return is_closed and sum(map(_is_narrow_array, step.eqn.invars)) > 1


def _is_narrow_array(atom: Any) -> bool:
    return is_narrow(getattr(atom.aval, "dtype", None))


def _unchanged(extent: str, policy: Policy, modules: Sequence[NotHalf]) -> str:
    """Return a message that a policy leaves products unchanged to this extent, because of these modules."""
    shown = ", ".join(f"{module.name} ({module.reason})" for module in modules[:8])
    more = ", …" if len(modules) > 8 else ""
    if any(module.reason.override is not None for module in modules):
        remedy = "Drop the override, or narrow its pattern."
    else:
        prefix = "" if is_half(policy.param_dtype) else "mixed_"
        name = f"{prefix}{policy.compute_dtype.name}"
        remedy = f"To overrule the dtype of a module, override it: overrides={{'**': {name!r}}}."
    return f"the policy computes in {policy.compute_dtype.name}, but {extent}: {shown}{more}.\n{remedy}"
