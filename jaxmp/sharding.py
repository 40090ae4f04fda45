"""Params over many devices: who holds what, and what crosses the wire in which dtype.

JAX's own partitioner does all moving. Here are the specs (:func:`fsdp_specs`), the state made in place
(:func:`init_state`), the gather of a weight in half whose gradient is reduced in float32 (:func:`gather`), and the
account of what a compiled program moves (:func:`collectives`).

Fully sharded data parallelism: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), Zhao et al. 2023 (arXiv:2304.11277).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from jaxmp import hlo, tables
from jaxmp import tree as _tree
from jaxmp._jaxpr import reading
from jaxmp._mesh_plan import reduced_in, spread, to_reduce_in
from jaxmp._specs import (
    Mesh,
    as_tuple,
    covers,
    fitting,
    following,
    names_of,
    parts_of,
    require_axes,
    require_match,
    require_specs,
    specs_in,
    text_of,
    without,
)
from jaxmp.dtypes import canonical_dtype
from jaxmp.training import TrainState, created

Rules = Mapping[str, PartitionSpec]


def fsdp_specs(
    shapes: Any,
    mesh: Mesh,
    *,
    axis: str = "fsdp",
    rules: Rules | None = None,
    min_size: int = 65_536,
    stacked: Iterable[str] | None = None,
) -> Any:
    """Where each param is split: along its largest axis that the devices of ``axis`` divide.

    A leaf of fewer than ``min_size`` numbers, or that no axis of divides, stays whole on every device, and so stays in
    float32 until it is used: its gradient is summed in float32 (see :func:`gather`).

    Args:
      shapes: the params, arrays or ShapeDtypeStructs (``jax.eval_shape`` makes them); or a whole
        :class:`jaxmp.TrainState`, whose optimizer and moving average follow the params: a leaf at the same path with
        the same shape has the same spec, all others are whole everywhere.
      mesh: its axes and their sizes; a ``Mesh`` or an ``AbstractMesh``.
      axis: the axis of the mesh to split over.
      rules: pattern on the path of a leaf to its whole spec, ``{"**/mlp/up": P("fsdp", "tensor")}``. A pattern covers
        what it matches and all below, the first that matches wins, as in overrides of policies.
      min_size: in numbers; of a stacked leaf those of one layer count.
      stacked: patterns of leaves whose axis 0 counts layers (``nn.scan``): it is never split.

    Returns:
      A tree of ``PartitionSpec`` of the structure of ``shapes``.

    Raises:
      ValueError: the mesh has no such axis; a pattern matches nothing; a rule's spec has more axes than the leaf, names
        an axis that is not there or one twice, or does not divide the leaf.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    >>> shapes = jax.eval_shape(lambda: {"kernel": jnp.ones((512, 1024)), "bias": jnp.ones(1024)})
    >>> fsdp_specs(shapes, mesh) == {"bias": jax.P(), "kernel": jax.P(None, "fsdp")}
    True
    """
    if isinstance(shapes, TrainState):
        own = fsdp_specs(shapes.params, mesh, axis=axis, rules=rules, min_size=min_size, stacked=stacked)
        return following(shapes, shapes.params, own, mesh)
    require_axes(mesh, [axis], "axis")
    rules, stacked = dict(rules or {}), as_tuple(stacked)
    leaves = jax.tree.leaves_with_path(shapes)
    paths = [parts_of(path) for path, _ in leaves]
    for pattern in (*rules, *stacked):
        require_match(pattern, paths)

    def spec_of(path: Any, leaf: Any) -> PartitionSpec:
        parts, shape = parts_of(path), tuple(leaf.shape)
        for pattern, spec in rules.items():
            if covers(pattern, parts):
                return fitting(spec, pattern, "/".join(parts), shape, mesh)
        first = int(any(covers(pattern, parts) for pattern in stacked))
        sizes = [(size, -dim) for dim, size in enumerate(shape) if dim >= first and size % mesh.shape[axis] == 0]
        if not sizes or math.prod(shape[first:]) < min_size or mesh.shape[axis] == 1:
            return PartitionSpec()
        return PartitionSpec(*[None] * -max(sizes)[1], axis)

    return jax.tree.map_with_path(spec_of, shapes)


def init_state(
    make_params: Callable[[], Any], tx: optax.GradientTransformation, mesh: jax.sharding.Mesh, specs: Any, **fields: Any
) -> TrainState:
    """A :class:`jaxmp.TrainState` made where it stays: no device, and no process, ever holds all of it.

    Args:
      make_params: returns the params; traced, so its random numbers do not depend on the devices.
      tx: as for :meth:`jaxmp.TrainState.create`.
      mesh: the devices, of all processes.
      specs: those of the params, as :func:`fsdp_specs` returns them. The optimizer's leaves follow their params.
      **fields: the rest that :meth:`jaxmp.TrainState.create` takes. Arrays must be the same on every process; they
        come to lie whole on every device.

    Raises:
      ValueError: the specs are of another tree than the params, or do not fit them.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    >>> make_params = lambda: {"w": jax.random.normal(jax.random.key(0), (512, 512))}
    >>> specs = fsdp_specs(jax.eval_shape(make_params), mesh)
    >>> state = init_state(make_params, optax.adam(1e-3), mesh, specs, rng=1)
    >>> state.opt_state.inner_state[0].mu["w"].sharding == state.params["w"].sharding
    True
    """
    with_arrays = [name for name, value in fields.items() if any(map(_is_array, jax.tree.leaves(value)))]
    arrays = {name: fields[name] for name in with_arrays}
    static = {name: value for name, value in fields.items() if name not in arrays}

    def make(arrays: Any) -> TrainState:
        return created(TrainState, params=make_params(), tx=tx, **static, **arrays)

    shapes = jax.eval_shape(make, arrays)
    describe(shapes.params, specs, mesh)  # raises if they do not fit
    shardings = [NamedSharding(mesh, spec) for spec in specs_in(following(shapes, shapes.params, specs, mesh))]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if reading.is_tracing() else jax.set_mesh(mesh):
        leaves = jax.jit(lambda arrays: jax.tree.leaves(make(arrays)), out_shardings=shardings)(arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def gather(tree: Any, specs: Any, dtype: Any, *, reduce_dtype: Any = "float32", axes: Sequence[str] = ("fsdp",)) -> Any:
    """The weights whole, in ``dtype``; their gradients are summed over the devices in ``reduce_dtype`` and split again.

    A weight is cast where it lies, gathered in ``dtype``, and used; the gradient that comes back is cast to
    ``reduce_dtype``, reduced and scattered to the devices, and comes out in the dtype of the weight. Call it where the
    weights are used, layer by layer (in the body of a scan over layers, with the specs of one layer), so that no device
    holds all of them.

    How it is done is decided by the mesh that is set: with axes of type Explicit by ``reshard``, inside ``shard_map``
    by collectives, with axes of type Auto by two constraints. There XLA reduces a gradient in the dtype that it has,
    whatever it is cast to, so that ``reduce_dtype`` must be ``dtype``.

    Args:
      tree: the weights. Leaves that are split over none of ``axes`` come back in their dtype. In ``shard_map`` their
        gradients are summed in ``reduce_dtype``. Elsewhere JAX sums them, in the dtype in which they meet the batch:
        add a bias in float32, or let ``make_train_step(specs=)`` do all this, which sums them in float32.
      specs: a ``PartitionSpec`` for each, as :func:`fsdp_specs` returns them.
      dtype: to compute in.
      reduce_dtype: of the sum over devices, float32 (for weights gathered in float64 this) or a half dtype.
      axes: of the mesh, over which the weights are gathered and the gradients reduced: all those over which the batch
        is split, ``("data", "fsdp")`` where each group of ``"fsdp"`` has a copy. What is split over others stays so.

    Raises:
      ValueError: no mesh is set or it lacks an axis; ``reduce_dtype`` cannot be had on axes of type Auto; the specs are
        of another tree, or do not fit; a dtype is not floating, or none to reduce in; it is called in the loss function
        of a ``make_train_step(specs=)``, which gathers by itself; in ``shard_map``, an array axis is split over an axis
        of ``axes`` and then over another, or ``check_vma=False`` hides who holds what.

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
            "gather moves weights over a mesh, and none is set; call the step within jax.set_mesh(mesh), or gather "
            "inside jax.shard_map"
        )
    if spread() is not None:
        raise ValueError(
            "make_train_step(mesh=, specs=) gathers weights itself, got gather in its loss function; leave one of the "
            "two out"
        )
    axes, dtype, reduce_dtype = as_tuple(axes), canonical_dtype(dtype), to_reduce_in(reduce_dtype)
    require_axes(mesh, axes, "axes")
    require_specs(tree, specs)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if len({types[name] for name in axes}) != 1:
        raise ValueError(
            "the axes that weights are gathered over must be of one type, got "
            f"{', '.join(f'{name!r} of type {types[name].name}' for name in axes) or 'none'}; make the mesh with the "
            "same of axis_types for them"
        )
    if types[axes[0]] is AxisType.Manual and not reading.shows_what_varies():
        raise ValueError(
            "gather must know which arrays differ between devices, and shard_map(…, check_vma=False) hides it; leave "
            "check_vma=False out"
        )
    how = {AxisType.Explicit: _resharded, AxisType.Manual: _collected, AxisType.Auto: _constrained}[types[axes[0]]]

    def gathered(path: Any, leaf: Any, spec: PartitionSpec) -> Any:
        is_split = not set(names_of(spec)).isdisjoint(axes)
        if not _tree.is_float_array(leaf) or not (is_split or how is _collected):
            return leaf
        name = _tree.path_name(path)
        if how is not _collected:  # there a leaf is one device's part
            fitting(spec, name, name, leaf.shape, mesh)
        half = dtype if is_split else np.dtype(leaf.dtype)
        return how(leaf, spec, axes, half, reduced_in(reduce_dtype, half), name)

    return jax.tree.map_with_path(gathered, tree, specs)


