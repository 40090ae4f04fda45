"""Policies for Flax NNX models, without changes to their code.

:func:`apply_policy` returns a copy of a model that shares its Variables. The modules of the copy have subclasses of
their classes, which add a decision and run the methods under it (see ``jaxmp/nnx/run.py``). ``nnx.split``,
``nnx.merge`` and the transforms of NNX treat the copy like any model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from jaxmp._internals.flax.nnx_variables import cast_variable, replace_variables
from jaxmp.base.arguments import require_no_policy, require_order
from jaxmp.base.dtypes import is_narrow
from jaxmp.engine.model_policy import (
    AuthorDtypes,
    ModelPolicy,
    Treatment,
    is_floating,
    require_no_operations,
    wrong_model,
)
from jaxmp.nnx.model_graph import ModuleGraph, ModuleNode, read_graph
from jaxmp.nnx.policy_check import note_copy
from jaxmp.nnx.run import NnxDecision, bare_class, decision_of, policied_class
from jaxmp.policy.patterns import Path
from jaxmp.policy.policy_map import PolicyMap

M = TypeVar("M", bound=nnx.Module)


def apply_policy(model: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``model`` under a policy: a copy that shares its Variables.

    A call of the model computes what :func:`jaxmp.autocast` of this call computes: products are half precision, and the
    rules of docs/autocast.md decide every other operation. Params are stored in the param dtype, and the result is
    cast to the output dtype. Gradients of Params are summed in float32. If your own code casts a Param to half, JAX
    sums its gradient in half. The copy shares all Variables with ``model``, except Params that must be cast to the
    param dtype.

    From then on use the copy: in the loss, in the optimizer, for ``eval()`` and ``train()``. A train step raises an
    error for the original ``model``. To train in float32 on purpose, use ``apply_policy(model, "float32")``. A module
    or Variable that you later add to the copy is missing in the original, and the reverse. So add all of them before
    you apply the policy, or apply a policy to the new module first.

    A module whose author set a ``dtype`` is computed as Flax defines for this dtype. The author has set it if its value
    differs from the default of the constructor. A ``param_dtype`` that the author set is kept, too. An override that
    matches the module wins over both.

    While JAX traces the model, its code sees float32, as under autocast. So Python code that reads ``x.dtype`` sees
    float32, and cannot branch on values of arrays. Call the model under ``nnx.jit``, because without it the model is
    traced again in every call. Code outside of a module's methods reads the module's Params in their stored dtype. The
    module's generator methods and operators, such as ``__add__``, do too.

    A new cache has the compute dtype. Intermediates have the dtypes in which they are computed. Batch statistics and
    other Variables keep their dtypes.

    Args:
      model: any NNX module. It may be abstract (from ``nnx.eval_shape``). A nested module that already has a policy
        keeps it.
      policy: anything that :func:`jaxmp.get_policy` takes.
      overrides: a mapping from key to level, as in :func:`jaxmp.linen.apply_policy`. Paths are those of
        ``nnx.iter_modules``, such as ``encoder/layers/0``.

    Raises:
      TypeError: ``model`` is not an NNX module.
      ValueError: ``model`` has a policy already; a pattern matched no module; an override of an operation has an
        unknown level, primitive or class; or an ``nnx.bridge.ToNNX`` in the model wraps a Linen module without a
        policy. These errors are raised in a call that runs the whole model: an override matched no operation; or the
        half policy has no effect, because overrides or dtypes keep every product in float32. An override that matches
        nothing raises an :class:`jaxmp.UnmatchedOverrideError`.

    >>> model = apply_policy(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_float16")
    >>> model.kernel[...].dtype, model(jnp.ones((1, 8))).dtype
    (dtype('float32'), dtype('float32'))
    >>> products = jax.make_jaxpr(lambda x: model(x))(jnp.ones((1, 8)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype('float16')]
    """
    return _apply(model, policy, overrides, "apply_policy")


