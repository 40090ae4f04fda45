"""Trace a loss on Explicit mesh axes, and run its program on Auto axes.

On axes of type Explicit, JAX checks the sharding of each array. The author of a loss may have to state shardings
(``out_sharding=``, ``reshard``, ``auto_axes``). Generated programs, such as derivatives, have no author who could state
shardings. So a loss is traced on Explicit axes, and its program is then rebuilt on axes of type Auto. The rebuilt
program has a constraint for each sharding that the author stated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp._internals.jax.rebind import in_place_of
from jaxmp.program.bodies import RuleEvaluation, bind_equation, rebuilt
from jaxmp.program.equations import bodies_of, opened
from jaxmp.program.traced_program import TracedProgram, arrays_in, is_array
from jaxmp.program.walk import interpreted, is_jaxpr
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
        jaxpr, consts = program.jaxpr
        return program.unflatten(_evaluated(jaxpr, consts, arrays_in(jax.tree.leaves(args))))

    return run


def _evaluated(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate an open jaxpr on Auto axes; it was traced on Explicit axes."""

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        with in_place_of(eqn):
            return list(_rebound(eqn, operands))

    return interpreted(jaxpr, [_untyped(const) for const in consts], args, equation)


def _rebound(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Bind an equation on Auto axes.

    The current mesh must be the mesh that the equation was traced on.
    """
    traced_on = jax.sharding.get_abstract_mesh()
    if not traced_on.explicit_axes:
        return _rebuilt(eqn, operands, traced_on)
    with jax.sharding.use_abstract_mesh(_on_auto(traced_on)):
        return _rebuilt(eqn, operands, traced_on)


def _rebuilt(eqn: Any, operands: Sequence[Any], traced_on: Any) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "reshard":
        return [_placed(operands[0], params["dst_sharding"])]
    bodies = bodies_of(eqn)
    if bodies is None:
        return _bind_without_types(eqn, operands)
    if name == "shard_map":
        eqn = eqn.replace(params={**params, "mesh": _on_auto(params["mesh"])})
    # Custom derivative rules are traced on the Explicit axes of the loss.
    rule = RuleEvaluation(
        lambda body, args, _: _evaluated(*body, args), functools.partial(jax.sharding.use_abstract_mesh, traced_on)
    )
    return rebuilt(eqn, bodies, [functools.partial(_evaluated_body, body) for body in bodies.jaxprs], rule)(*operands)


def _bind_without_types(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Bind an equation without bodies.

    If its parameters state a sharding of the result, the result gets a constraint.
    """
    params = jax.tree.map(_without_types, dict(eqn.params), is_leaf=is_jaxpr)
    for key in _SHARDING_PARAMS:
        if _names_explicit_axes(params.get(key)):
            sharding = params[key]
            params[key] = None
            results = (
                operands[:1] if eqn.primitive.name == "sharding_constraint" else bind_equation(eqn, operands, params)
            )
            return [_placed(result, sharding) for result in results]
    return bind_equation(eqn, operands, params)


def _without_types(param: Any) -> Any:
    """Return a parameter of an equation, without types of Explicit axes.

    Only closed jaxprs have such types.
    """
    if not hasattr(param, "in_avals") or not any(_names_explicit_axes(aval.sharding) for aval in param.in_avals):
        return param
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in param.in_avals]
    return jax.make_jaxpr(functools.partial(_evaluated_body, param))(*shapes)


def _names_explicit_axes(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and bool(sharding.mesh.explicit_axes)


def _evaluated_body(body: Any, *args: Any) -> list[Any]:
    jaxpr, consts = opened(body)
    return _evaluated(jaxpr, consts, args)


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
