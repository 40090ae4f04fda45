"""GPUs that XLA compiles for although they are not attached.

XLA's compiler reads a description of the GPU: the text form of the message ``GpuTargetConfigProto``. (XLA's own
descriptions are in xla/backends/gpu/target_config/specs.) This module builds the description from the table of GPUs in
jaxmp/base/gpus.py. The compiled program is as optimised as one that is compiled on the GPU, and the memory that it
needs is known. Only its run time is unknown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxmp._internals.jax.patches import with_cudnn
from jaxmp.base.gpus import GPUS, Gpu

INSTALL = "pip install -e '.[compile-only]'"
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
CUDA = Path("/usr/local/cuda")
CUDA_SINCE = (7, 5)
"""The oldest compute capability for which CUDA 13 compiles."""


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU that XLA compiles for, and the versions of the libraries there.

    Attributes:
      gpu: the GPU.
      cudnn: the version of cuDNN with which the programs will run.
      cuda: the version of CUDA; without it XLA does not use float8 products.
    """

    gpu: Gpu
    cudnn: tuple[int, int, int] = (9, 19, 0)
    cuda: tuple[int, int, int] = (13, 0, 0)

    @property
    def name(self) -> str:
        """Return the name of the GPU in XLA's description."""
        return self.gpu.compiler_name or self.gpu.device_kind

    def text(self) -> str:
        """Return the description for XLA."""
        gpu, architecture = self.gpu, self.gpu.architecture
        cuda, major, minor = '"{}.{}.{}"'.format(*self.cuda), *gpu.capability
        facts: dict[str, object] = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": architecture.shared_kib * 1024,
            "shared_memory_per_block_optin": (architecture.shared_kib - architecture.reserved_kib) * 1024,
            "threads_per_core_limit": architecture.threads,
            "core_count": gpu.cores,
            "fpus_per_core": architecture.fpus,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "memory_bandwidth": gpu.bandwidth,
            "l2_cache_size": gpu.l2_mib * 2**20,
            "clock_rate_ghz": gpu.clock_ghz,
            "device_memory_size": gpu.memory_bytes,
            "device_address_bits": 64,
            "device_vendor": '"NVIDIA Corporation"',
            "name": f'"{self.name}"',
            "driver_version": cuda,
            "runtime_version": cuda,
            "compile_time_toolkit_version": cuda,
        }
        lines = ["gpu_device_info {"]
        lines += [f"  {name}: {fact}" for name, fact in facts.items()]
        extension = architecture.feature_extension
        lines += [
            f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info {{ major: {} minor: {} patch: {} }}".format(*self.cudnn),
            f'device_description_str: "{self.name}"',
        ]
        return "\n".join(lines) + "\n"

    @property
    def platform(self) -> str:
        """Return JAX's name of the platform to lower programs for."""
        return "cuda"

    @property
    def is_slice(self) -> bool:
        """Return whether the target has several devices: no, because a topology names a cluster of GPUs."""
        return False

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Return the options for a GPU that is not attached, on which XLA cannot time kernels.

        Products go to cuBLAS. XLA compiles one candidate for each product and convolution, because it cannot compare
        several.
        """
        return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}

    def compile(self, lowered: Any) -> Any:
        """Compile a lowered program."""
        return lowered.compile(compiler_options=dict(self.compiler_options))

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which programs are traced, lowered and compiled."""
        return with_cudnn(self.cudnn)

    def devices(self, topology: str | None = None) -> list[Any]:
        """Return the devices of a cluster of equal GPUs.

        Args:
          topology: slices × hosts × GPUs per host, such as ``"1x2x4"``. ``"2 hosts x 4"`` means the same. The
            default is one GPU.

        Raises:
          ModuleNotFoundError: the packages that compile for a GPU are missing.
          ValueError: ``topology`` is not a topology.
        """
        parsed = check_topology(topology or "1x1x1")
        if reason := missing():
            raise ModuleNotFoundError(reason)
        return list(_described(self.text(), parsed).devices)

    def mesh(self, mesh: Any, topology: str | None = None) -> Mesh:
        """Return a mesh of these GPUs with the axes of ``mesh``.

        Args:
          mesh: a mesh, which may be abstract.
          topology: the topology of the cluster; None for one host with all GPUs.

        Raises:
          ValueError: the topology and the mesh have different numbers of GPUs.
        """
        devices = self.devices(topology or f"1x1x{mesh.size}")
        if len(devices) != mesh.size:
            axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
            raise ValueError(
                f"the topology must have as many GPUs as the mesh, got {topology!r} with {len(devices)} and a mesh "
                f"with {mesh.size} ({axes}); change one of them"
            )
        return Mesh(np.array(devices).reshape(tuple(mesh.shape.values())), mesh.axis_names, axis_types=mesh.axis_types)


