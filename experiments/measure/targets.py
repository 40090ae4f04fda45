"""A GPU that XLA compiles for without having one, and what stands on it: shapes instead of arrays.

XLA's compiler reads a GPU from a description (the text form of its message ``GpuTargetConfigProto``; XLA's own are in
xla/backends/gpu/target_config/specs). What is compiled so has the optimised program and its memory: all but time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from experiments.models import attention

INSTALL = "pip install -e '.[experiments,compile-only]'"
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
CUDA = Path("/usr/local/cuda")
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Products go to cuBLAS: to choose among Triton's kernels, XLA would have to time them on the GPU."""
CUDNN = (9, 19, 0)
"""The version that the programs are to run with."""
NAME, MEMORY_BYTES = "NVIDIA H200 141GB HBM3e", 141 * 2**30
H200 = f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_core: {228 * 2**10}
  shared_memory_per_block_optin: {227 * 2**10}
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  memory_bandwidth: {4_800_000_000_000}
  l2_cache_size: {50 * 2**20}
  clock_rate_ghz: 1.98
  device_memory_size: {MEMORY_BYTES}
  device_address_bits: 64
  device_vendor: "NVIDIA Corporation"
  name: "{NAME}"
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
device_description_str: "{NAME}"
"""
"""NVIDIA's data sheet, and what CUDA reports of the chip."""


def missing() -> str | None:
    """What keeps this machine from compiling for a GPU, and the remedy; None if nothing does.

    Checked beforehand, because without its assembler XLA ends the process.
    """
    if not any(importlib.util.find_spec(name) for name in PLUGINS):
        return f"to compile for a GPU, JAX needs its CUDA plugin, which is not installed: {INSTALL}"
    if not (_bundled("bin/ptxas") or shutil.which("ptxas") or (CUDA / "bin/ptxas").exists()):
        return f"to compile for a GPU, XLA needs the assembler ptxas of nvidia-cuda-nvcc, which is not found: {INSTALL}"
    return None


def device_of(description: str) -> Any:
    """The device that a description describes.

    Raises:
      ValueError: packages that compile are missing, or XLA can't read the description.
    """
    if reason := missing():
        raise ValueError(reason)
    try:
        topology = topologies.get_topology_desc(
            "described", platform="cuda", topology="1x1x1", target_config=description
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            "a description of a GPU must be the text form of XLA's GpuTargetConfigProto, as in XLA's "
            f"xla/backends/gpu/target_config/specs, which this one is not: {str(error).splitlines()[0]}"
        ) from None
    return topology.devices[0]


def on(device: Any, tree: Any) -> Any:
    """The ShapeDtypeStructs of a pytree of arrays or ShapeDtypeStructs, placed on ``device``."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def lower(step: Any, device: Any, state: Any, batch: Any) -> Any:
    """A train step lowered for ``device``, its state donated, its half attention cuDNN's."""
    with attention.implementation("cudnn"), with_cudnn():
        traced = jax.jit(step, donate_argnums=0).trace(on(device, state), on(device, batch))
        return traced.lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def with_cudnn(version: tuple[int, int, int] = CUDNN) -> Iterator[None]:
    """Within it JAX takes this version of cuDNN for the installed one.

    JAX asks the library when it traces a fused attention, and the library is not needed to compile one.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused  # may move

    original = fused.check_cudnn_version
    major, minor, patch = version
    fused.check_cudnn_version = lambda: 10_000 * major + 100 * minor + patch
    try:
        yield
    finally:
        fused.check_cudnn_version = original


def _bundled(path: str) -> bool:
    """Whether one of NVIDIA's Python packages brings a file."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return any(file.exists() for folder in folders for file in folder.glob(f"*/{path}"))
