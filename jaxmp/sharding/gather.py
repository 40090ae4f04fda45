"""Gather weights in half precision, and sum their gradients in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec, get_abstract_mesh

from jaxmp._internals.jax.traces import manual_axes, shows_what_varies
from jaxmp.base import trees as _tree
from jaxmp.base.dtypes import canonical_dtype
from jaxmp.sharding.mesh_plan import plan_being_traced, reduced_in, to_reduce_in
from jaxmp.sharding.specs import (
    as_tuple,
    axes_in_spec,
    fitting,
    require_axes,
    require_specs,
    without,
)


def gather(tree: Any, specs: Any, dtype: Any, *, reduce_dtype: Any = "float32", axes: Sequence[str] = ("fsdp",)) -> Any:
    """Gather weights in ``dtype``; sum their gradients in ``reduce_dtype``.

    Each device casts its part of a weight to ``dtype``, and then the parts are gathered. In the backward pass, the
    gradient is cast to ``reduce_dtype``, summed over the devices and scattered to them. The scattered gradient has the
    dtype of the weight. Call ``gather`` in each layer, where the weights are used, so that no device holds all weights
    at once. In the body of a scan over layers, pass the specs of one layer.

    The implementation depends on the current mesh:

    - On axes of type Explicit, ``gather`` calls ``reshard``.
    - Inside ``shard_map``, ``gather`` calls collectives.
    - On axes of type Auto, ``gather`` sets two sharding constraints. XLA then sums gradients only in the dtype in
      which they are computed. So pass ``reduce_dtype=dtype``, or create the mesh with Explicit axes.

    Args:
      tree: the weights. Leaves that are not split over ``axes`` keep their dtype. In ``shard_map``, the gradients of
        these leaves are summed in ``reduce_dtype``. Outside ``shard_map``, JAX sums the gradients in the dtype of the
        operation that uses the leaf. To sum them in float32, use the leaf in float32 (for example, add a bias in
        float32), or use ``make_train_step(sharding=)``.
      specs: a ``PartitionSpec`` for each leaf, as :func:`fsdp_specs` returns them.
      dtype: the dtype in which weights are gathered.
      reduce_dtype: the dtype of the sum over devices: float32, bfloat16 or float16. (With float32, the gradients of
        weights gathered in float64 are summed in float64.)
      axes: all axes of the mesh that split the batch. Weights are gathered, and gradients summed, over these axes.
        Write ``("data", "fsdp")`` if the weights are split over ``"fsdp"`` and copied along ``"data"``. Weights stay
        split over all other axes.

    Raises:
      ValueError: no mesh is set, or it lacks an axis; ``reduce_dtype`` differs from ``dtype`` on axes of type Auto; the
        specs do not have the structure of ``tree``, or do not fit its shapes; a dtype is not floating, or gradients
        cannot be summed in it; ``gather`` is called in the loss function of a ``make_train_step(sharding=)``, which
        already gathers; ``shard_map`` has ``check_vma=False``; or, in ``shard_map``, an entry of a spec lists another
        mesh axis after one of ``axes``, such as ``("fsdp", "tensor")``.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    >>> with jax.set_mesh(mesh):
    ...     specs = {"w": jax.P("fsdp")}
    ...     params = {"w": jax.device_put(jnp.ones((8, 8)), jax.P("fsdp"))}
    ...     jax.jit(lambda params: gather(params, specs, "bfloat16"))(params)["w"].dtype
    dtype(bfloat16)
    """
    mesh = get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            "gather needs a mesh, and none is set; call the step inside of jax.set_mesh(mesh), or gather inside "
            "jax.shard_map"
        )
    if plan_being_traced() is not None:
        raise ValueError(
            "make_train_step(sharding=) already gathers weights, got gather in its loss function; remove gather"
        )
    axes, dtype, reduce_dtype = as_tuple(axes), canonical_dtype(dtype), to_reduce_in(reduce_dtype)
    require_axes(mesh, axes, "axes")
    require_specs(tree, specs)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if len({types[name] for name in axes}) != 1:
        raise ValueError(
            "the axes that weights are gathered over must all have the same type, got "
            f"{', '.join(f'{name!r} of type {types[name].name}' for name in axes) or 'none'}; create the mesh with "
            "equal axis_types for these axes"
        )
    if types[axes[0]] is AxisType.Manual and not shows_what_varies():
        raise ValueError(
            "gather must know which arrays differ between devices, but shard_map(…, check_vma=False) hides this; "
            "remove check_vma=False"
        )
    how = {AxisType.Explicit: _resharded, AxisType.Manual: _collected, AxisType.Auto: _gathered_by_constraints}[
        types[axes[0]]
    ]

    def gathered(path: Any, leaf: Any, spec: PartitionSpec) -> Any:
        is_split = not set(axes_in_spec(spec)).isdisjoint(axes)
        if not _tree.is_float_array(leaf) or not (is_split or how is _collected):
            return leaf
        name = _tree.path_name(path)
        if how is not _collected:  # in shard_map, a leaf is one device's part
            fitting(spec, name, name, leaf.shape, mesh)
        half = dtype if is_split else np.dtype(leaf.dtype)
        return how(leaf, spec, axes, half, reduced_in(reduce_dtype, half), name)

    return jax.tree.map_with_path(gathered, tree, specs)


def _resharded(leaf: Any, spec: Any, over: tuple[str, ...], dtype: np.dtype, reduce_dtype: np.dtype, _: str) -> Any:
    """Gather on axes of type Explicit.

    The type of the cotangent records that the devices have not yet summed the cotangent. ``reshard`` sums it.
    """

    @jax.custom_vjp
    def whole(leaf: Any) -> Any:
        return jax.sharding.reshard(leaf.astype(dtype), PartitionSpec(*without(spec, over), reduced=set(over)))

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (
            jax.sharding.reshard(cotangent.astype(reduce_dtype), jax.typeof(leaf).sharding.spec).astype(leaf.dtype),
        )

    whole.defvjp(lambda leaf: (whole(leaf), None), backward)
    return whole(leaf)


def _collected(leaf: Any, spec: Any, over: tuple[str, ...], dtype: np.dtype, reduce_dtype: np.dtype, name: str) -> Any:
    """Gather inside shard_map."""
    gathered_axes = []  # the mesh axes to gather over, for each axis of the array
    for entry in map(as_tuple, spec):
        axes = tuple(axis for axis in entry if axis in over)
        if entry[len(entry) - len(axes) :] != axes:
            raise ValueError(
                f"in shard_map the gathered mesh axes must be the last ones in a spec entry, got {entry} for {name!r} "
                f"and axes {over}; put {', '.join(axes)} last"
            )
        gathered_axes.append(axes)
    replicated_axes = tuple(axis for axis in over if axis not in manual_axes(leaf))

    @jax.custom_vjp
    def whole(leaf: Any) -> Any:
        leaf = leaf.astype(dtype)
        for dim, axes in enumerate(gathered_axes):
            leaf = jax.lax.all_gather(leaf, axes, axis=dim, tiled=True) if axes else leaf
        # Without pcast, JAX would first sum the gradient over these axes in the gradient's dtype.
        return jax.lax.pcast(leaf, replicated_axes, to="varying") if replicated_axes else leaf

    def backward(nothing: None, cotangent: Any) -> tuple[Any]:
        cotangent = cotangent.astype(reduce_dtype)
        cotangent = jax.lax.psum(cotangent, replicated_axes) if replicated_axes else cotangent
        for dim, axes in enumerate(gathered_axes):
            if axes:
                cotangent = jax.lax.psum_scatter(cotangent, axes, scatter_dimension=dim, tiled=True)
        return (cotangent.astype(leaf.dtype),)

    whole.defvjp(lambda leaf: (whole(leaf), None), backward)
    return whole(leaf)


def _gathered_by_constraints(
    leaf: Any, spec: Any, over: tuple[str, ...], dtype: np.dtype, reduce_dtype: np.dtype, name: str
) -> Any:
    """Gather on axes of type Auto, by two sharding constraints.

    Without the first constraint, XLA gathers some weights before it casts them.
    """
    if reduce_dtype != dtype:
        raise ValueError(
            f"on mesh axes of type Auto reduce_dtype must be the dtype of the gathered weight, got reduce_dtype "
            f"{reduce_dtype.name!r} for {name!r} gathered in {dtype.name!r}; create the mesh with "
            f"axis_types=(jax.sharding.AxisType.Explicit, …), or pass reduce_dtype={dtype.name!r}"
        )
    half = jax.lax.with_sharding_constraint(leaf.astype(dtype), spec)
    return jax.lax.with_sharding_constraint(half, PartitionSpec(*without(spec, over)))