def _resharded(leaf: Any, spec: Any, over: tuple[str, ...], dtype: np.dtype, reduce_dtype: np.dtype, _: str) -> Any:
    """On axes of type Explicit: the type of the whole array says that its gradient is not reduced yet."""

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
    """Inside shard_map."""
    dims = [
        (dim, tuple(each for each in as_tuple(entry) if each in over), as_tuple(entry))
        for dim, entry in enumerate(spec)
    ]
    for _, own, entry in dims:
        if entry[len(entry) - len(own) :] != own:
            raise ValueError(
                f"in shard_map a weight is gathered over the last axes that an axis of it is split over, got {entry} "
                f"for {name!r} and axes {over}; put {', '.join(own)} last"
            )

    rest = tuple(each for each in over if each not in reading.manual_axes(leaf))

    @jax.custom_vjp
    def whole(leaf: Any) -> Any:
        leaf = leaf.astype(dtype)
        for dim, own, _ in dims:
            leaf = jax.lax.all_gather(leaf, own, axis=dim, tiled=True) if own else leaf
        # Or JAX sums the gradient over them before it comes here, in the dtype that it has.
        return jax.lax.pcast(leaf, rest, to="varying") if rest else leaf

    def backward(nothing: None, cotangent: Any) -> tuple[Any]:
        cotangent = cotangent.astype(reduce_dtype)
        cotangent = jax.lax.psum(cotangent, rest) if rest else cotangent
        for dim, own, _ in dims:
            if own:
                cotangent = jax.lax.psum_scatter(cotangent, own, scatter_dimension=dim, tiled=True)
        return (cotangent.astype(leaf.dtype),)

    whole.defvjp(lambda leaf: (whole(leaf), None), backward)
    return whole(leaf)


