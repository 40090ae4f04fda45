"""Targets: GPUs and TPUs that XLA compiles for although they are not attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxmp.base.accelerators import accelerator_named
from jaxmp.base.tpus import Tpu
from jaxmp.inspect.compiled.gpu_targets import GpuTarget, target_of_gpu
from jaxmp.inspect.compiled.meshes import mesh_of
from jaxmp.inspect.compiled.tpu_targets import TpuTarget

Target = GpuTarget | TpuTarget


def target_of(name: str) -> Target:
    """Return the target for a GPU or TPU, by its short or its full name.

    The name of a TPU may end in the shape of a slice, such as ``"v5e:4x4"``.

    Raises:
      ValueError: no device with this name has known figures, its compiler no longer supports it, or the shape is not
        the shape of a slice.

    >>> target_of("h200").gpu.capability
    (9, 0)
    >>> target_of("v5p:4x4x4").slice_shape
    (4, 4, 4)
    """
    device = accelerator_named(name)
    if isinstance(device, Tpu):
        return TpuTarget.of(device, name)
    return target_of_gpu(device, name)


def choice() -> str:
    """Return some names of known devices as text for an error."""
    return "device='h200', 'a100', 'v5e', …; on the command line, e.g. --device h200"


def on(device: Any, tree: Any) -> Any:
    """Return a pytree of arrays or shapes as ShapeDtypeStructs on ``device``.

    Python numbers are unchanged.
    """
    sharding = SingleDeviceSharding(device)
    return _placed(tree, lambda leaf: sharding)


def on_mesh(target: Target, tree: Any, topology: str | None = None) -> Any:
    """Return the shapes of a pytree on a mesh of devices that are not attached.

    Args:
      target: the GPU, or the slice of TPUs.
      tree: arrays or ShapeDtypeStructs with a ``NamedSharding``, whose mesh may be abstract. Leaves without a
        ``NamedSharding`` are replicated.
      topology: the topology of a cluster of GPUs; None for one host with all GPUs.

    Raises:
      ValueError: the topology or slice and the mesh have different numbers of devices.
    """
    mesh = target.mesh(mesh_of(tree), topology)

    def on_devices(leaf: Any) -> NamedSharding:
        sharding = getattr(leaf, "sharding", None)
        return NamedSharding(mesh, sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec())

    return _placed(tree, on_devices)


def _placed(tree: Any, sharding_of: Callable[[Any], Sharding]) -> Any:
    """Return the arrays and shapes of a pytree as shapes with other shardings."""

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        is_weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, dtype_in_jax(leaf), sharding=sharding_of(leaf), weak_type=is_weak)

    return jax.tree.map(placed, tree)


def dtype_in_jax(leaf: Any) -> Any:
    """Return the dtype in which JAX computes with an array.

    It is int32 for NumPy's int64, unless jax_enable_x64 is set. JAX 0.12 warns of a ShapeDtypeStruct with int64.
    """
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
