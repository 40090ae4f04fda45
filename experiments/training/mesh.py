"""Read the flag --mesh, and place arrays on the devices of all processes."""

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
    """Return the mesh of all devices that ``text`` describes.

    Without the flag, ``text`` is None. The result is then None for a single process, and the mesh ``data=N`` of all
    devices for several processes.

    Raises:
      ValueError: ``text`` does not describe a mesh, or its numbers do not multiply to the number of devices.
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
                f"--mesh gives a number of devices to some of the axes {', '.join(AXES)}, got {text!r}; write --mesh "
                "data=2,fsdp=4, for example"
            )
        sizes[name] = int(size)
    if math.prod(sizes.values()) != devices:
        raise ValueError(
            f"the product of the numbers of --mesh must be the number of devices, got {text} for {devices} devices of "
            f"{jax.process_count()} processes; write --mesh fsdp={devices}, for example"
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def placing(config: Any) -> tuple[Mesh | None, Any]:
    """Return the mesh of the flags and the function that puts a batch on it.

    Both results are None for one device.

    Raises:
      ValueError: the mesh does not fit the number of devices, or a batch cannot be split evenly over the devices.
    """
    devices = read(config.mesh)
    require_rows(devices, config.batch_size, config.accumulate)
    return devices, None if devices is None else functools.partial(spread, devices)


def sharding(mesh: Mesh | None, params: Any, rules: Mapping[str, PartitionSpec] | None = None) -> Sharding | None:
    """Return the sharding of ``params``, arrays or shapes, on the mesh.

    The result is None for one device. ``rules`` maps patterns of params to their specs. It is used only if the axis
    ``tensor`` is larger than 1.
    """
    if mesh is None:
        return None
    return Sharding(mesh, fsdp_specs(params, mesh, rules=rules if mesh.shape["tensor"] > 1 else None))


def require_rows(mesh: Mesh | None, batch_size: int, accumulate: int) -> None:
    """Check that a microbatch can be split evenly over the devices.

    Raises:
      ValueError: the devices do not divide a microbatch.
    """
    if mesh is not None and batch_size % (accumulate * _row_devices(mesh)):
        raise ValueError(
            f"--batch-size must be a multiple of --accumulate times the {_row_devices(mesh)} devices of --mesh that a "
            f"batch is split over, got {batch_size} and --accumulate {accumulate}; take "
            f"{math.ceil(batch_size / accumulate / _row_devices(mesh)) * accumulate * _row_devices(mesh)}, for example"
        )


def require_no_tensor(mesh: Mesh | None, model: str) -> None:
    """Check that the axis ``tensor`` is 1.

    Call it for models that have no rules to split their products.

    Raises:
      ValueError: the axis is larger than 1.
    """
    if mesh is not None and mesh.shape["tensor"] > 1:
        raise ValueError(
            f"{model} has no products to split over the axis tensor of --mesh, got tensor={mesh.shape['tensor']}; take "
            "data and fsdp"
        )


def _row_devices(mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in _ROWS)


def spread(mesh: Mesh, shape: tuple[int, ...], rows: Callable[[slice], np.ndarray]) -> jax.Array:
    """Return an array on the mesh, split by rows.

    Args:
      mesh: the devices.
      shape: the shape of the whole array. If the devices do not divide its rows, every device has the whole array.
      rows: returns the rows of a slice of the first axis. Each process calls it only for the rows on its devices.
    """
    spec = PartitionSpec(_ROWS if shape[0] % _row_devices(mesh) == 0 else None)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: rows(index[0]))


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Place NumPy arrays on the mesh according to the specs.

    Every process must have the whole arrays.
    """

    def placed(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    return jax.tree.map(placed, tree, specs)


def gathered(loss_fn: Callable[..., Any], sharding: Sharding | None) -> Callable[..., Any]:
    """Return ``loss_fn`` for sharded params.

    The returned function first gathers the params over all axes but ``tensor``. Otherwise XLA moves activations
    instead of weights between the devices, about ten times as many bytes.
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
    """Return the whole arrays of ``tree`` as NumPy arrays.

    If no process has the whole array, all processes must call this function.
    """

    def whole(leaf: Any) -> Any:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)

    return jax.device_get(jax.tree.map(whole, tree))