def _constrained(
    leaf: Any, spec: Any, over: tuple[str, ...], dtype: np.dtype, reduce_dtype: np.dtype, name: str
) -> Any:
    """On axes of type Auto. With the second constraint alone XLA gathers some weights before it casts them."""
    if reduce_dtype != dtype:
        raise ValueError(
            f"on mesh axes of type Auto XLA reduces gradients in the dtype that they are computed in, got reduce_dtype "
            f"{reduce_dtype.name!r} for {name!r} gathered in {dtype.name!r}; make the mesh with "
            f"axis_types=(jax.sharding.AxisType.Explicit, …), or pass reduce_dtype={dtype.name!r}"
        )
    half = jax.lax.with_sharding_constraint(leaf.astype(dtype), spec)
    return jax.lax.with_sharding_constraint(half, PartitionSpec(*without(spec, over)))


@dataclasses.dataclass(frozen=True)
class Row:
    """A leaf: its shape, its spec as text, the bytes that one device holds, and whether each device holds all of it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class Description(tables.Shown):
    """What each device holds: ``rows`` by leaf. ``str()`` is a table for people, the largest first."""

    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """What one device holds of all leaves."""
        return sum(row.bytes for row in self.rows)

    @property
    def replicated(self) -> tuple[Row, ...]:
        """The leaves that every device holds whole, the largest first."""
        return tuple(row for row in self.rows if row.whole)

    def _shown(self) -> Any:
        whole = f"{sum(row.bytes for row in self.replicated):,} in {len(self.replicated)} leaves"
        title = f"{self.bytes:,} bytes a device, of them {whole} that each one holds whole"
        cells = [(row.bytes, row.dtype, row.shape, row.spec, row.path) for row in self.rows]
        return title, ("bytes", "dtype", "shape", "spec", "leaf"), cells, ()


def describe(shapes: Any, specs: Any, mesh: Mesh) -> Description:
    """What each device holds of ``shapes`` under ``specs``, leaf by leaf, and what stayed whole on all of them.

    Args:
      shapes: a tree of arrays or ShapeDtypeStructs: params, or a whole state.
      specs: a ``PartitionSpec`` for each leaf.
      mesh: the axes and their sizes.

    Raises:
      ValueError: the specs are of another tree, or do not divide a leaf.

    >>> mesh = jax.sharding.AbstractMesh((4,), ("fsdp",))
    >>> description = describe({"w": jax.ShapeDtypeStruct((64, 8), "float32")}, {"w": jax.P("fsdp")}, mesh)
    >>> description.bytes, description.replicated
    (512, ())
    """
    require_specs(shapes, specs)
    rows = []
    for (path, leaf), spec in zip(jax.tree.leaves_with_path(shapes), specs_in(specs), strict=True):
        name = _tree.path_name(path)
        fitting(spec, name, name, tuple(leaf.shape), mesh)
        parts = math.prod(mesh.shape[each] for each in names_of(spec))
        size = math.prod(leaf.shape) * leaf.dtype.itemsize // parts
        rows.append(Row(name, tuple(leaf.shape), leaf.dtype.name, text_of(spec), size, parts == 1))
    return Description(tuple(sorted(rows, key=lambda row: -row.bytes)))


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal operations that move data between devices.

    Attributes:
      kind: that of XLA: ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"``, …
      dtype: what crosses the wire.
      axis: the axes of the mesh that it goes over, ``+`` between; the number of devices where there is no mesh.
      count: how often a call runs it, turns of loops counted.
      bytes: of the whole array, once: what is gathered, or what each device has of a sum before it is reduced.
      wire: bytes that one device sends for all of them, by a ring: (n - 1)/n of the whole, of an all-reduce twice that.
      path: the names of modules and scopes that they come from, ``/`` between.
      source: the user's file and line; empty where the program does not say.
      arrays: the bytes of each array, where one operation moves several.
    """

    kind: str
    dtype: str
    axis: str
    count: int
    bytes: int
    wire: float
    path: str
    source: str
    arrays: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Collectives(tables.Shown):
    """What a compiled program moves between devices; ``rows``, those that move most first. ``str()`` is a table."""

    rows: tuple[Collective, ...]

    @property
    def wire(self) -> float:
        """Bytes that one device sends in a call."""
        return sum(row.wire for row in self.rows)

    def bytes_per_param(self, params: Any) -> float:
        """``wire`` over how many numbers the params are, a tree of arrays or shapes.

        With all weights gathered in half for the forward and for the backward pass and gradients reduced in float32,
        n devices send 8 (n - 1)/n bytes a param: 7 of 8.
        """
        return self.wire / sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

    @property
    def totals(self) -> dict[tuple[str, str, str], float]:
        """``wire`` by kind, dtype and axis, the most first."""
        totals: dict[tuple[str, str, str], float] = {}
        for row in self.rows:
            key = row.kind, row.dtype, row.axis
            totals[key] = totals.get(key, 0.0) + row.wire
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def _shown(self) -> Any:
        cells = [
            (round(row.wire), row.count, row.bytes, row.kind, row.dtype, row.axis, row.path, row.source)
            for row in self.rows
        ]
        columns = ("sent", "count", "whole", "kind", "dtype", "axis", "path", "source")
        return f"{self.wire:,.0f} bytes sent by a device", columns, cells, ()


