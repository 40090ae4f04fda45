"""Policies for Flax NNX models, without changes to their code.

:func:`apply_policy` returns a copy of a model that shares its Variables. The copied modules have new ``dtype``
attributes, and their methods run under their policies (see ``jaxmp/nnx/run.py``). ``nnx.split``, ``nnx.merge`` and the
transforms of NNX treat the copy like any model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from jaxmp._internals.flax.nnx_variables import cast_variable, change_own
from jaxmp.base.arguments import require_no_policy, require_order
from jaxmp.base.dtypes import is_half
from jaxmp.engine.half_check import NotHalf, reason_not_half
from jaxmp.engine.module_border import Mode, autocast_map, wrong_model
from jaxmp.engine.overrides import Level, level_of
from jaxmp.nnx.model_graph import ModuleGraph, ModuleNode, read_graph
from jaxmp.nnx.policy_check import note_copy
from jaxmp.nnx.run import HalfPolicy, NnxDecision, bare_class, decision_of, policied_class
from jaxmp.policy.patterns import Path
from jaxmp.policy.policy_map import PolicyMap

M = TypeVar("M", bound=nnx.Module)


def apply_policy(model: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``model`` under a policy: a copy that shares its Variables.

    Params are stored in the param dtype. Every module computes in the compute dtype of its policy, and the result of
    the model is cast to the output dtype. Batch statistics and other Variables keep their dtypes. The copy shares all
    Variables with ``model``, except Params that must be cast to the param dtype.

    From then on use the copy: in the loss, in the optimizer, for ``eval()`` and ``train()``. A train step raises an
    error for the original ``model``. To train in float32 on purpose, use ``apply_policy(model, "float32")``. A module
    or Variable that you later add to the copy is missing in the original, and the reverse. So add all of them before
    you apply the policy, or apply a policy to the new module first.

    The policy sets the attributes ``dtype`` and ``param_dtype``. A module with a ``dtype`` attribute, such as
    ``nnx.Linear``, then computes as Flax defines for this dtype. An attribute whose value you changed from the
    constructor's default keeps your value, unless an override matches the module. A nested module that already has a
    policy keeps its policy. Flax's attention without a ``dtype`` has half-precision products and a float32 softmax.
    ``init_cache`` without a ``dtype`` creates a cache in the module's compute dtype.

    A module without a ``dtype`` attribute gets half-precision results from its layers. If the module has Params of its
    own, it is traced in float32, and the rules of :func:`jaxmp.autocast` decide the dtype of each operation. If the
    module has no Params of its own, each operation has the dtype of its inputs, so ``jnp.mean`` of a float16 array
    returns float16.

    Gradients of Params are summed in float32. A loop's carry keeps the dtype of its initial value, because jaxmp
    replaces ``jax.lax.scan`` and JAX's other loops while the model is traced. Write ``jax.lax.scan`` in full: a name
    that you import with ``from jax.lax import scan`` is not replaced. The model is traced as under ``jax.jit``, so its
    Python code cannot branch on values of arrays. Code outside of a module's methods reads the module's Params in their
    stored dtype. The module's generator methods do too.

    Args:
      model: any NNX module. It may be abstract (from ``nnx.eval_shape``).
      policy: anything that :func:`jaxmp.get_policy` takes.
      overrides: a mapping from pattern to policy for parts of the model, see :class:`jaxmp.PolicyMap`. Paths are those
        of ``nnx.iter_modules``, such as ``encoder/layers/0``.

    Raises:
      TypeError: ``model`` is not an NNX module.
      ValueError: ``model`` has a policy already; a pattern matched no module; an ``nnx.bridge.ToNNX`` in the model
        wraps a Linen module without a policy; or the half policy has no effect, because overrides or dtypes keep every
        product in float32 (checked in the first call that runs the whole model).

    >>> model = apply_policy(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "mixed_float16")
    >>> model.kernel[...].dtype, model(jnp.ones((1, 3))).dtype
    (dtype('float32'), dtype('float32'))
    >>> products = jax.make_jaxpr(lambda x: model(x))(jnp.ones((1, 3)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype('float16')]
    """
    require_order(model, policy, "jaxmp.nnx.apply_policy")
    return _under(model, PolicyMap(policy, overrides), by_autocast=False)


