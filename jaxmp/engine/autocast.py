"""Mixed precision for a whole function, decided for each operation.

docs/autocast.md lists the rules, and README.md the stages of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmp.base.arguments import printed, require_function
from jaxmp.base.donation import donation_note
from jaxmp.engine.checks import warn_of_float64, warn_of_unread_products
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.constant_casts import casts_constants_in_program
from jaxmp.engine.decide import Decisions, decide_program
from jaxmp.engine.emit import Emission
from jaxmp.engine.graph import build
from jaxmp.engine.inner_emissions import around_emitted, is_collecting
from jaxmp.engine.marks import DECIDED, mark_of, names_around
from jaxmp.engine.overrides import level_of, policy_and_exceptions
from jaxmp.engine.shared_programs import Programs, SharedPrograms, key_of_jitted_call, remember
from jaxmp.engine.trace import result_dtypes, traced
from jaxmp.policy.off_switch import unless_policies_off
from jaxmp.policy.policies import Policy

F = TypeVar("F", bound=Callable[..., Any])


def autocast(fun: F, policy: Any = None, overrides: Mapping[str, Any] | None = None) -> F:
    """Return ``fun`` with half precision or float32 chosen for each operation.

    docs/autocast.md lists the rules, and :func:`jaxmp.cast_plan` shows the decisions. ``fun`` is traced in its original
    dtypes. Params stay float32, and results keep their dtypes. (If the policy's output dtype is half, as in
    ``"bfloat16"``, results are half.) You can use ``jit``, ``grad``, ``vmap`` and JAX's other transformations inside of
    ``fun`` and around the returned function. The method follows TensorFlow's ``auto_mixed_precision`` graph pass.

    ``fun`` may change NNX objects that are its arguments, for example batch statistics, as under NNX's transforms. It
    cannot change objects that it closes over, as under ``jax.jit``.

    Args:
      fun: any function of arrays in pytrees that JAX can trace. Other arguments (Python numbers, strings, None,
        functions) are passed on unchanged.
      policy: any policy of :func:`jaxmp.get_policy`. Under a policy that computes in float32, such as ``"auto"`` on a
        CPU, ``fun`` runs in float32 with the policy's ``matmul_precision``. Its results are cast to the output dtype.
        The patterns of a PolicyMap count as overrides.
      overrides: a mapping from key to level. An override of a path wins over an override of a primitive or class. A
        region marked with :func:`jaxmp.precision` wins over all overrides. The keys are:

        - ``"**/head"``: a path of modules or scopes, and everything below it
        - ``"**/head:exp"``: an operation at a path
        - ``"primitive:exp"``
        - ``"class:accumulation"``

        The levels are:

        - ``"float32"``
        - ``"tensorfloat32"``: float32 with JAX's default precision of products
        - ``"half"``: all operations below the path are half, except linear algebra
        - ``"float32_result"``: products read half operands and return float32. The rules decide for other operations
        - a float32 policy, such as ``"matmul_precision=BF16_BF16_F32_X3"``: float32 with this precision of products
        - a half policy: the rules decide for each operation below the path. This level is allowed even if ``policy``
          computes in float32

    Returns:
      A function with the same parameters. Call it under ``jit``, because without ``jit`` it is traced again in every
      call.

    Raises:
      ValueError: the policy computes in float64, or in float16 on a TPU; an override has an unknown level, primitive or
        class (``UnknownOperationError``), or an override matched nothing in a call (``UnmatchedOverrideError``).
      TypeError: ``fun`` is a Linen module, a class of modules, or not a function; ``policy`` is missing; or a key of
        the overrides or a pattern of the PolicyMap is a class of modules. A call raises it if an argument is a
        ShapeDtypeStruct.

    >>> def loss(w, x):
    ...     return jax.nn.logsumexp(jax.nn.relu(x @ w) @ w)
    >>> half = jaxmp.autocast(loss, "mixed_bfloat16")
    >>> w = jax.numpy.eye(4)
    >>> half(w, w).dtype, jax.grad(half)(w, w).dtype
    (dtype('float32'), dtype('float32'))
    """
    if isinstance(fun, str) or policy is None:
        raise TypeError(
            f"jaxmp.autocast wraps a function for a policy, got ({printed(fun)}, {printed(policy)}); write "
            "half = jaxmp.autocast(fun, 'mixed_bfloat16'), or use the context manager jaxmp.precision('float32')"
        )
    require_function(
        fun,
        rule="jaxmp.autocast takes a function of arrays",
        remedy="pass e.g. a loss function",
        model_remedy="use jaxmp.linen.autocast(model, policy)",
    )
    one_policy, exceptions = policy_and_exceptions(policy, overrides)
    programs = SharedPrograms()

    @unless_policies_off(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if one_policy.compute_dtype == np.float32 and not exceptions:
            with donation_note(), mark_of(level_of(one_policy)), one_policy.matmul_context():
                return one_policy.cast_to_output(fun(*args, **kwargs))
        classifier = Classifier(one_policy.compute_dtype, exceptions, one_policy.float8)
        results = computed(fun, classifier, args, kwargs, one_policy, programs.of_trace())
        return one_policy.cast_to_output(results) if one_policy.compute_dtype == np.float32 else results

    return wrapped


def computed(
    fun: Callable[..., Any],
    classifier: Classifier,
    args: Any,
    kwargs: Any,
    policy: Policy | None = None,
    programs: Programs | None = None,
    receive: Callable[[Decisions], object] | None = None,
) -> Any:
    """Return the results of one call of ``fun`` with the decisions of the engine.

    Args:
      fun: a function. If it calls modules under a policy, their code has marks (see :mod:`jaxmp.engine.marks`).
      classifier: the classifier of operations.
      args, kwargs: the arguments.
      policy: the policy if :func:`autocast` wraps the function; None for a model. With None, operations are decided
        even if the function has no product.
      programs: a cache that calls of the function share (see ``shared_programs.py``); None for one that only this call
        uses.
      receive: a function that receives the decisions about the program.
    """
    with donation_note():
        program, operands = traced(fun, args, kwargs, classifier)
    if shapes := [leaf for leaf in operands if isinstance(leaf, jax.ShapeDtypeStruct)]:
        raise TypeError(
            f"a function under autocast takes arrays, got {shapes[0]}; for shapes use jaxmp.cast_plan(fun, policy), "
            "or jax.eval_shape, jax.make_jaxpr or jit(...).lower around the function"
        )
    programs = {} if programs is None else programs
    if is_collecting() or casts_constants_in_program():
        programs = None  # each equation is emitted, which records its casts and dtypes
    dtypes = result_dtypes(program, policy)
    key = None if programs is None else key_of_jitted_call(program.open_jaxpr[0], operands, dtypes)
    decisions = None if programs is None else programs.get(key)
    is_new = decisions is None
    if decisions is None:
        graph = build(program.open_jaxpr, operands, dtypes, classifier, names_around(), force=policy is None)
        warn_of_float64(program.open_jaxpr, graph, classifier)
        warn_of_unread_products(graph, classifier)
        decisions = decide_program(graph)
    emission = Emission(decisions, classifier, programs)
    with donation_note(), jax.named_scope(DECIDED), around_emitted(emission):
        results = emission.results(program.open_jaxpr, operands, dtypes)
    if is_new and policy is not None:  # the adapters check the overrides of a model, if every module ran
        classifier.matcher.check()
    if programs is not None and key is not None:
        remember(programs, key, decisions)
    if receive is not None:
        receive(decisions)
    return program.unflatten(results)