def ideal_wire(params: Any, axes: Iterable[str] = ("fsdp",)) -> float:
    """Bytes that one device sends at least in a training step that keeps no gathered weight from pass to pass.

    Each weight is gathered in 16 bits for the forward and for the backward pass, and its gradient reduced in float32:
    8 (n - 1)/n bytes a param over n devices.

    Args:
      params: a tree of arrays or shapes, each with a ``NamedSharding``.
      axes: of the mesh, over which the batch is split.

    >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    >>> ideal_wire(jax.ShapeDtypeStruct((8, 4), "float32", sharding=jax.NamedSharding(mesh, jax.P("fsdp"))))
    224.0
    """
    axes, total = set(axes), 0.0
    for leaf in jax.tree.leaves(params):
        mesh, names = leaf.sharding.mesh, set(names_of(leaf.sharding.spec))
        parts, copies, others = (
            math.prod(mesh.shape[name] for name in own) for own in (names & axes, axes - names, names - axes)
        )
        total += 8 * math.prod(leaf.shape) / others * ((parts - 1) / parts + (copies - 1) / copies / parts)
    return total


def collectives(compiled: jax.stages.Compiled, program: hlo.Program | None = None) -> Collectives:
    """What a compiled program moves between devices, by kind, dtype, axis of the mesh, size and place.

    On a CPU XLA widens half collectives to float32, so for their dtypes compile for a GPU, which need not be there.

    Args:
      compiled: ``jax.jit(fun).lower(*args).compile()``, the arguments on a mesh.
      program: its text, where that is read already.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    >>> x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P("fsdp")))
    >>> moved = collectives(jax.jit(jnp.sum).lower(x).compile())
    >>> [(row.kind, row.dtype, row.axis, row.bytes) for row in moved.rows]
    [('all-reduce', 'float32', 'fsdp', 4)]
    """
    mesh = next((s.mesh for s in jax.tree.leaves(compiled.input_shardings) if isinstance(s, NamedSharding)), None)
    program = program or hlo.Program(str(compiled.as_text()))
    counts: collections.Counter[Any] = collections.Counter()
    for computation, instruction, times in program.walk(repeat_loops=True):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in hlo.COLLECTIVES:
            continue
        groups = _groups(instruction.text) or [list(range(program.partitions))]
        axis, n = _axis_of(groups, mesh), len(groups[0])
        sizes: dict[str, list[int]] = {}
        known = program.computations[computation]
        for name in instruction.operands:
            for array in program.joined(computation, known[name]) if name in known else ():
                whole = int(array.bytes) * (n if kind == "all-gather" else 1)
                sizes.setdefault(hlo.dtype_name(array.dtype), []).append(whole)
        for dtype, arrays in sizes.items():
            counts[kind, dtype, axis, n, tuple(sorted(arrays)), instruction.path, program.source(instruction)] += times
    rows = (
        Collective(kind, dtype, axis, count, sum(arrays), count * sum(arrays) * _sent(kind, n), path, source, arrays)
        for (kind, dtype, axis, n, arrays, path, source), count in counts.items()
    )
    return Collectives(tuple(sorted(rows, key=lambda row: (-row.wire, row.kind, row.dtype, row.axis))))


