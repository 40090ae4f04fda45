"""Policies and loss scaling for Flax NNX modules that nobody edited.

:func:`apply_policy` returns a model that shares the Variables of the one it is given: the modules are copies whose
``dtype`` attributes are set and whose methods run under their policies (see ``jaxmp/_nnx_run.py``). Transforms of NNX,
``split`` and ``merge`` see an ordinary model. :class:`Optimizer` and :func:`scaled_value_and_grad` scale its loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxmp._adapters import Mode, autocast_map, is_o1, level_of, nothing_in_half
from jaxmp._nnx_graph import Graph, Node, read_graph
from jaxmp._nnx_optimizer import Optimizer as Optimizer
from jaxmp._nnx_optimizer import scaled_value_and_grad as scaled_value_and_grad
from jaxmp._nnx_run import Decision, bare_class, decision_of, policied_class
from jaxmp._nnx_variables import cast_variable, change_own
from jaxmp.dtypes import is_half
from jaxmp.patterns import Path, Pattern, pattern_text
from jaxmp.policy import Policy, PolicyMap, get_policy_map

M = TypeVar("M", bound=nnx.Module)


def apply_policy(model: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """``model`` computing under a policy; a copy of its modules that shares its Variables.

    Params are kept in the param dtype, every module computes in the compute dtype of its own policy, and what the root
    returns is cast to the output dtype. Batch statistics and other Variables keep their dtypes. A Variable is shared
    unless it is a Param of another dtype than the param dtype, which is replaced by a cast of it.

    A ``dtype`` or ``param_dtype`` attribute that has the default of its class's constructor is set; one that differs
    is the author's word and stays, unless an override covers the module. A constructor may have handed its own default
    down before the policy comes: what equals the default of a module around it counts as default too. A module with a
    ``dtype`` attribute computes as it is written. The operations of one without are decided on the graph in the compute
    dtype of its policy, as :func:`jaxmp.autocast` decides; its code is traced in float32 if it has Params of its own,
    and sees those. In the body of a loop with a carry (``nnx.scan``, ``nnx.RNN``, ``jax.lax.scan``) the first argument
    of a module below the root is taken for the carry, and a result like it keeps its dtype. A module with a policy of
    its own, nested in another, keeps it.

    Gradients of Params are summed in float32. A call is traced as under ``jax.jit``, so that its Python code cannot
    branch on the values of arrays; without ``jit`` a call of equal shapes runs the program that was written by the
    first.

    ``"O1"`` is :func:`autocast` in ``mixed_float16``.

    Sharp edge: what reads a Param outside of the methods of its module gets it as it is stored: a property called from
    elsewhere, or a generator, which runs when its method has returned.

    Args:
      model: any NNX module, with arrays or abstract; one that has a policy already gets the new one.
      policy: whatever :func:`jaxmp.get_policy` reads, or ``"O1"``.
      overrides: pattern to policy for parts of the model, see :class:`jaxmp.PolicyMap`; paths are those of
        ``nnx.iter_modules``: ``encoder/layers/0``.

    Raises:
      TypeError: ``model`` is not an NNX module.
      ValueError: a pattern matched no module and no Variable; or a half policy under which every product stays float32.

    >>> model = apply_policy(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "mixed_float16")
    >>> model.kernel[...].dtype, model(jnp.ones((1, 3))).dtype
    (dtype('float32'), dtype('float32'))
    >>> products = jax.make_jaxpr(lambda x: model(x))(jnp.ones((1, 3)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype('float16')]
    """
    if is_o1(policy):
        return autocast(model, policy, overrides)
    return _under(model, get_policy_map(policy, overrides), by_autocast=False)


def autocast(model: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """``model`` under :func:`jaxmp.autocast`; a copy of its modules that shares its Variables.

    No attribute and no Variable changes: what runs is decided operation by operation, on the program of a whole call of
    the root. Variables that it writes to are written, and the paths of the modules stand on JAX's name stack meanwhile.

    Sharp edge: a generator runs when its method has returned, in float32.

    Args:
      model: any NNX module, with arrays or abstract; one that has a policy already loses it.
      policy: whatever :func:`jaxmp.autocast` takes, or a PolicyMap such as ``"O2"``.
      overrides: pattern to ``"float32"``, to ``"half"``, or to a policy that computes in one of them, for parts of the
        model; patterns are those of :class:`jaxmp.PolicyMap`, paths those of ``nnx.iter_modules``:
        ``encoder/layers/0``.

    Raises:
      TypeError: ``model`` is not an NNX module.
      ValueError: a pattern matched no module and no Variable; every product stays float32; an override computes in
        neither float32 nor the policy's compute dtype; or that is none that :func:`jaxmp.autocast` takes.

    >>> model = autocast(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    >>> products = jax.make_jaxpr(lambda x: model(x))(jnp.ones((1, 3)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype(bfloat16)]
    """
    return _under(model, autocast_map(policy, overrides), by_autocast=True)


def _under(model: M, policies: PolicyMap, by_autocast: bool) -> M:
    name = "autocast" if by_autocast else "apply_policy"
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"jaxmp.nnx.{name} takes an instance of flax.nnx.Module, got {model!r}; make the instance first "
            f"(Model(..., rngs=nnx.Rngs(0))), or use jaxmp.linen.{name} for Linen modules"
        )
    copy = nnx.clone(model, variables=False, graph=True)
    graph = read_graph(copy)
    policies.check(graph.classes, graph.variables)
    # All is decided before anything is changed: what a module's author gave counts for the modules below it too.
    plans = [_plan(policies, by_autocast, node, graph.classes) for node in graph.nodes]
    if is_half(policies.root.compute_dtype) and not graph.nested:
        _check_products(policies.root, plans)
    casts: dict[int, nnx.Variable[Any]] = {}
    for plan in plans:
        plan.carry_out(graph, casts)
    return copy


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is to be done with a module.

    Attributes:
      node: the module.
      policy: its policy.
      pattern: the pattern that gave it; None for the default.
      fills: the dtype attributes to be set.
      autocast: the policy of the whole model, if autocast decides and the attributes are left as they are.
    """

    node: Node
    policy: Policy
    pattern: Pattern | None
    fills: dict[str, np.dtype]
    autocast: Policy | None

    @property
    def own_dtype(self) -> np.dtype | None:
        """The dtype that its author made it compute in, where that stays."""
        given = None if "dtype" in self.fills or self.autocast else self.node.given.get("dtype")
        return None if given is None else np.dtype(given)

    def carry_out(self, graph: Graph, casts: dict[int, nnx.Variable[Any]]) -> None:
        """Sets the module up; ``casts`` has those of Params that were replaced already, by the ids of the Params."""
        module = self.node.module
        if not self.autocast and ("param_dtype" in self.fills or "param_dtype" not in self.node.given):
            change_own(module, lambda var: self._stored(var, casts))
        given = tuple((name, self.node.given[name]) for name in self.fills)
        is_root = self.node is graph.nodes[0]
        asked = level_of(self.policy) if self.autocast and self.pattern is not None else None
        policy = self.autocast or self.policy
        decision = Decision(policy=policy, mode=self._mode(), asked=asked, is_root=is_root, given=given)
        # Those around it are set up already; roots inside are from an earlier call.
        alike = [other.module for other in self.node.around] if not is_root else graph.nested
        levels = [
            other.level
            for module in alike
            if bare_class(module) is bare_class(self.node.module)
            and (other := decision_of(module)) is not None
            and dataclasses.replace(other, level=0) == decision
        ]
        decision = dataclasses.replace(decision, level=1 + max(levels, default=-1))
        vars(module).update(self.node.given | self.fills)
        object.__setattr__(module, "__class__", policied_class(bare_class(module), decision))

    def _mode(self) -> Mode:
        if self.autocast:
            return "autocast"
        if "dtype" in self.node.given:
            return "written"
        is_float32 = self.node.own_params() or (self.pattern is not None and not self.node.is_parent())
        return "float32" if is_float32 else None

    def _stored(self, var: nnx.Variable[Any], casts: dict[int, nnx.Variable[Any]]) -> nnx.Variable[Any]:
        if not isinstance(var, nnx.Param):
            return var
        if id(var) not in casts:
            casts[id(var)] = cast_variable(var, self.policy.param_dtype)
        return casts[id(var)]


def _plan(policies: PolicyMap, by_autocast: bool, node: Node, classes: Mapping[Path, type]) -> _Plan:
    order = [*policies.patterns, None]  # of the policies for the several paths of a shared module, the first pattern's
    policy, pattern = min((policies.resolve(p, classes) for p in node.paths), key=lambda found: order.index(found[1]))
    dtypes = {"param_dtype": policy.param_dtype, "dtype": policy.compute_dtype}
    filled = [name for name in node.given if not by_autocast and node.is_filled(name, pattern is not None)]
    fills = {name: dtypes[name] for name in filled}
    return _Plan(node, policy, pattern, fills, policies.root if by_autocast else None)


def _check_products(policy: Policy, plans: list[_Plan]) -> None:
    """Raises if the half ``policy`` leaves every product as it was."""
    kept = {}
    for plan in plans:
        leaves = jax.tree.leaves([var.get_raw_value() for var in plan.node.own_params()])
        if isinstance(plan.node.module, nnx.Embed) or all(len(getattr(leaf, "shape", ())) < 2 for leaf in leaves):
            continue  # no product
        if is_half(plan.own_dtype or plan.policy.compute_dtype):
            return
        name = "/".join(plan.node.paths[0]) or bare_class(plan.node.module).__name__
        own = plan.own_dtype
        kept[name] = f"its own dtype={own.name}" if own else f"override {pattern_text(plan.pattern or '**')!r}"
    if kept:
        raise nothing_in_half(policy, kept)