def autocast(model: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``model`` under a policy that casts neither Params nor results: a copy that shares its Variables.

    A call computes as under :func:`apply_policy`. Params keep their dtypes. The result has the dtype of the traced
    code, which is float32 in general. The arguments and the errors are those of :func:`apply_policy`. Autocast also
    reaches modules inside of ``nnx.bridge``.

    >>> model = autocast(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    >>> products = jax.make_jaxpr(lambda x: model(x))(jnp.ones((1, 8)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype(bfloat16)]
    """
    return _apply(model, policy, overrides, "autocast")


def _apply(model: M, policy: Any, overrides: Mapping[Any, Any] | None, function: str) -> M:
    """Return a copy of ``model`` under a policy.

    The copy shares the Variables of ``model``. ``function`` is the name of the public function that the user called.
    """
    require_order(model, policy, f"jaxmp.nnx.{function}")
    if not isinstance(model, nnx.Module):
        raise wrong_model(model, "nnx", function)
    require_no_policy(model, decision_of(model) is not None, f"jaxmp.nnx.{function}")
    copy = nnx.clone(model, variables=False, graph=True)
    model_policy = ModelPolicy.create(policy, overrides, stores=function == "apply_policy")
    graph = read_graph(copy)
    for nested in graph.nested:
        nested_decision = decision_of(nested)
        if nested_decision is not None:
            require_no_operations(nested_decision.model_policy, nested)
    if model_policy.stores:
        _require_policies_in_bridges(graph)
    model_policy.policies.check(graph.classes, graph.variables)
    decisions = [_decide(model_policy, node, graph) for node in graph.nodes]  # before any change
    casts: dict[int, nnx.Variable[Any]] = {}
    for node, decision in zip(graph.nodes, decisions, strict=True):
        _apply_decision(node, decision, graph, casts)
    note_copy(model)
    return copy


def _require_policies_in_bridges(graph: ModuleGraph) -> None:
    """Raise a ValueError if a ``ToNNX`` wraps a Linen module without a policy."""
    for node in graph.nodes:
        if not node.wraps_linen or node.has_linen_policy():
            continue
        name, linen = "/".join(node.paths[0]), type(node.module.to_nnx__module).__name__
        raise ValueError(
            f"a policy does not reach into nnx.bridge.ToNNX, got {f'{name!r}, ' if name else ''}ToNNX({linen}(...)).\n"
            "Apply the policy to the inner module, then wrap it:\n"
            f"nnx.bridge.ToNNX(jaxmp.linen.apply_policy({linen}(...), policy), rngs=rngs)"
        )


def _decide(model_policy: ModelPolicy, node: ModuleNode, graph: ModuleGraph) -> NnxDecision:
    """Return the decision for the module of ``node``."""
    path = _deciding_path(model_policy.policies, node, graph)
    author = AuthorDtypes(node.author_dtype("dtype"), node.author_dtype("param_dtype"), _has_dtype(node.module))
    treatment = model_policy.treatment(path, graph.classes, author)
    if node.wraps_linen:
        treatment = dataclasses.replace(treatment, param_dtype=None)
    return NnxDecision(
        model_policy=model_policy,
        treatment=treatment,
        is_root=node is graph.nodes[0],
        replaced_dtype=(vars(node.module)["dtype"],) if _is_replaced(node.module, treatment) else (),
    )


def _has_dtype(module: Any) -> bool:
    """Return whether a module has an attribute ``dtype`` for a floating dtype."""
    return "dtype" in vars(module) and is_floating(vars(module)["dtype"])


def _is_replaced(module: Any, treatment: Treatment) -> bool:
    """Return whether the policy replaces the ``dtype`` of a module.

    ``nnx.WeightNorm`` and ``nnx.SpectralNorm`` would cast the Params of the wrapped layer to their ``dtype``.
    """
    if treatment.dtype is None or not _has_dtype(module):
        return False
    if treatment.written:
        return not isinstance(module, (nnx.WeightNorm, nnx.SpectralNorm))
    dtype = vars(module)["dtype"]
    return is_narrow(dtype)


def _deciding_path(policies: PolicyMap, node: ModuleNode, graph: ModuleGraph) -> Path:
    """Return the path that decides the policy of a module.

    A shared module has several paths. The path that matches the earliest pattern decides.
    """
    order = [*policies.patterns, None]
    return min(node.paths, key=lambda path: order.index(policies.resolve(path, graph.classes)[1]))


def _apply_decision(
    node: ModuleNode, decision: NnxDecision, graph: ModuleGraph, casts: dict[int, nnx.Variable[Any]]
) -> None:
    """Apply ``decision`` to the module of ``node``.

    ``casts`` has the Params that were cast for other modules, by the ids of the original Params.
    """
    if decision.treatment.param_dtype is not None:
        _cast_params(node.module, decision.treatment.param_dtype, casts)
    if decision.replaced_dtype:
        vars(node.module)["dtype"] = decision.treatment.dtype
    decision = dataclasses.replace(decision, level=_nesting_level(node, decision, graph))
    object.__setattr__(node.module, "__class__", policied_class(bare_class(node.module), decision))


def _cast_params(module: nnx.Module, dtype: np.dtype, casts: dict[int, nnx.Variable[Any]]) -> None:
    """Replace the Params of a module by Params that are cast to ``dtype``.

    A Param that several modules share is cast only once.
    """

    def cast_once(var: nnx.Variable[Any]) -> nnx.Variable[Any]:
        if not isinstance(var, nnx.Param):
            return var
        if id(var) not in casts:
            casts[id(var)] = cast_variable(var, dtype)
        return casts[id(var)]

    replace_variables(module, cast_once)


def _nesting_level(node: ModuleNode, decision: NnxDecision, graph: ModuleGraph) -> int:
    """Return a number that differs in nested modules of equal class and decision."""
    # Containing modules are set up first. Submodules with an earlier policy have their level already.
    related = graph.nested if decision.is_root else [outer.module for outer in node.around]
    level = 0
    for module in related:
        other = decision_of(module)
        is_same_class = bare_class(module) is bare_class(node.module)
        if other and is_same_class and dataclasses.replace(other, level=0) == decision:
            level = max(level, other.level + 1)
    return level