def _sent(kind: str, n: int) -> float:
    """What one of ``n`` devices sends, by a ring, in parts of the whole."""
    return float(n > 1) if kind == "collective-permute" else (1 + (kind == "all-reduce")) * (n - 1) / n


_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\[([\d,]*)\])? ?\{([^}]*)\}")
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def _groups(text: str) -> list[list[int]]:
    """The groups of devices that exchange data, by their numbers in the program; none if all do.

    Raises:
      ValueError: they are written in a notation that is not known here.
    """
    if listed := _LISTED.search(text):
        return [[int(each) for each in group.split(",") if each] for group in re.findall(r"\{([\d, ]*)\}", listed[1])]
    if counted := _COUNTED.search(text):
        shape, order = ([int(each) for each in counted[n].split(",")] for n in (1, 2))
        devices = np.arange(math.prod(order)).reshape(order)
        if counted[3]:
            devices = devices.transpose([int(each) for each in counted[3].split(",")])
        return devices.reshape(shape).tolist()
    if named := _NAMED.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        number = np.array([int(n) for n in named[2].split(",")]) if named[2] else np.arange(math.prod(sizes.values()))
        # An axis of which a part takes part, 'x':(2)4, is cut in three: what is before it, itself, what is after it.
        parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _PART.findall(named[3])}
        cut = [(*parts[n], size // math.prod(parts[n])) if n in parts else (size, 1, 1) for n, size in sizes.items()]
        own = range(1, 3 * len(sizes), 3)
        devices = number.reshape([size for each in cut for size in each])
        devices = devices.transpose([n for n in range(devices.ndim) if n not in own] + list(own))
        return devices.reshape(-1, math.prod(size for _, size in parts.values())).tolist()
    if written := re.search(r"(?:replica_groups|source_target_pairs)=(?!\{\})[^ ]*[^ ,]", text):
        raise ValueError(
            "groups of devices must be in one of XLA's notations {{0,1},…}, [2,4]<=[8] or mesh['x'=8], got "
            f"{written[0]}; take a JAX that jaxmp is tested with (jaxmp doctor)"
        )
    return []


def _axis_of(groups: list[list[int]], mesh: Any) -> str:
    """The fewest axes of the mesh along which the groups lie."""
    shape = dict(mesh.shape) if mesh is not None else {}
    devices = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    for length in range(1, len(shape) + 1):
        for names in itertools.combinations(shape, length):
            along = [list(shape).index(name) for name in names]
            rest = [n for n in range(len(shape)) if n not in along]
            lines = devices.transpose([*rest, *along]).reshape(-1, math.prod(shape[name] for name in names))
            line_of = {int(device): n for n, line in enumerate(lines) for device in line}
            if all(len({line_of.get(device) for device in group}) == 1 for group in groups):
                return "+".join(names)
    return f"{len(groups[0])} devices"


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and not isinstance(leaf, np.generic)
