"""The sharding of a train step, and the plan for its weights and gradients.

*Half* is short for half precision: float16 or bfloat16. The *batch axes* are the mesh axes that split a batch, and *the
devices* are the devices along these axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp._internals.jax.traces import is_tracing
from jaxmp.base import trees as _tree
from jaxmp.base.context_variables import setting
from jaxmp.base.dtypes import at_least_float32, canonical_dtype, dtype_among
from jaxmp.sharding.placement import moved_to
from jaxmp.sharding.specs import (
    Mesh,
    as_tuple,
    axes_in_spec,
    fitting,
    following,
    require_mesh,
    require_specs,
    specs_in,
    without,
)

BATCH_AXES = ("data", "fsdp")
"""The axes of a mesh over which a batch is split."""
COPIES = "jaxmp.copies"
"""The name scope of the operations of :meth:`Plan.copies`."""
_FLOAT32 = np.dtype(np.float32)
_REDUCES = ("float32", "bfloat16", "float16")
_tracing: ContextVar[Plan | None] = ContextVar("jaxmp_mesh_plan", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Sharding:
    """The layout of a train state over devices, and how gradients are summed.

    Pass a sharding to :func:`jaxmp.make_train_step` and to :meth:`jaxmp.TrainState.create_sharded`. ``Sharding(mesh)``
    is plain data parallelism, like torch's DDP: each device has a copy of the state and a part of the batch.

    Attributes:
      mesh: the mesh of devices. It has an axis ``"data"``, an axis ``"fsdp"``, or both. A batch is split over
        these axes.
      specs: a ``PartitionSpec`` for each param, as :func:`jaxmp.sharding.fsdp_specs` returns them. With None, no param
        is split.
      reduce_dtype: the dtype in which gradients are summed over devices. Within a device, they are summed in float32.
      reduce: when gradients are summed over devices. ``"each"`` means after each microbatch. ``"once"`` means once per
        step, after the last microbatch. All weights are then also gathered only once, before the first microbatch.
        ``"once"`` sends fewer bytes than ``"each"`` and needs more memory.
      regather: whether the backward pass gathers the weights again. If False, the gathered weights of the forward pass
        are kept in memory.

    Raises:
      TypeError: ``mesh`` is not a mesh.
      ValueError: the mesh has neither of the axes ``"data"`` and ``"fsdp"``, or their types differ; ``reduce_dtype`` is
        not float32, bfloat16 or float16; ``reduce`` is neither ``"each"`` nor ``"once"``.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> params = {"w": jnp.zeros((512, 512))}
    >>> sharding = Sharding(mesh, jaxmp.sharding.fsdp_specs(params, mesh))
    >>> state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(0.1), sharding)
    """

    mesh: Mesh
    specs: Any = None
    reduce_dtype: Any = dataclasses.field(default="float32", kw_only=True)
    reduce: Literal["each", "once"] = dataclasses.field(default="each", kw_only=True)
    regather: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        require_mesh(self.mesh, "Sharding(mesh, specs)")
        if self.reduce not in ("each", "once"):
            raise ValueError(f"reduce must be 'each' or 'once', got {self.reduce!r}")
        object.__setattr__(self, "reduce_dtype", to_reduce_in(self.reduce_dtype))
        self.plan()

    def plan(self) -> Plan:
        """Return the :class:`Plan` of a train step."""
        return Plan(self.mesh, self.specs, self.reduce_dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The layout of a train step's params, and the dtype of gradient reductions.

    Raises:
      ValueError: the mesh has no axis for the batch, or its axes for the batch differ in type.
    """

    mesh: Mesh
    specs: Any
    reduce_dtype: np.dtype

    def __post_init__(self) -> None:
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        if not self.axes:
            raise ValueError(
                f"the mesh must have an axis 'data' or 'fsdp' for the batch, got {sizes or 'no axes'}; create it with "
                "jax.make_mesh((jax.device_count(),), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))"
            )
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if len(kinds := {types[name] for name in self.axes}) > 1 or AxisType.Manual in kinds:
            raise ValueError(
                "the axes of the batch must all be of type Auto or all of type Explicit, got "
                f"{', '.join(f'{name!r} of type {types[name].name}' for name in self.axes)}; create the mesh with "
                "equal axis_types"
            )

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Return the axes of the mesh that split the batch."""
        return tuple(name for name in BATCH_AXES if name in self.mesh.shape)

    @functools.cached_property
    def devices(self) -> int:
        """Return the number of devices that a batch is split over."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def is_explicit(self) -> bool:
        """Return whether the current mesh has Explicit axes for the batch."""
        mesh: Mesh = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if mesh.empty else mesh
        return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[self.axes[0]] is AxisType.Explicit

    @functools.cached_property
    def rows(self) -> PartitionSpec:
        """Return the spec of an array whose axis 0 is split over the devices."""
        return PartitionSpec(self.axes if len(self.axes) > 1 else self.axes[0])

    def set(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the mesh of the plan is the current mesh."""
        if not is_tracing() and not isinstance(self.mesh, jax.sharding.AbstractMesh):
            return jax.set_mesh(self.mesh)
        around: Mesh = jax.sharding.get_abstract_mesh()
        if (around.shape, around.axis_types) == (self.mesh.shape, self.mesh.axis_types):
            return contextlib.nullcontext()  # keep the current mesh: it may name the device to compile for
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def shardings(self, state: Any) -> Any:
        """Return the sharding of each leaf of a train state.

        Raises:
          ValueError: the specs do not have the structure of the params, or do not fit their shapes.
        """
        specs = specs_in(self.specs_for(state.params))
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(state.params), specs, strict=True):
            name = _tree.path_name(path)
            fitting(spec, name, name, tuple(leaf.shape), self.mesh)
        return jax.tree.map(lambda _, spec: NamedSharding(self.mesh, spec), state, self.specs_of(state))

    def specs_of(self, state: Any) -> Any:
        """Return the spec of each leaf of a train state."""
        return following(state, state.params, self.specs_for(state.params), self.mesh)

    def specs_for(self, params: Any) -> Any:
        """Return the spec of each param.

        Raises:
          ValueError: the specs do not have the structure of ``params``.
        """
        if self.specs is None:
            return jax.tree.map(lambda _: PartitionSpec(), params)
        require_specs(params, self.specs)
        return self.specs

    def batch(self, batch: Any, microbatches: int) -> Any:
        """Return ``batch`` with its examples split over the devices.

        Scalars are replicated.

        Raises:
          ValueError: the number of examples is not divisible by devices times microbatches.
        """

        def placed(path: Any, leaf: Any) -> Any:
            self._require_divided(path, leaf, microbatches)
            is_scalar = np.ndim(leaf) == 0
            if isinstance(leaf, jax.core.Tracer):  # other axes, such as the sequence, keep their split
                return self.put(leaf, PartitionSpec()) if is_scalar else self.by_rows(leaf)
            return moved_to(leaf, NamedSharding(self.mesh, PartitionSpec() if is_scalar else self.rows))

        return jax.tree.map_with_path(placed, batch)

    def _require_divided(self, path: Any, leaf: Any, microbatches: int) -> None:
        """Raise a ValueError unless each microbatch of a leaf can be split evenly."""
        if np.ndim(leaf) == 0:
            return
        examples, parts = np.shape(leaf)[0], self.devices * microbatches
        if examples and examples % parts == 0:
            return
        times = f" times {microbatches} microbatches" if microbatches > 1 else ""
        entry = f" in batch entry {_tree.path_name(path)!r}" if path else ""
        raise ValueError(
            f"a batch must be divisible by {self.devices} devices of {', '.join(map(repr, self.axes))}{times}, got "
            f"{examples} examples{entry}; use e.g. a batch of {parts * (examples // parts + 1)}"
        )

    def put(self, value: Any, spec: PartitionSpec) -> Any:
        """Return ``value`` in the layout ``spec``."""
        return jax.sharding.reshard(value, spec) if self.is_explicit else jax.lax.with_sharding_constraint(value, spec)

    def gathered(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec of a gathered param.

        A gathered param is split only over axes that do not split the batch.
        """
        return PartitionSpec(*without(spec, self.axes))

    def by_rows(self, value: Any, dim: int = 0) -> Any:
        """Return ``value`` with axis ``dim`` split over the devices.

        The other axes keep their layout.
        """
        if self.is_explicit:
            entries = without(jax.typeof(value).sharding.spec, self.axes)
        else:
            entries = [PartitionSpec.UNCONSTRAINED] * np.ndim(value)
        return self.put(value, PartitionSpec(*entries[:dim], *self.rows, *entries[dim + 1 :]))

    def is_split(self, spec: PartitionSpec) -> bool:
        """Return whether ``spec`` splits an array over axes of the batch."""
        return not set(axes_in_spec(spec)).isdisjoint(self.axes)

    def whole(self, param: Any, spec: PartitionSpec, dtype: np.dtype) -> Any:
        """Return a param gathered in ``dtype``, without a derivative."""
        param = jax.lax.stop_gradient(param)
        if not self.is_split(spec):
            return param.astype(dtype)
        # Without the inner constraint, XLA gathers some weights before it casts them.
        return self.put(self.put(param.astype(dtype), spec), self.gathered(spec))

    def tap(self, param: Any, spec: PartitionSpec) -> Any:
        """Return the tap of ``param``: zeros of shape (devices, …).

        The cotangent of ``param`` is the sum of the tap's cotangent over the devices.
        """

        @jax.custom_vjp
        def tap(param: Any) -> Any:
            return self.zeros(param, spec)

        tap.defvjp(
            lambda param: (self.zeros(param, spec), None),
            lambda _, parts: (self.reduced(parts, spec).astype(param.dtype),),
        )
        return tap(param)

    def zeros(self, param: Any, spec: PartitionSpec) -> Any:
        """Return the zeros (devices, …) of the tap of ``param``."""
        return self.of_parts(jnp.zeros((self.devices, *param.shape), at_least_float32(param.dtype)), spec)

    def of_parts(self, parts: Any, spec: PartitionSpec) -> Any:
        """Return the parts (devices, …) of a gradient, with one part on each device.

        The axes after the first have the layout of the gathered param.
        """
        return self.put(parts, PartitionSpec(*self.rows, *self.gathered(spec)))

    def reduced(self, parts: Any, spec: PartitionSpec) -> Any:
        """Return the sum of ``parts`` (devices, …) over axis 0, in the layout ``spec``."""
        batch_axes = [tuple(name for name in as_tuple(entry) if name in self.axes) for entry in spec]
        unsplit_axes = tuple(name for name in self.axes if name not in axes_in_spec(spec))

        def reduce(parts: Any) -> Any:
            part = parts[0].astype(reduced_in(self.reduce_dtype, parts.dtype))
            part = jax.lax.psum(part, unsplit_axes) if unsplit_axes else part
            for dim, names in enumerate(batch_axes):
                if names:
                    part = jax.lax.psum_scatter(part, names, scatter_dimension=dim, tiled=True)
            return part

        # shard_map also covers the other axes of the spec. Otherwise XLA first gathers the parts over these axes.
        others = self.gathered(spec)
        out = PartitionSpec(
            *((*as_tuple(other), *names) or None for other, names in zip(others, batch_axes, strict=True))
        )
        at, names = PartitionSpec(*self.rows, *others), {*self.axes, *axes_in_spec(spec)}
        return jax.shard_map(reduce, in_specs=at, out_specs=out, axis_names=names, check_vma=False)(self.put(parts, at))

    def over_rows(self, fun: Callable[..., Any], dims: Sequence[int], args: Sequence[Any]) -> Any:
        """Apply ``fun`` on each device to its part of ``args``.

        ``dims`` has the axis along which each array is split. The results of the devices are stacked to (devices, …).
        """
        split = (PartitionSpec(*[None] * dim, *self.rows) for dim in dims)
        specs = tuple(spec if np.ndim(arg) else PartitionSpec() for spec, arg in zip(split, args, strict=True))
        args = [self.by_rows(arg, dim) if np.ndim(arg) else arg for arg, dim in zip(args, dims, strict=True)]
        options: Any = {"in_specs": specs, "out_specs": self.rows, "axis_names": {*self.axes}, "check_vma": False}
        return jax.shard_map(lambda *args: fun(*args)[None], **options)(*args)

    # --- for losses that sum over rows themselves ---

    def parts(self, array: Any) -> Any:
        """Return ``array`` (rows, …) as (devices, rows per device, …)."""
        shape = (self.devices, array.shape[0] // self.devices, *array.shape[1:])
        return self.put(array.reshape(shape), self.rows)

    def copies(self, weight: Any) -> Any:
        """Return copies (devices, …) of ``weight``, one for each device.

        The cotangents of the copies are reduced together with those of the weight's other uses.
        """
        with jax.named_scope(COPIES):
            return jax.lax.broadcast_in_dim(weight, (self.devices, *weight.shape), range(1, weight.ndim + 1))


def to_reduce_in(dtype: Any) -> np.dtype:
    """Return ``dtype`` as a NumPy dtype, if gradients can be summed in it.

    Raises:
      ValueError: ``dtype`` is not float32, bfloat16 or float16.
    """
    return canonical_dtype(dtype_among("reduce_dtype", dtype, _REDUCES))


def reduced_in(reduce_dtype: np.dtype, dtype: Any) -> np.dtype:
    """Return the dtype in which gradients of ``dtype`` are summed over devices.

    The dtype is ``reduce_dtype``, with one exception: if ``reduce_dtype`` is float32, float64 gradients are summed in
    float64.
    """
    return at_least_float32(dtype) if reduce_dtype == _FLOAT32 else reduce_dtype


def on_auto_axes(fun: Callable[..., Any], out: Any) -> Callable[..., Any]:
    """Return ``fun`` wrapped so that it runs on mesh axes of type Auto.

    The axes of the current mesh may have any type.

    Args:
      fun: a function of arrays.
      out: the spec of the results of ``fun``, or a tree of specs.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return fun
    return jax.sharding.auto_axes(fun, out_sharding=out)


def while_tracing(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Make :func:`plan_being_traced` return this plan in the context."""
    return setting(_tracing, plan)


def plan_being_traced() -> Plan | None:
    """Return the plan of the loss that is being traced, or None."""
    return _tracing.get()
