"""The share of a step's kernel time on tensor cores, by kernel names in a trace."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

# Kernels without tensor cores. Names in the first two lines may look like names of products. They belong to fusions,
# which XLA and Inductor name after their operations, and to helpers that lay out, convert or sum operands. The last
# line has float32 products without tensor cores.
_PLAIN = re.compile(
    r"^(loop|input|wrapped|fusion|reduce|copy|scatter|select|triton_(poi|red|per|softmax))_"
    r"|convert|transpose|layout|nhwctonchw|nchwtonhwc|dot_do_o|splitk_?reduce|layer_?norm|softmax"
    r"|sgemm|scudnn|simt|gemv|gemmk1|gemmsn|f32f32_f32f32|depthwise",
    re.IGNORECASE,
)
# NVIDIA's names of tensor-core instructions, dtypes, and libraries built on them.
_SAYS_SO = re.compile(r"nvjet|[hgiq]mma|wmma|wgmma|tensorop|16816|1688|s?884|tf32|bf16|f16|e4m3|e5m2", re.IGNORECASE)
_PRODUCT = re.compile(
    r"nvjet|gemm|cutlass|xmma|matmul|triton_tem|flash|fmha|sdpa|mha|conv|fprop|dgrad|wgrad", re.IGNORECASE
)


def uses_tensor_cores(kernel: str, precision: str = "half") -> bool:
    """Return whether a kernel multiplies on tensor cores, judged by its name.

    With precision ``"fp32"``, only a kernel whose name mentions tensor cores counts.

    >>> [uses_tensor_cores(name) for name in ("nvjet_hsh_128x256_64x4_TNT", "ampere_sgemm_128x64_nn", "loop_add")]
    [True, False, False]
    """
    if _PLAIN.search(kernel):
        return False
    says_so = precision != "fp32" or _SAYS_SO.search(kernel) is not None
    return _PRODUCT.search(kernel) is not None and says_so


def tensor_core_share(kernels: Mapping[str, float], precision: str = "half") -> float | None:
    """Return the share of kernel time in tensor-core kernels.

    The result is None without kernels, as on a CPU.
    """
    total = sum(kernels.values())
    return sum(t for name, t in kernels.items() if uses_tensor_cores(name, precision)) / total if total else None


def of_jax(run: Callable[[], Any], calls: int = 3) -> dict[str, float]:
    """Return the milliseconds per call of each kernel.

    The result is empty without a GPU. ``run`` must return JAX arrays.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                result = run()
            jax.block_until_ready(result)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return {name: t / calls for name, t in kernels_of(jax.profiler.ProfileData.from_file(str(file))).items()}


def kernels_of(data: Any) -> dict[str, float]:
    """Return the milliseconds of each kernel in a trace of JAX's profiler.

    The times come from the streams of the GPUs in the trace.
    """
    times: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith(
                "Stream"
            ):  # the other lines repeat the same times by module, operation and source line
                for event in line.events:
                    times[event.name] += event.duration_ns / 1e6
    return dict(times)


def of_torch(run: Callable[[], Any], calls: int = 3) -> dict[str, float]:
    """Return the milliseconds per call of each kernel of a torch function.

    The result is empty without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1000 / calls for event in profile.key_averages()}
    return {name: milliseconds for name, milliseconds in times.items() if milliseconds}
