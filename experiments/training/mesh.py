"""Read the flag --mesh, and place arrays on the devices of this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmp.sharding import Sharding, fsdp_specs

AXES = ("data", "fsdp", "tensor")
_ROWS = ("data", "fsdp")  # axes over which a batch is split


def read(config: Any) -> Mesh | None:
    """Return the mesh of all devices that the flag ``--mesh`` describes; None without the flag.

    Raises:
      ValueError: the flag does not describe a mesh, its numbers do not multiply to the number of devices, or the
        devices do not divide a microbatch.
    """
    if config.mesh is None:
        return None
    sizes = dict.fromkeys(AXES, 1)
    for part in config.mesh.split(","):
        name, _, size = (text.strip() for text in part.partition("="))
        if name not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh gives a number of devices to some of the axes {', '.join(AXES)}, got {config.mesh!r}; write "
                "--mesh data=2,fsdp=4, for example"
            )
        sizes[name] = int(size)
    if math.prod(sizes.values()) != jax.device_count():
        raise ValueError(
            f"the product of the numbers of --mesh must be the number of devices, got {config.mesh} for "
            f"{jax.device_count()} devices; write --mesh fsdp={jax.device_count()}, for example"
        )
    rows = sizes["data"] * sizes["fsdp"]
    if config.batch_size % (config.accumulate * rows):
        raise ValueError(
            f"--batch-size must be a multiple of --accumulate times the {rows} devices of --mesh that a batch is split "
            f"over, got {config.batch_size} and --accumulate {config.accumulate}"
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def require_no_tensor(mesh: Mesh | None, model: str) -> None:
    """Check that the axis ``tensor`` is 1, for models that have no rules to split their products.

    Raises:
      ValueError: the axis is larger than 1.
    """
    if mesh is not None and mesh.shape["tensor"] > 1:
        raise ValueError(f"{model} has no products to split over the axis tensor of --mesh; take data and fsdp")


def sharding(mesh: Mesh | None, params: Any, rules: Mapping[str, PartitionSpec] | None = None) -> Sharding | None:
    """Return the sharding of ``params``, arrays or shapes, on the mesh.

    The result is None for one device. ``rules`` maps patterns of params to their specs. It is used only if the axis
    ``tensor`` is larger than 1.
    """
    if mesh is None:
        return None
    return Sharding(mesh, fsdp_specs(params, mesh, rules=rules if mesh.shape["tensor"] > 1 else None))


def placed(mesh: Mesh | None, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, split by rows over the mesh.

    Every device gets the whole of a batch whose rows the devices do not divide. Without a mesh, the batches stay where
    they are.
    """
    if mesh is None:
        return batches
    rows = math.prod(mesh.shape[name] for name in _ROWS)

    def place(leaf: jax.Array) -> jax.Array:
        spec = PartitionSpec(_ROWS if len(leaf) % rows == 0 else None)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return (jax.tree.map(place, batch) for batch in batches)


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
