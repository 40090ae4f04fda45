"""Mixed precision for a whole function: each operation in the dtype that suits it, decided on its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def autocast(fun: F, policy: Any, overrides: Mapping[str, str] | None = None) -> F:
    """``fun`` with each of its operations in the precision that suits it, decided on its whole graph.

    Matrix products and convolutions run in the policy's compute dtype, what needs range or adds up many terms in
    float32, the rest in what its neighbours have; :mod:`jaxmp.autocast` states the rules, :func:`jaxmp.cast_plan`
    shows the decisions. ``fun`` is traced as it is written, on its own dtypes, and stays unedited: its params stay
    float32, its results have the dtypes that they had (under a pure policy such as ``"bfloat16"``: the output dtype).
    It composes with every transformation of JAX, around it and inside it.

    Args:
      fun: any function of arrays in pytrees that JAX can trace. Arguments that are no arrays (Python numbers, strings,
        None, functions) reach it as they are.
      policy: whatever :func:`jaxmp.get_policy` reads and computes in float16 or bfloat16; ``"O1"`` is mixed_float16.
        ``"float32"`` is for a part of a larger function under autocast, which then stays float32 as a whole.
      overrides: ``"**/head"`` (a path of modules or scopes, and everything below), ``"primitive:exp"`` or
        ``"class:accumulation"`` to ``"float32"`` or ``"half"``. A path goes before an operation, a region marked with
        :func:`jaxmp.precision` before both.

    Raises:
      ValueError: the policy has no half compute dtype; float16 on a TPU; an override is none, or (in the call) matched
        nothing.
      TypeError: the policy is a PolicyMap.

    >>> def loss(w, x):
    ...     return jax.nn.logsumexp(jax.nn.relu(x @ w) @ w)
    >>> half = jaxmp.autocast(loss, "mixed_bfloat16")
    >>> w = jax.numpy.eye(4)
    >>> half(w, w).dtype, jax.grad(half)(w, w).dtype
    (dtype('float32'), dtype('float32'))
    """
    from jaxmp.autocast.transform import transformed  # here, so that `import jaxmp` stays light

    return transformed(fun, policy, overrides)
