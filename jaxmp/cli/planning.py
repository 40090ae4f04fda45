"""``jaxmp plan``: the plan of a function that is named on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmp.cli.loading import in_current_folder, levels, load, told, traced
from jaxmp.engine.plan import CastPlan, cast_plan


def plan(
    function: str, policy: str, shapes: Sequence[str] = (), example: str | None = None, overrides: Sequence[str] = ()
) -> CastPlan:
    """The plan of a function on abstract arguments; nothing is executed but imports.

    Args:
      function, shapes, example: as for :func:`jaxmp.cli.loading.load`.
      policy: the name of a policy.
      overrides: ``"KEY=LEVEL"``.

    Raises:
      UsageError: one of them is wrong, or the function cannot be traced with these arguments.

    >>> plan("jax.numpy:matmul", "mixed_bfloat16", ["float32[8,16]", "float32[16,4]"]).summary.product_flops
    1024
    """
    exceptions = levels(overrides)
    with in_current_folder():
        loaded = load(function, shapes, example)
        with told(ValueError, TypeError):
            planned = cast_plan(loaded.function, policy, exceptions)
        with told(ValueError):
            try:
                return planned(*loaded.operands)
            except Exception:
                traced(function, *loaded)  # raises what the function itself does wrong
                raise
