"""The reason for the dtype of each site, from autocast's plan of the forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmp.engine.plan import PlanRow, cast_plan
from jaxmp.inspect._budget.sites import SUM_OF_COTANGENTS, Site
from jaxmp.program.primitives import PRODUCTS

AUTHOR = "written in the program"
_NAMED = re.compile(r"^(amplified|between|feeds only float32|follows float32|a term that others cancel)\b.*")
_SHORT = {"between": "between half operations"}


def plan_rows(
    fun: Callable[..., Any], args: Sequence[Any], policy: Any, overrides: Mapping[str, str] | None
) -> Sequence[PlanRow]:
    """Return the rows of a function's cast plan; empty if the function has no policy."""
    try:
        return cast_plan(fun, policy, overrides)(*args).rows
    except ValueError:  # no policy, and no model under one
        return ()


def whys_of(sites: Sequence[Site], rows: Sequence[PlanRow]) -> list[str]:
    """Return the reason for each site.

    A site of the backward pass has the reason of the operation that it differentiates: on the same line and path, with
    the same primitive if there is one, else of the product.
    """
    known: dict[tuple[str, ...], str] = {}
    for row in sorted(rows, key=lambda row: row.primitive not in PRODUCTS):
        for key in ((row.path, row.source, row.primitive), (row.source, row.primitive), (row.path, row.source)):
            known.setdefault(key, row.why)
        known.setdefault((row.source,), row.why)
    whys = []
    for site in sites:
        path, source = site.equation.path, site.equation.source
        operation = site.equation.name if site.operation == SUM_OF_COTANGENTS else site.operation
        keys = (path, source, operation), (source, operation), (path, source), (source,)
        whys.append(next((known[key] for key in keys if key in known), AUTHOR))
    return whys


def rule_of(why: str) -> str:
    """Return the rule of a reason, without the names of neighbours.

    >>> rule_of("softmax: follows float32: exp"), rule_of("between dot_general and tanh")
    ('softmax', 'between half operations')
    """
    rule = why.partition("; ")[0]
    named = _NAMED.match(rule)
    if named:
        return _SHORT.get(named[1], named[1])
    return rule.partition(": ")[0]
