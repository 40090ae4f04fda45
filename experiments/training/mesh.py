"""Read the flag --mesh.

It arranges the devices of all processes and the rows of a batch on them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.training import processes
from jaxmp.sharding import Sharding, fsdp_specs

AXES = ("data", "fsdp", "tensor")
_ROWS = ("data", "fsdp")  # axes over which a batch is split


def read(text: str | None) -> Mesh | None:
    """The mesh of all devices that ``text`` describes; None for one process that is asked for none.

    Several processes without the flag have a copy of the params each.

    Raises:
      ValueError: it is no mesh, or not one of so many devices as there are.
    """
    if text is None and not processes.several():
        return None
    devices = jax.device_count()
    sizes = dict.fromkeys(AXES, 1)
    parts = [f"data={devices}"] if text is None else text.split(",")
    names = [part.partition("=")[0].strip() for part in parts]
    for name, part in zip(names, parts, strict=True):
        size = part.partition("=")[2].strip()
        if name not in sizes or names.count(name) > 1 or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh is a number of devices for each of {', '.join(AXES)}, or some of them, got {text!r}; write "
                "--mesh data=2,fsdp=4, say"
            )
        sizes[name] = int(size)
    if math.prod(sizes.values()) != devices:
        raise ValueError(
            f"the numbers of --mesh must make all devices, got {text} for {devices} devices of {jax.process_count()} "
            f"processes; write --mesh fsdp={devices}, say"
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def placing(config: Any) -> tuple[Mesh | None, Any]:
    """Return the mesh of the flags and the function that puts a batch on it; None and None for one device.

    Raises:
      ValueError: the devices do not make the mesh, or do not divide a batch.
    """
    devices = read(config.mesh)
    require_rows(devices, config.batch_size, config.accumulate)
    return devices, None if devices is None else functools.partial(spread, devices)


def sharding(mesh: Mesh | None, params: Any, rules: Mapping[str, PartitionSpec] | None = None) -> Sharding | None:
    """Return the sharding of ``params``, arrays or shapes, on the mesh; None for one device.

    ``rules`` are patterns of params to how the axis ``tensor`` splits them.
    """
    if mesh is None:
        return None
    return Sharding(mesh, fsdp_specs(params, mesh, rules=rules if mesh.shape["tensor"] > 1 else None))


def require_rows(mesh: Mesh | None, batch_size: int, accumulate: int) -> None:
    """Checks that the devices divide a microbatch.

    Raises:
      ValueError: they do not.
    """
    if mesh is not None and batch_size % (accumulate * _row_devices(mesh)):
        raise ValueError(
            f"--batch-size must divide by --accumulate times the {_row_devices(mesh)} devices of --mesh that a batch "
            f"is split over, got {batch_size} and --accumulate {accumulate}; take "
            f"{math.ceil(batch_size / accumulate / _row_devices(mesh)) * accumulate * _row_devices(mesh)}, say"
        )


def require_no_tensor(mesh: Mesh | None, model: str) -> None:
    """Checks that a model whose products nobody has said how to split is not asked for it.

    Raises:
      ValueError: it is.
    """
    if mesh is not None and mesh.shape["tensor"] > 1:
        raise ValueError(
            f"{model} has no products to split over the axis tensor of --mesh, got tensor={mesh.shape['tensor']}; take "
            "data and fsdp"
        )


def _row_devices(mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in _ROWS)


def spread(mesh: Mesh, shape: tuple[int, ...], rows: Callable[[slice], np.ndarray]) -> jax.Array:
    """Return an array on the mesh; each process asks for the rows on its own devices.

    Args:
      mesh: the devices.
      shape: of the whole array; rows that the devices do not divide lie whole on each.
      rows: a slice of the first axis to these rows.
    """
    spec = PartitionSpec(_ROWS if shape[0] % _row_devices(mesh) == 0 else None)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: rows(index[0]))


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """NumPy's arrays, which every process has, on the mesh, as the specs say."""

    def placed(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    return jax.tree.map(placed, tree, specs)


def gathered(loss_fn: Callable[..., Any], sharding: Sharding | None) -> Callable[..., Any]:
    """Return ``loss_fn`` of sharded params: it sees them whole but for the axis ``tensor``.

    Left alone, XLA moves activations between the devices in place of weights, ten times as many bytes.
    """
    if sharding is None:
        return loss_fn

    def whole(param: Any, spec: PartitionSpec) -> Any:
        spec = PartitionSpec(*(None if name in _ROWS else name for name in spec))
        return jax.lax.with_sharding_constraint(param, NamedSharding(sharding.mesh, spec))

    def of_whole(params: Any, *rest: Any, **options: Any) -> Any:
        return loss_fn(jax.tree.map(whole, params, sharding.specs), *rest, **options)

    return of_whole


def on_host(tree: Any) -> Any:
    """The arrays of ``tree`` whole, as NumPy's. All processes must call it for arrays that none has whole."""

    def whole(leaf: Any) -> Any:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)

    return jax.device_get(jax.tree.map(whole, tree))
