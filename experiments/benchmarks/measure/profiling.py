"""The kernels of a step in a trace: their time by group, and the share on tensor cores."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmp.base.tables import grouped, without_numbers
from jaxmp.inspect._profile import kernel_rows, trace
from jaxmp.inspect._profile.trace import Event

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


def tensor_core_share(kernels: Kernels, precision: str = "half") -> float | None:
    """Return the share of kernel time in tensor-core kernels.

    The result is None without kernels, as on a CPU.
    """
    total = sum(kernel.ms for kernel in kernels.values())
    on_tensor_cores = sum(kernel.ms for name, kernel in kernels.items() if uses_tensor_cores(name, precision))
    return on_tensor_cores / total if total else None


class Kernel(NamedTuple):
    """The milliseconds of a kernel per call of the profiled function, and how often it ran per call."""

    ms: float
    count: float


Kernels = dict[str, Kernel]
"""Kernels by their names."""


def of_jax(run: Callable[[], Any], calls: int = 3) -> list[Event]:
    """Return the executions of kernels in ``calls`` calls of ``run``, which must return JAX arrays."""

    def run_calls() -> None:
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)

    return trace.traced(run_calls)


def by_name(events: Sequence[Event], calls: int = 3) -> Kernels:
    """Return the kernels of ``calls`` calls."""
    times: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        times[event.kernel].append(event.milliseconds / calls)
    return {name: Kernel(sum(durations), len(durations) / calls) for name, durations in times.items()}


def by_module(events: Sequence[Event], program: str, calls: int = 3, longest: int = 60) -> dict[str, Any]:
    """Return the milliseconds of a call by kind of work, and by module.

    Args:
      events: the executions of kernels in ``calls`` calls.
      program: the HLO text of the program.
      calls: the number of calls.
      longest: the number of modules to return.

    Returns:
      ``kinds``: the milliseconds by kind, as in :func:`jaxmp.inspect.profile`. ``modules``: the rows of the longest
      modules, with one row for equal layers.
    """
    rows = kernel_rows.rows_of(events, calls, program)
    kinds: collections.Counter[str] = collections.Counter()
    for row in rows:
        kinds[row.kind] += row.milliseconds
    modules = []
    for group in grouped(rows, lambda row: (row.kind, without_numbers(row.path), row.phase)):
        modules.append(
            {
                "kind": group[0].kind,
                "path": without_numbers(group[0].path),
                "phase": group[0].phase,
                "ms": sum(row.milliseconds for row in group),
                "calls": sum(row.calls for row in group),
                "flops": sum(row.flops for row in group),
                "bytes": sum(row.bytes or 0 for row in group),
            }
        )
    modules.sort(key=lambda module: -module["ms"])
    return {"kinds": dict(kinds.most_common()), "modules": modules[:longest]}


def of_torch(run: Callable[[], Any], calls: int = 3) -> Kernels:
    """Return the kernels of a call of a torch function.

    The result is empty without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    return {
        event.key: Kernel(event.self_device_time_total / 1000 / calls, event.count / calls)
        for event in profile.key_averages()
        if event.self_device_time_total
    }


GROUPS = (
    "products", "attention", "convolutions", "reductions", "elementwise", "copies and layout", "optimizer", "other",
)  # fmt: skip
"""The kinds of kernels that their names tell apart, for XLA and for torch."""
_FUSION = r"^(loop|input|wrapped)_"
_MOVES = r"(copy|transpose|concatenate|dynamic|update|slice|pad|broadcast|reverse|bitcast)"
# The first pattern that a name has decides. The names of XLA's and Inductor's fusions may have words of libraries.
_PATTERNS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("attention", r"sdpa|fmha|flash|attention"),
        ("optimizer", r"multi_tensor_apply|adam"),
        ("elementwise", r"^triton_(poi|for)_"),
        ("reductions", r"^triton_(red|per)_"),
        ("products", r"^triton_tem_|gemm_fusion"),
        ("reductions", rf"{_FUSION}\w*reduce(?!_(window|precision))"),
        ("copies and layout", rf"{_FUSION}({_MOVES}_)*{_MOVES}(_fusion)?(_\d+)?$"),
        ("other", rf"{_FUSION}\w*scatter"),
        ("elementwise", _FUSION),
        ("copies and layout", r"memcpy|memset|^(copy|transpose)|nhwctonchw|nchwtonhwc|catarray|copy_kernel"),
        ("convolutions", r"fprop|dgrad|wgrad|conv(?!ert)|winograd"),
        ("products", r"nvjet|gemm|gemv|cutlass|xmma|matmul|cublas|splitk"),
        ("reductions", r"reduce|norm|softmax|bn_(fw|bw)"),
        ("elementwise", r"elementwise|vectorized|pointwise|fill"),
    )
)


def group_of(kernel: str) -> str:
    """Return the kind of a kernel in ``GROUPS``, judged by its name.

    XLA names a fusion after its last operations, so a step of the optimizer in XLA counts as elementwise.

    >>> [group_of(name) for name in ("nvjet_tst_256x128", "triton_poi_fused_convolution_relu_3", "input_reduce_fusion")]
    ['products', 'elementwise', 'reductions']
    """
    return next((kind for kind, pattern in _PATTERNS if pattern.search(kernel)), "other")


def summary(kernels: Kernels, longest: int = 40) -> dict[str, Any]:
    """Return what results keep of a profile.

    Returns:
      ``kernel_ms`` and ``kernel_count``: the sums over all kernels. ``groups``: ``ms`` and ``count`` by kind.
      ``kernels``: the name, milliseconds and count of the longest kernels. The result is empty without kernels.
    """
    if not kernels:
        return {}
    groups: dict[str, dict[str, float]] = {}
    for name, kernel in kernels.items():
        group = groups.setdefault(group_of(name), {"ms": 0.0, "count": 0.0})
        group["ms"] += kernel.ms
        group["count"] += kernel.count
    by_time = sorted(kernels.items(), key=lambda item: item[1].ms, reverse=True)
    return {
        "kernel_ms": sum(kernel.ms for kernel in kernels.values()),
        "kernel_count": sum(kernel.count for kernel in kernels.values()),
        "groups": {kind: groups[kind] for kind in GROUPS if kind in groups},
        "kernels": [[name, *kernel] for name, kernel in by_time[:longest]],
    }
