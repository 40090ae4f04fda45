"""The reason for the dtype of each site, from autocast's plan of the forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmp.engine.plan import PlanRow, cast_plan
from jaxmp.inspect._budget.sites import Site
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

    A site of the backward pass has the reason of the operation that it differentiates. This operation has the same path
    and primitive, and the same line, if the line is one of the user's code. Otherwise it is a product with the same
    path or line.
    """
    known: dict[tuple[str, ...], str] = {}
    for row in sorted(rows, key=lambda row: row.primitive not in PRODUCTS):
        for key in _keys(row.path, row.source, row.primitive):
            known.setdefault(key, row.why)
    whys = []
    for site in sites:
        keys = _keys(site.equation.path, site.equation.source, site.operation_in_float32)
        whys.append(next((known[key] for key in keys if key in known), AUTHOR))
    return whys


def _keys(path: str, source: str, operation: str) -> list[tuple[str, ...]]:
    """Return keys of an operation, the most specific first."""
    of_path = [("path", path, operation)] if path else []
    return [
        ("all", path, source, operation),
        *of_path,
        ("source", source, operation),
        ("place", path, source),
        ("line", source),
        *[("module", path) for _ in of_path],
    ]


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
