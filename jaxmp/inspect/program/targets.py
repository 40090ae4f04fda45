"""GPUs that XLA compiles for without having one, and what stands on them: shapes instead of arrays.

XLA's compiler reads a GPU from a description (the text form of its message ``GpuTargetConfigProto``; XLA's own are in
xla/backends/gpu/target_config/specs). Here they are made of the chip's figures. What is compiled so has the optimised
program and its memory, and everything but time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding, use_abstract_mesh

from jaxmp._internals.jax.patches import with_cudnn as with_cudnn
from jaxmp._internals.jax.program import is_array
from jaxmp._internals.jax.traces import static_arguments
from jaxmp.base import hardware
from jaxmp.inspect.program.calls import named
from jaxmp.nnx.training import TrainStep as NNXStep
from jaxmp.nnx.training import state_of
from jaxmp.training.step import TrainStep

INSTALL = "pip install -e '.[experiments,compile-only]'"
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
CUDA = Path("/usr/local/cuda")
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Products go to cuBLAS: to choose among Triton's kernels, XLA would have to time them on the GPU."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU's figures, from NVIDIA's data sheets and what CUDA reports of the chip.

    Attributes:
      name: as CUDA reports it.
      capability: compute capability, major and minor.
      feature_extension: of the capability: ``"ACCELERATED_FEATURES"`` is sm_90a and the like.
      cores: streaming multiprocessors.
      fpus: float32 lanes of each.
      clock_ghz: of the multiprocessors.
      memory_bytes: of the device.
      bandwidth: bytes a second between it and the chip.
      l2_bytes: the cache between them.
      shared_bytes: shared memory of a multiprocessor.
      threads: that a multiprocessor holds.
      cudnn: version of the library that the programs are to run with.
      cuda: likewise, of CUDA; XLA makes no float8 product where it is not told.
    """

    name: str
    capability: tuple[int, int]
    feature_extension: str
    cores: int
    fpus: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    shared_bytes: int
    threads: int = 2048
    cudnn: tuple[int, int, int] = (9, 19, 0)
    cuda: tuple[int, int, int] = (13, 0, 0)

    def text(self) -> str:
        """The description for XLA."""
        major, minor = self.capability
        cudnn = "major: {} minor: {} patch: {}".format(*self.cudnn)
        facts: dict[str, object] = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_bytes,
            "shared_memory_per_block_optin": self.shared_bytes - 1024,
            "threads_per_core_limit": self.threads,
            "core_count": self.cores,
            "fpus_per_core": self.fpus,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "device_address_bits": 64,
            "device_vendor": '"NVIDIA Corporation"',
            "name": f'"{self.name}"',
            **dict.fromkeys(
                ("driver_version", "runtime_version", "compile_time_toolkit_version"), '"{}.{}.{}"'.format(*self.cuda)
            ),
        }
        lines = [f"  {key}: {value}" for key, value in facts.items()]
        lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} "
                     f"feature_extension: {self.feature_extension} }}")  # fmt: skip
        return "\n".join([
            "gpu_device_info {", *lines, "}",
            'platform_name: "CUDA"', f"dnn_version_info {{ {cudnn} }}", f'device_description_str: "{self.name}"', "",
        ])  # fmt: skip


TARGETS = {
    "h200": Target(
        "NVIDIA H200 141GB HBM3e", (9, 0), "ACCELERATED_FEATURES", cores=132, fpus=128, clock_ghz=1.98,
        memory_bytes=141 * 2**30, bandwidth=4_800_000_000_000, l2_bytes=50 * 2**20, shared_bytes=228 * 1024,
    ),
    "h100": Target(
        "NVIDIA H100 80GB HBM3", (9, 0), "ACCELERATED_FEATURES", cores=132, fpus=128, clock_ghz=1.98,
        memory_bytes=79 * 2**30, bandwidth=3_352_320_000_000, l2_bytes=50 * 2**20, shared_bytes=228 * 1024,
    ),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), "NONE", cores=108, fpus=64, clock_ghz=1.41,
        memory_bytes=79 * 2**30, bandwidth=2_039_040_000_000, l2_bytes=40 * 2**20, shared_bytes=164 * 1024,
    ),
    "b200": Target(
        "NVIDIA B200", (10, 0), "ACCELERATED_FEATURES", cores=148, fpus=128, clock_ghz=1.965,
        memory_bytes=179 * 2**30, bandwidth=7_700_000_000_000, l2_bytes=126 * 2**20, shared_bytes=228 * 1024,
    ),
    "l4": Target(
        "NVIDIA L4", (8, 9), "NONE", cores=58, fpus=128, clock_ghz=2.04,
        memory_bytes=22 * 2**30, bandwidth=300_000_000_000, l2_bytes=48 * 2**20, shared_bytes=100 * 1024,
        threads=1536,
    ),
    "t4": Target(
        "Tesla T4", (7, 5), "NONE", cores=40, fpus=64, clock_ghz=1.59,
        memory_bytes=15 * 2**30, bandwidth=320_000_000_000, l2_bytes=4 * 2**20, shared_bytes=64 * 1024,
        threads=1024,
    ),
}  # fmt: skip
"""The GPUs that there are figures of, by name."""


