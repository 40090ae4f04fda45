"""The plan: what autocast decides for each equation of a function, and why, before anything runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmp.engine import report
from jaxmp.engine.autocast import check_backend, checked_policy
from jaxmp.engine.rows import Row as Row
from jaxmp.engine.rows import Summary as Summary
from jaxmp.engine.rows import Writer
from jaxmp.engine.rules import Rules
from jaxmp.engine.trace import Traced


@dataclasses.dataclass(frozen=True)
class CastPlan:
    """What autocast decides for one call of a function.

    ``str(plan)`` is a text of one line for each equation and the totals after them. It holds no names of variables, no
    ids, no absolute paths and no column whose width depends on other rows, so that a project can keep it under version
    control: a change of one operation's precision is a diff of one line. :meth:`to_json` is for programs, and
    :mod:`rich` prints the plan as a table.

    Attributes:
      policy: the policy, as text.
      overrides: the overrides.
      rows: one for each equation, those of bodies after the equation that has them.
      summary: the totals.
    """

    policy: str
    overrides: Mapping[str, str]
    rows: tuple[Row, ...]
    summary: Summary

    def __str__(self) -> str:
        """The text of the plan."""
        return report.text(self)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """The plan as a table; a narrow console gets fewer columns."""
        yield report.table(self, options.max_width)

    def to_json(self) -> str:
        """The plan as JSON.

        The keys are ``policy`` (text), ``overrides`` (an object), ``rows`` (a list of objects with the attributes of
        :class:`Row`) and ``summary`` (an object with the attributes of :class:`Summary` and ``half_share``).
        """
        return report.to_json(self)


def cast_plan(
    fun: Callable[..., Any], policy: Any, overrides: Mapping[str, str] | None = None
) -> Callable[..., CastPlan]:
    """A function that takes what ``fun`` takes and returns what :func:`jaxmp.autocast` decides for that call.

    Nothing is executed: ``fun`` is traced, and a :class:`jax.ShapeDtypeStruct` may stand for any array. A function with
    custom derivative rules is shown as it computes its value; the rules themselves are decided when they run. To see a
    training step, plan its gradient: ``cast_plan(jax.grad(loss), policy)``.

    Args:
      fun: any function that JAX can trace.
      policy: as for :func:`jaxmp.autocast`, but for ``"float32"``, which decides nothing.
      overrides: as for :func:`jaxmp.autocast`.

    Raises:
      ValueError: as :func:`jaxmp.autocast` does, of overrides that match nothing too.
      TypeError: the policy is a PolicyMap.

    >>> def loss(w, x):
    ...     return jax.nn.logsumexp(x @ w)
    >>> w = jax.ShapeDtypeStruct((16, 8), "float32")
    >>> x = jax.ShapeDtypeStruct((4, 16), "float32")
    >>> plan = cast_plan(loss, "mixed_bfloat16")(w, x)
    >>> row = plan.rows[0]
    >>> row.primitive, row.operands, row.result, row.why, row.flops
    ('dot_general', ('bfloat16', 'bfloat16'), 'bfloat16', 'product', 1024)
    >>> plan.summary.islands
    {'logsumexp': 1}
    """
    one_policy = checked_policy(policy)
    if one_policy.compute_dtype == np.float32:
        raise ValueError(
            "cast_plan needs a policy with a half compute dtype, got float32, which leaves every operation as it is "
            "written; use 'mixed_bfloat16' or 'mixed_float16'"
        )
    overrides = dict(overrides or {})
    Rules(one_policy.compute_dtype, overrides)  # what is wrong with them is said here, not in the call

    @functools.wraps(fun)
    def planned(*args: Any, **kwargs: Any) -> CastPlan:
        check_backend(one_policy)
        rules = Rules(one_policy.compute_dtype, overrides)
        traced = Traced(fun, args, kwargs, rules)
        writer = Writer(traced.jaxpr, rules, traced.result_dtypes(one_policy))
        rules.check()
        return CastPlan(str(one_policy), overrides, tuple(writer.rows), writer.summary())

    return planned
