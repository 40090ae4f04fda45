"""Trace a loss on Explicit mesh axes, and run its program on Auto axes.

On axes of type Explicit, JAX checks the sharding of each array. The author of a loss may have to state shardings
(``out_sharding=``, ``reshard``, ``auto_axes``). Generated programs, such as derivatives, have no author who could state
shardings. So a loss is traced on Explicit axes, and its program is then rebuilt on axes of type Auto. The rebuilt
program has a constraint for each sharding that the author stated.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp.program.binding import bind_equation
from jaxmp.program.derivative_rules import RuleEvaluation
from jaxmp.program.equations import Bodies, opened
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.traced_program import TracedProgram, arrays_in, is_array
from jaxmp.program.walk import is_jaxpr
from jaxmp.sharding.specs import Mesh

AnyLossFn = Callable[..., Any]
_SHARDING_PARAMS = ("out_sharding", "sharding")


def explicit_mesh_of(tree: Any) -> jax.sharding.AbstractMesh | None:
    """Return a mesh with Explicit axes that an array of ``tree`` is on, or None."""
    for leaf in jax.tree.leaves(tree):
        mesh: jax.sharding.AbstractMesh = jax.typeof(leaf).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def typed(loss_fn: AnyLossFn, mesh: Mesh, batch_axes: Sequence[str]) -> AnyLossFn:
    """Return ``loss_fn`` traced on Explicit axes, for a call on Auto axes.

    The loss is traced with params, model state and rng that are not split. The examples of the batch are split over
    ``batch_axes``, if the number of examples is divisible by the number of devices.

    Args:
      loss_fn: a loss function, as for :func:`jaxmp.make_train_step`.
      mesh: the mesh; if it has no Explicit axes, ``loss_fn`` is returned unchanged.
      batch_axes: the names of the axes of the mesh that split a batch.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name: AxisType.Explicit for name in types if types[name] is AxisType.Explicit}
    if not explicit:
        return loss_fn
    split = tuple(name for name in batch_axes if name in explicit)
    parts = math.prod(mesh.shape[name] for name in split)

    def run(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        explicit_mesh = jax.sharding.get_abstract_mesh().update_axis_types(explicit)

        def traced_type(leaf: Any, spec: PartitionSpec) -> Any:
            if not is_array(leaf):
                return leaf
            return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=NamedSharding(explicit_mesh, spec))

        def type_of_examples(leaf: Any) -> Any:
            divides = bool(split) and np.ndim(leaf) > 0 and np.shape(leaf)[0] % parts == 0
            return traced_type(leaf, PartitionSpec(split) if divides else PartitionSpec())

        args = params, model_state, batch, rng
        params, model_state, rng = (
            jax.tree.map(lambda leaf: traced_type(leaf, PartitionSpec()), tree) for tree in (params, model_state, rng)
        )
        with jax.sharding.use_abstract_mesh(explicit_mesh):
            program = TracedProgram(loss_fn, (params, model_state, jax.tree.map(type_of_examples, batch), rng))
        jaxpr, consts = program.open_jaxpr
        return program.unflatten(_AutoAxesRewriter().evaluate(jaxpr, consts, arrays_in(jax.tree.leaves(args))))

    return run


class _AutoAxesRewriter(Rewriter):
    """A rewriter that binds equations of Explicit axes on Auto axes."""

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return super().evaluate(jaxpr, [_untyped(const) for const in consts], args)

    def evaluate_operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        with _auto_axes():
            if eqn.primitive.name == "reshard":
                return [_placed(operands[0], eqn.params["dst_sharding"])]
            return self._bind_without_types(eqn, operands)

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        if bodies.is_per_device:
            eqn = eqn.replace(params={**eqn.params, "mesh": _on_auto(eqn.params["mesh"])})
        function = self.rebuild(eqn, bodies)
        with _auto_axes():
            return function(*operands)

    def make_rule_evaluation(self, eqn: Any) -> RuleEvaluation:
        """Return an evaluation that traces the rule on the Explicit axes of the loss."""
        traced_on = jax.sharding.get_abstract_mesh()
        tracing = functools.partial(jax.sharding.use_abstract_mesh, traced_on)
        return RuleEvaluation(lambda program, args, _: self.evaluate(*program, args), tracing)

    def _bind_without_types(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Bind an equation without bodies.

        If its parameters state a sharding of the result, the result gets a constraint.
        """
        params = jax.tree.map(self._without_types, dict(eqn.params), is_leaf=is_jaxpr)
        for key in _SHARDING_PARAMS:
            if _names_explicit_axes(params.get(key)):
                sharding = params[key]
                params[key] = None
                is_constraint = eqn.primitive.name == "sharding_constraint"
                results = operands[:1] if is_constraint else bind_equation(eqn, operands, params)
                return [_placed(result, sharding) for result in results]
        return bind_equation(eqn, operands, params)

    def _without_types(self, param: Any) -> Any:
        """Return a parameter of an equation, without types of Explicit axes.

        Only closed jaxprs have such types.
        """
        if not hasattr(param, "in_avals") or not any(_names_explicit_axes(aval.sharding) for aval in param.in_avals):
            return param
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in param.in_avals]
        return jax.make_jaxpr(lambda *args: self.evaluate(*opened(param), args))(*shapes)


@contextlib.contextmanager
def _auto_axes() -> Iterator[None]:
    """Bind equations on the current mesh, with Auto axes in place of Explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(_on_auto(mesh)) if mesh.explicit_axes else contextlib.nullcontext():
        yield


def _names_explicit_axes(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and bool(sharding.mesh.explicit_axes)


def _on_auto(mesh: Any) -> Any:
    """Return ``mesh`` with Auto axes in place of Explicit axes."""
    return mesh.update(axis_types=tuple(AxisType.Auto if t is AxisType.Explicit else t for t in mesh.axis_types))


def _untyped(const: Any) -> Any:
    """Return an array that the loss closes over, without a sharding in its type."""
    if not is_array(const) or not jax.typeof(const).sharding.mesh.explicit_axes:
        return const
    return jax.sharding.reshard(const, PartitionSpec())


def _placed(value: Any, sharding: NamedSharding) -> Any:
    """Constrain ``value`` to ``sharding``, if ``sharding`` names Explicit axes."""
    if not _names_explicit_axes(sharding):
        return value
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*sharding.spec))
