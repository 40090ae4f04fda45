"""Mixed precision for a whole function, decided operation by operation on its graph.

docs/autocast.md lists the rules, and README.md the stages of the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxmp._internals.jax.traces import is_tracing
from jaxmp.base.arguments import require_function, takes_a_function
from jaxmp.base.cache_keys import policies_off
from jaxmp.engine.emit import evaluated
from jaxmp.engine.graph import build
from jaxmp.engine.marks import DECIDED, precision
from jaxmp.engine.overrides import level_of, policy_and_exceptions
from jaxmp.engine.rules import Rules
from jaxmp.engine.trace import result_dtypes, traced
from jaxmp.policy.policies import Policy, check_backend

F = TypeVar("F", bound=Callable[..., Any])


@takes_a_function
def autocast(fun: F, policy: Any, overrides: Mapping[str, Any] | None = None) -> F:
    """``fun`` with each of its operations in the precision that suits it, decided on its whole graph.

    :mod:`jaxmp.engine.autocast` states the rules, and :func:`jaxmp.cast_plan` shows the decisions. ``fun`` is traced as
    it is written, on its own dtypes, and stays unedited: its params stay float32, its results have the dtypes that they
    had (under a pure policy such as ``"bfloat16"``: the output dtype). It composes with JAX's transformations. What it
    writes to NNX objects among its arguments (statistics, counts, metrics) is written to them, as by NNX's own; one
    that it closes over cannot change, as under ``jax.jit``. After TensorFlow's ``auto_mixed_precision`` graph pass.

    Args:
      fun: any function of arrays in pytrees that JAX can trace. Arguments that are no arrays (Python numbers, strings,
        None, functions) reach it as they are.
      policy: whatever :func:`jaxmp.get_policy` reads. One that computes in float32 gives
        ``fun`` itself under its precision of products, with its results in its output dtype: so it is on a CPU for
        ``"auto"``, and for a part of a larger function under autocast. The patterns of a PolicyMap are overrides.
      overrides: ``"**/head"`` (a path of modules or scopes, and everything below), ``"**/head:exp"`` (one of its
        operations), ``"primitive:exp"`` or ``"class:accumulation"`` to ``"float32"``, ``"tensorfloat32"`` (float32
        whose products are JAX's default), ``"half"`` or a policy that computes in one of them. Under a half policy the
        rules decide at that path; ``"half"`` forces all of it. A path goes before an operation, a region marked with
        :func:`jaxmp.precision` before both. Paths under a float32 policy may be half; all else follows the policy.

    Returns:
      A function of the same arguments; under ``jit`` it costs its casts, without it is traced in every call.

    Raises:
      ValueError: the policy computes in float64; float16 on a TPU; an override asks for another level, names no
        primitive or class that there is (``UnknownOperationError``), or (in the call) matched nothing
        (``UnmatchedOverrideError``).
      TypeError: ``fun`` is a Linen module, a class of modules, or no function; a key of the overrides, or a pattern of
        the PolicyMap, is a class of modules; an argument is a ShapeDtypeStruct (in the call).

    >>> def loss(w, x):
    ...     return jax.nn.logsumexp(jax.nn.relu(x @ w) @ w)
    >>> half = jaxmp.autocast(loss, "mixed_bfloat16")
    >>> w = jax.numpy.eye(4)
    >>> half(w, w).dtype, jax.grad(half)(w, w).dtype
    (dtype('float32'), dtype('float32'))
    """
    require_function(fun, "autocast")
    one_policy, exceptions = policy_and_exceptions(policy, overrides)
    programs: dict[Any, Any] = {}

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if policies_off.value:
            return fun(*args, **kwargs)
        if one_policy.compute_dtype == np.float32 and not exceptions:
            with precision(level_of(one_policy)), one_policy.matmul_context():
                return one_policy.cast_to_output(fun(*args, **kwargs))
        check_backend(one_policy)
        rules = Rules(one_policy.compute_dtype, exceptions, {} if is_tracing() else programs, one_policy.float8)
        results = computed(fun, rules, args, kwargs, one_policy)
        return one_policy.cast_to_output(results) if one_policy.compute_dtype == np.float32 else results

    return cast(F, wrapped)


def computed(fun: Callable[..., Any], rules: Rules, args: Any, kwargs: Any, policy: Policy | None = None) -> Any:
    """The results of one call of ``fun``, as the engine decides by ``rules``.

    Args:
      fun: a function; the code of modules in it is marked (see :mod:`jaxmp.engine.marks`).
      rules: what is asked of its operations.
      args, kwargs: its arguments.
      policy: that of an autocast of the whole function; without one all is decided, whether it has products or not.
    """
    program, operands = traced(fun, args, kwargs, rules)
    if shapes := [leaf for leaf in operands if isinstance(leaf, jax.ShapeDtypeStruct)]:
        raise TypeError(
            f"a function under autocast takes arrays, got {shapes[0]}; use jaxmp.cast_plan(fun, policy) to see the "
            "decisions for shapes, or jax.eval_shape, jax.make_jaxpr or jit(...).lower around it"
        )
    with jax.named_scope(DECIDED):
        graph, dtypes = build(*program.jaxpr, rules), result_dtypes(program, policy)
        results = evaluated(graph, rules, operands, dtypes, force=policy is None)
    rules.check()
    rules.decided(graph)
    return program.unflatten(results)