TARGETS = {name: GpuTarget(gpu) for name, gpu in GPUS.items() if gpu.capability >= CUDA_SINCE}
"""The GPUs for which XLA compiles, by short name."""


def target_of_gpu(gpu: Gpu, name: str) -> GpuTarget:
    """Return the target for a GPU; ``name`` is the user's name of it, for the error.

    Raises:
      ValueError: CUDA no longer compiles for the GPU.
    """
    if gpu.capability < CUDA_SINCE:
        since = "{}.{}".format(*CUDA_SINCE)
        raise ValueError(
            f"CUDA 13 compiles for compute capability {since} or later, got {name!r} with {gpu.compute_capability}; "
            "name a newer GPU, such as 't4'"
        )
    return GpuTarget(gpu)


def missing() -> str | None:
    """Return why this machine cannot compile for a GPU; None if it can.

    The text includes the remedy. Call this function before compiling, because XLA ends the process if the assembler
    ``ptxas`` is missing.
    """
    if not any(importlib.util.find_spec(name) for name in PLUGINS):
        return f"to compile for a GPU, JAX needs its CUDA plugin, which is not installed: {INSTALL}"
    if not (_bundled("bin/ptxas") or shutil.which("ptxas") or (CUDA / "bin/ptxas").exists()):
        return f"to compile for a GPU, XLA needs the assembler ptxas of nvidia-cuda-nvcc, which is not found: {INSTALL}"
    return None


def check_topology(text: str) -> str:
    """Return a topology in the form that XLA reads.

    Raises:
      ValueError: the text is not a topology.
    """
    topology = re.sub(r"^(\d+) hosts? ?[x×] ?(\d+)$", r"1x\1x\2", text)
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology):
        raise ValueError(
            "a topology must be slices × hosts × GPUs per host, 1 or more of each ('1x2x4' for two hosts of four), got "
            f"{text!r}; write '1x1x8' for one host of eight GPUs"
        )
    return topology


def _described(description: str, topology: str) -> Any:
    """Return JAX's topology object for GPUs with a description.

    cuDNN need not be installed, because only runs need it.
    """
    options = {"platform": "cuda", "topology": topology, "target_config": description}
    before = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        with contextlib.suppress(NotImplementedError):  # raised if JAX's CUDA plugin refused to start before
            return topologies.get_topology_desc("described", **options)
        name = next(name for name in PLUGINS if importlib.util.find_spec(name))
        importlib.import_module(f"jax_plugins.xla_{name.split('_')[1]}").initialize()
        return topologies.get_topology_desc("described", **options)
    finally:
        os.environ.pop(_UNCHECKED) if before is None else os.environ.update({_UNCHECKED: before})


_UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""An environment variable. It keeps JAX's CUDA plugin from checking libraries that are needed only to run programs."""


def _bundled(path: str) -> bool:
    """Return whether one of NVIDIA's Python packages contains the file ``path``."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return any(file.exists() for folder in folders for file in folder.glob(f"*/{path}"))