def autocast(model: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``model`` under autocast: a copy that shares its Variables.

    Attributes and Variables do not change. Autocast traces a whole call of the model and decides the dtype of each
    operation. In the traced program, the path of each module is a scope on JAX's name stack. The body of a generator
    method runs in float32, because it runs after the call of the method has returned.

    Args:
      model: any NNX module. It may be abstract (from ``nnx.eval_shape``).
      policy: any policy that :func:`jaxmp.autocast` takes, or a PolicyMap such as ``"O2"``.
      overrides: a mapping from pattern to ``"float32"``, to ``"half"``, or to a policy that computes in float32 or in
        the half dtype of ``policy``. Patterns for modules are those of :class:`jaxmp.PolicyMap`, with the paths of
        ``nnx.iter_modules`` (``encoder/layers/0``). Patterns for operations are the keys of :func:`jaxmp.autocast`,
        such as ``"primitive:exp"``.

    Raises:
      TypeError: ``model`` is not an NNX module.
      ValueError: ``model`` has a policy already; a pattern matched no module and no Variable; the policy does not
        compute in half precision; an override computes neither in the policy's half dtype nor in float32; an override
        names an unknown primitive or class. These errors are raised when the model is called: an override matched no
        operation; or overrides of modules, of ``"class:half"`` or of ``"class:*"`` keep every product in float32.
        (Overrides of primitives, such as ``{"primitive:dot_general": "float32"}``, may keep every product in float32.)

    >>> model = autocast(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    >>> products = jax.make_jaxpr(lambda x: model(x))(jnp.ones((1, 3)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype(bfloat16)]
    """
    require_order(model, policy, "jaxmp.nnx.autocast")
    policies, operations = autocast_map(policy, overrides)
    return _under(model, policies, by_autocast=True, operations=tuple(operations.items()))


def _under(model: M, policies: PolicyMap, by_autocast: bool, operations: tuple[tuple[str, Level], ...] = ()) -> M:
    """Return a copy of ``model`` under policies or under autocast.

    The copy shares the Variables of ``model``.
    """
    name = "autocast" if by_autocast else "apply_policy"
    if not isinstance(model, nnx.Module):
        raise wrong_model(model, "nnx", name)
    earlier = decision_of(model)
    is_submodule = earlier is not None and not earlier.is_root
    require_no_policy(model, earlier is not None, f"jaxmp.nnx.{name}", is_submodule)
    copy = nnx.clone(model, variables=False, graph=True)
    graph = read_graph(copy)
    if not by_autocast:
        _require_policies_in_bridges(graph)
    policies.check(graph.classes, graph.variables)
    decisions = [_decide(policies, by_autocast, node, graph, operations) for node in graph.nodes]  # before any change
    if is_half(policies.root.compute_dtype) and not graph.nested:
        decisions[0] = dataclasses.replace(decisions[0], half=_policy_to_check(policies, graph, decisions))
    casts: dict[int, nnx.Variable[Any]] = {}
    for node, decision in zip(graph.nodes, decisions, strict=True):
        _set_up(node, decision, graph, casts)
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


def _decide(
    policies: PolicyMap,
    by_autocast: bool,
    node: ModuleNode,
    graph: ModuleGraph,
    operations: tuple[tuple[str, Level], ...],
) -> NnxDecision:
    """Return the decision for the module of ``node``."""
    policy, pattern = policies.resolve(_deciding_path(policies, node, graph), graph.classes)
    overridden = pattern is not None
    filled = [name for name in node.dtypes if not by_autocast and node.is_filled(name, overridden)]
    author_dtype = None if by_autocast or "dtype" in filled else node.dtypes.get("dtype")
    mode: Mode = "inputs"
    if by_autocast:
        mode = "autocast"
    elif node.is_attention():
        mode = "float32"  # in the mode "written", its derivative would have float32 products
    elif "dtype" in node.dtypes or node.wraps_linen:
        mode = "written"
    elif node.own_params() or (overridden and not node.is_parent()):
        mode = "float32"
    computes = policy.compute_dtype if author_dtype is None else np.dtype(author_dtype)
    return NnxDecision(
        policy=policies.root if by_autocast else policy,
        mode=mode,
        override=level_of(policy) if by_autocast and overridden else None,
        not_half=reason_not_half(policy, computes, pattern, operations),
        is_root=node is graph.nodes[0],
        replaced=tuple((name, node.dtypes[name]) for name in filled),
        operations=operations,
    )


def _deciding_path(policies: PolicyMap, node: ModuleNode, graph: ModuleGraph) -> Path:
    """Return the path that decides the policy of a module.

    A shared module has several paths. The path that matches the earliest pattern decides.
    """
    order = [*policies.patterns, None]
    return min(node.paths, key=lambda path: order.index(policies.resolve(path, graph.classes)[1]))


def _policy_to_check(policies: PolicyMap, graph: ModuleGraph, decisions: list[NnxDecision]) -> HalfPolicy | None:
    """Return the policy and the modules that do not compute in half precision.

    Return None if all modules compute in half precision.
    """
    not_half = []
    for node, decision in zip(graph.nodes, decisions, strict=True):
        if decision.not_half is not None:
            name = "/".join(node.paths[0]) or bare_class(node.module).__name__
            not_half.append(NotHalf(name, decision.not_half, node.has_matrix()))
    return HalfPolicy(policies.root, tuple(not_half)) if not_half else None


def _set_up(
    node: ModuleNode,
    decision: NnxDecision,
    graph: ModuleGraph,
    casts: dict[int, nnx.Variable[Any]],
) -> None:
    """Apply ``decision`` to the module of ``node``.

    ``casts`` has the Params that were cast for other modules, by the ids of the original Params.
    """
    policy = decision.policy
    dtypes = {"param_dtype": policy.param_dtype, "dtype": policy.compute_dtype}
    fills = {name: dtypes[name] for name, _ in decision.replaced}
    has_param_dtype = "param_dtype" in fills or "param_dtype" not in node.dtypes
    if decision.mode != "autocast" and has_param_dtype and not node.wraps_linen:
        _cast_params(node.module, policy.param_dtype, casts)
    decision = dataclasses.replace(decision, level=_nesting_level(node, decision, graph))
    vars(node.module).update(node.dtypes | fills)
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

    change_own(module, cast_once)


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