def choice() -> str:
    """How a GPU that is not there is named, for an error."""
    return f"device={', '.join(map(repr, TARGETS))}; of a command that is --device {next(iter(TARGETS))}, say"


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
    """The device that a description describes; errors are those of :func:`devices_of`."""
    return devices_of(description)[0]


def devices_of(description: str, topology: str = "1x1x1") -> list[Any]:
    """The devices of a cluster of GPUs of one description.

    Args:
      description: of one GPU.
      topology: slices × hosts × GPUs of each host: ``"1x2x4"``, or ``"2 hosts x 4"``.

    Raises:
      ModuleNotFoundError: packages that compile are missing.
      ValueError: the topology is none.
    """
    topology = _topology(topology)
    if reason := missing():
        raise ModuleNotFoundError(reason)
    return list(_described(description, topology).devices)


def _topology(text: str) -> str:
    """A topology as XLA reads it; a ValueError if it is none."""
    topology = re.sub(r"^(\d+) hosts? ?[x×] ?(\d+)$", r"1x\1x\2", text)
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology):
        raise ValueError(
            "a topology is slices × hosts × GPUs of each host, 1 or more of each, '1x2x4' for two hosts of four, got "
            f"{text!r}; write '1x1x8' for one host of eight"
        )
    return topology


def _described(description: str, topology: str) -> Any:
    """What JAX makes of a description, also if its CUDA plugin misses what running, but not compiling, needs: cuDNN."""
    options = {"platform": "cuda", "topology": topology, "target_config": description}
    before = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        with contextlib.suppress(NotImplementedError):  # JAX looked for its plugins before, and this one refused
            return topologies.get_topology_desc("described", **options)
        name = next(name for name in PLUGINS if importlib.util.find_spec(name))
        importlib.import_module(f"jax_plugins.xla_{name.split('_')[1]}").initialize()
        return topologies.get_topology_desc("described", **options)
    finally:
        os.environ.pop(_UNCHECKED) if before is None else os.environ.update({_UNCHECKED: before})


_UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""The variable with which JAX's CUDA plugin does not ask whether there is all that running a program needs."""


def on(device: Any, tree: Any) -> Any:
    """The ShapeDtypeStructs of a pytree of arrays or ShapeDtypeStructs, placed on ``device``; numbers stay."""
    sharding = SingleDeviceSharding(device)

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=_is_weak(leaf))

    return jax.tree.map(placed, tree)


def on_mesh(target: Target, tree: Any, topology: str | None = None) -> Any:
    """The ShapeDtypeStructs of a pytree whose leaves lie on a mesh, on one of the same axes of GPUs not there.

    Args:
      target: the GPU.
      tree: arrays or ShapeDtypeStructs with a ``NamedSharding``, whose mesh may be abstract; others lie whole on each.
      topology: of the cluster; None for one host with all of them.

    Raises:
      ValueError: the topology has another number of GPUs than the mesh.
    """
    mesh = mesh_of(tree)
    devices = devices_of(target.text(), topology or f"1x1x{mesh.size}")
    if len(devices) != mesh.size:
        raise ValueError(
            f"the topology must have the GPUs of the mesh, got {topology!r} of {len(devices)} and a mesh of "
            f"{mesh.size} ({', '.join(f'{name}={size}' for name, size in mesh.shape.items())}); make one fit the other"
        )
    own = Mesh(np.array(devices).reshape(tuple(mesh.shape.values())), mesh.axis_names, axis_types=mesh.axis_types)

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(own, spec), weak_type=_is_weak(leaf))

    return jax.tree.map(placed, tree)


def mesh_of(tree: Any) -> Any:
    """The mesh on which a leaf lies; None if there is none."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)


def within_mesh_of(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it the mesh on which a leaf lies, if one does, is the one that is set."""
    mesh = mesh_of(tree)
    return contextlib.nullcontext() if mesh is None else use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))


