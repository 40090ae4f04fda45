"""The kinds of findings of an audit, and the list of all findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxmp.inspect._audit.evidence import Audited, Faults
from jaxmp.inspect._audit.finders.casts import casts_in_loops, round_trips
from jaxmp.inspect._audit.finders.collectives import activation_gathers, float32_gathers, gradient_all_reduces
from jaxmp.inspect._audit.finders.constants import inexact_integers, overflowing_constants, vanishing_constants
from jaxmp.inspect._audit.finders.exponentials import half_exponentials
from jaxmp.inspect._audit.finders.losses import half_losses, never_unscaled, unscaled_float16
from jaxmp.inspect._audit.finders.products import (
    compiled_otherwise,
    float32_products,
    half_products,
    mixed_products,
    products_in_unknown_primitives,
    unaligned_products,
)
from jaxmp.inspect._audit.finders.state_dtypes import half_optimizer_state, half_params, half_statistics, strong_float64
from jaxmp.inspect._audit.finders.sums import half_sums
from jaxmp.program.values import Equation


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem with the precision of a program.

    Attributes:
      kind: the kind of the problem, one of ``FINDERS``.
      path: the modules and scopes, joined by ``/``; for params and other state, the path in the pytree.
      source: the user's file and line; empty if JAX does not know the line.
      what: a sentence that describes the problem.
      remedy: a sentence with the remedy.
    """

    kind: str
    path: str
    source: str
    what: str
    remedy: str

    def __str__(self) -> str:
        path, source = self.path or "(no scope)", self.source or "no line known"
        return f"{self.kind}: {path} ({source}): {self.what}; {self.remedy}"


FINDERS: dict[str, Callable[[Audited], Faults]] = {
    "float32-product": float32_products,
    "half-product": half_products,
    "mixed-product": mixed_products,
    "unknown-primitive": products_in_unknown_primitives,
    "unaligned-product": unaligned_products,
    "half-sum": half_sums,
    "half-exponential": half_exponentials,
    "half-loss": half_losses,
    "round-trip": round_trips,
    "cast-in-loop": casts_in_loops,
    "vanishing-constant": vanishing_constants,
    "overflowing-constant": overflowing_constants,
    "inexact-integers": inexact_integers,
    "half-params": half_params,
    "half-optimizer-state": half_optimizer_state,
    "half-statistics": half_statistics,
    "unscaled-float16": unscaled_float16,
    "never-unscaled": never_unscaled,
    "float64": strong_float64,
    "compiled-otherwise": compiled_otherwise,
    "float32-gather": float32_gathers,
    "activation-gather": activation_gathers,
    "gradient-all-reduce": gradient_all_reduces,
}
"""The finder of each kind of finding."""


def findings(audited: Audited) -> tuple[Finding, ...]:
    """Return all findings, sorted by kind and then in program order.

    If several findings share their kind, path and source, only the first is returned.
    """
    unique: dict[tuple[str, str, str], Finding] = {}
    for kind, find in FINDERS.items():
        for where, what, remedy in find(audited):
            path, source = (where.path, where.source) if isinstance(where, Equation) else where
            unique.setdefault((kind, path, source), Finding(kind, path, source, what, remedy))
    return tuple(unique.values())
