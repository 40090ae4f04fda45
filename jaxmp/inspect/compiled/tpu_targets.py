"""TPUs that XLA compiles for although they are not attached.

Google's compiler for TPUs is the package ``libtpu``, which needs no TPU. It knows each generation, from one chip to a
pod. The compiled program contains the compiler's own estimate of the cycles of each kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxmp.base.tpus import Tpu
from jaxmp.inspect.compiled.stored_programs import compile_or_load

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # without it, libtpu asks a server for the TPUs of this machine
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # without it, a second process cannot compile at the same time
}
"""The environment in which libtpu loads. None of these variables changes a compiled program."""


_NEEDED = re.compile(r"RESOURCE_EXHAUSTED: .*?\(([\d.]+)([KMGT])\) exceeds available HBM", re.DOTALL)
_GIB = {"K": 2**-20, "M": 2**-10, "G": 1.0, "T": 2.0**10}
"""The GiB of the units in the compiler's messages."""


class DoesNotFitError(ValueError):
    """A program needs more memory than a TPU has, so the compiler refuses it.

    Attributes:
      needed: the bytes that the program needs, according to the compiler.
    """

    def __init__(self, tpu: Tpu, name: str, needed_gib: float) -> None:
        self.needed = int(needed_gib * 2**30)
        super().__init__(
            f"the program needs {needed_gib:,.2f} GiB, but {tpu.device_kind} has {tpu.memory_gib} GiB; find settings "
            f"that fit with jaxmp.inspect.fit(step, device={name!r}), use a smaller batch, or a larger slice"
        )


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """A TPU, or a slice of TPUs, that XLA compiles for.

    Attributes:
      tpu: the generation.
      slice_shape: the chips along each axis of the slice; empty for a single device.
    """

    tpu: Tpu
    slice_shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, tpu: Tpu, name: str) -> TpuTarget:
        """Return the target for a name such as ``"v5e"`` or ``"v5e:4x4"``.

        Raises:
          ValueError: the part after the colon is not the shape of a slice.
        """
        _, colon, text = name.partition(":")
        shape = tuple(int(size) for size in text.split("x")) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) else ()
        if colon and len(shape) != tpu.axes:
            raise ValueError(
                f"a slice of {tpu.generation} has {tpu.axes} axes of chips, got {name!r}; write e.g. "
                f"{tpu.slice_of(16)!r}"
            )
        return cls(tpu, shape)

    @property
    def name(self) -> str:
        """Return the kind of the device, as JAX reports it."""
        return self.tpu.device_kind

    @property
    def is_slice(self) -> bool:
        """Return whether the target has several devices."""
        return math.prod(self.slice_shape) * self.tpu.devices_per_chip > 1 if self.slice_shape else False

    @property
    def platform(self) -> str:
        """Return JAX's name of the platform to lower programs for."""
        return "tpu"

    def compile(self, lowered: Any) -> Any:
        """Compile a lowered program, or read it from the disk as a ``StoredProgram``.

        Raises:
          DoesNotFitError: the program needs more memory than the device has.
        """
        shape = "x".join(map(str, self.slice_shape))
        name = f"{self.tpu.generation}:{shape}".removesuffix(":")
        try:
            return compile_or_load(lowered, name)
        except jax.errors.JaxRuntimeError as error:
            needed = _NEEDED.search(str(error))
            if needed is None:
                raise
            raise DoesNotFitError(self.tpu, name, float(needed[1]) * _GIB[needed[2]]) from error

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which programs are traced, lowered and compiled."""
        return contextlib.nullcontext()

    def devices(self) -> list[Any]:
        """Return the devices of the slice, or those of the smallest host if no slice is named.

        Raises:
          ModuleNotFoundError: libtpu is missing, or has another version than JAX needs.
          ValueError: the compiler knows no such slice.
        """
        if reason := missing():
            raise ModuleNotFoundError(reason)
        shape = self.slice_shape or (2, 2, 1)[: self.tpu.axes]
        name = f"{self.tpu.generation}:{'x'.join(map(str, shape))}"
        options: dict[str, Any] = {"chip_config_name": self.tpu.chip_config} if self.tpu.chip_config else {}
        if math.prod(shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        try:
            with _environment_of_libtpu():
                described = topologies.get_topology_desc(name, "tpu", **options)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"the compiler has no slice {name!r}: {str(error).splitlines()[0]}") from error
        return list(described.devices)

    def mesh(self, mesh: Any, topology: str | None = None) -> Mesh:
        """Return a mesh of the slice with the axes of ``mesh``, in the order of ``jax.make_mesh``.

        Raises:
          ValueError: the slice and the mesh have different numbers of devices, or a topology was passed.
        """
        if topology is not None:
            raise ValueError(
                f"a topology describes GPUs, got {topology!r} for {self.tpu.generation}; write the slice of a TPU into "
                f"its name: device={self._slice_with(mesh.size)!r}"
            )
        devices_of_slice = math.prod(self.slice_shape) * self.tpu.devices_per_chip if self.slice_shape else 1
        if devices_of_slice != mesh.size:
            axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
            named = "x".join(map(str, self.slice_shape)) or "one device"
            raise ValueError(
                f"the slice must have as many devices as the mesh, got {named} with {devices_of_slice} and a mesh with "
                f"{mesh.size} ({axes}); write e.g. device={self._slice_with(mesh.size)!r}"
            )
        sizes = tuple(mesh.shape.values())
        devices = self.devices()[: mesh.size]
        return jax.make_mesh(sizes, mesh.axis_names, axis_types=mesh.axis_types, devices=devices)

    def _slice_with(self, devices: int) -> str:
        """Return the name of a slice with so many devices."""
        return self.tpu.slice_of(devices // self.tpu.devices_per_chip)


def missing() -> str | None:
    """Return why this machine cannot compile for a TPU; None if it can.

    The text includes the remedy.
    """
    needed = _needed_version()
    install = f"pip install 'jax[tpu]=={jax.__version__}'"
    if importlib.util.find_spec("libtpu") is None:
        return (
            "to compile for a TPU, JAX needs the package libtpu, which is not installed: pip install -e "
            f"'.[compile-only]', or {install}. It exists for Linux on x86-64"
        )
    installed = importlib.metadata.version("libtpu")
    if needed and not re.fullmatch(re.escape(needed).replace(r"\*", ".*"), installed):
        return f"JAX {jax.__version__} compiles for TPUs with libtpu {needed}, got {installed}: {install}"
    return None


def _needed_version() -> str | None:
    """Return the version of libtpu that JAX requires, such as ``"0.0.42.*"``; None if it names none."""
    for requirement in importlib.metadata.requires("jax") or ():
        if match := re.match(r"libtpu==([\w.*]+)", requirement):
            return match[1]
    return None


@contextlib.contextmanager
def _environment_of_libtpu() -> Iterator[None]:
    """Set the environment in which libtpu loads, but not the variables that you have set."""
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