def target_of(name: str) -> Target:
    """The GPU of that name.

    Raises:
      ValueError: there are no figures of it.

    >>> target_of("h200").capability
    (9, 0)
    """
    hardware.gpu_named(name)
    return TARGETS[name]


def call_of(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """What is compiled when ``fun`` is called: a function with ``trace``, and the arrays or shapes that it takes.

    What is no array among the arguments of a function that is not jitted stays the Python value that it is, and so does
    a static argument of one that is. Modules of NNX that such a function is given name their calls.
    """
    if isinstance(fun, NNXStep):
        fun, args = fun.of_trees, (state_of(*args[:2]), *args[2:])
    if isinstance(fun, TrainStep):  # whose program goes by where the state lies
        is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
        return fun, tuple(args if is_of_shapes else fun.placed(*args))
    if hasattr(fun, "trace"):
        static = {n % len(args): args[n] for n in static_arguments(fun) if -len(args) <= n < len(args)}
        arrays = tuple(None if n in static else arg for n, arg in enumerate(args))
        return (_Given(fun, static) if static else fun), arrays

    @functools.wraps(fun)
    def of_arrays(*arrays: Any) -> Any:
        given = jax.tree.map(lambda leaf, array: leaf if array is None else array, tuple(args), arrays)
        return fun(*named(given))

    return jax.jit(of_arrays), jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tuple(args))


class _Given:
    """A jitted function whose static arguments are given."""

    def __init__(self, fun: Any, static: Mapping[int, Any]) -> None:
        self.fun, self.static = fun, static
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *arrays: Any) -> Any:
        return self.fun(*self._arguments(arrays))

    def trace(self, *arrays: Any) -> Any:
        return self.fun.trace(*self._arguments(arrays))

    def _arguments(self, arrays: Sequence[Any]) -> list[Any]:
        return [self.static.get(n, array) for n, array in enumerate(arrays)]


def traced(
    fun: Callable[..., Any],
    args: Sequence[Any],
    device: str | None = None,
    compiles: bool = True,
    topology: str | None = None,
) -> Any:
    """The trace of a call, for :func:`compiled_of`; without ``compiles`` nothing that compiles need be installed.

    Args:
      fun: a train step, a function, or a jitted one (``jax.jit``, ``nnx.jit``), whose donation counts.
      args: its positional arguments, arrays or shapes. Those with a ``NamedSharding`` are compiled for a mesh of the
        same axes, of the device where one is named.
      device: None for the attached one, or a name in ``TARGETS``.
      topology: of a mesh of such devices, ``"1x2x4"`` for two hosts of four; None for one host.

    Raises:
      ValueError: there are no figures of the device; the topology does not fit the mesh.
      ModuleNotFoundError: packages that compile for it are missing.
    """
    jitted, args = call_of(fun, args)
    mesh = mesh_of(args)
    if topology is not None:
        _topology(topology)
    if topology is not None and device is None:
        raise ValueError(
            f"a topology is of GPUs that are not there, got {topology!r} without their name; add {choice()}"
        )
    if topology is not None and mesh is None:
        raise ValueError(
            f"a topology needs arguments on a mesh, got {topology!r} and none with a NamedSharding; pass "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec)), say"
        )
    if device is not None and compiles:
        target = target_of(device)
        args = on(device_of(target.text()), args) if mesh is None else on_mesh(target, args, topology)
    if isinstance(jitted, TrainStep):
        jitted = jitted.program_for(args[0])
    with contextlib.ExitStack() as held:
        held.enter_context(within_mesh_of(args))
        if device is not None:
            held.enter_context(with_cudnn(target_of(device).cudnn))
            held.enter_context(hardware.assumed(device))
        return jitted.trace(*args)


def compiled_of(trace: Any, device: str | None = None) -> jax.stages.Compiled:
    """What :func:`traced` traced for a device, compiled for it."""
    if device is None:
        done = trace.lower().compile()
    else:
        with with_cudnn(target_of(device).cudnn):
            done = trace.lower(lowering_platforms=("cuda",)).compile(compiler_options=COMPILER_OPTIONS)
    inner: jax.stages.Compiled = getattr(done, "compiled", done)  # of nnx.jit
    return inner


def compiled(
    fun: Callable[..., Any], args: Sequence[Any], device: str | None = None, topology: str | None = None
) -> jax.stages.Compiled:
    """A call compiled; arguments and errors are those of :func:`traced`."""
    return compiled_of(traced(fun, args, device, topology=topology), device)


def _bundled(path: str) -> bool:
    """Whether one of NVIDIA's Python packages brings a file."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return any(file.exists() for folder in folders for file in folder.glob(f"*/{path}"))
