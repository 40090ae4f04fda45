"""Find the dtypes that are fast on a device, and the policy to use there."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax

from jaxmp.base.accelerators import BY_DEVICE_KIND, accelerator_named
from jaxmp.base.cache_keys import assumed_hardware
from jaxmp.base.gpus import GPUS
from jaxmp.base.tpus import TPUS

__all__ = ["GPUS", "TPUS", "Hardware", "align_dim", "assumed", "detect", "recommended_policy"]

# Tensor cores by compute capability, from the CUDA programming guide and the architecture whitepapers (Volta, Turing,
# Ampere, Ada, Hopper, Blackwell). mxfp8 is float8 with one scale per block of 32 numbers (an OCP microscaling format).
_SINCE = (
    ((7, 0), ("float16",)),
    ((7, 2), ("int8",)),
    ((8, 0), ("bfloat16", "tensorfloat32")),
    ((8, 9), ("float8_e4m3fn", "float8_e5m2")),
    ((10, 0), ("mxfp8", "float4_e2m1fn")),
)
# GPUs with Turing chips (TU116, TU117) that report compute capability 7.5, but have no tensor cores
_TURING_WITHOUT = re.compile(r"\bGTX 16\d\d|\bMX[45]\d0\b|\bT(4|5|6|10|12|20)00\b|\bT550\b")


_SPLIT = {
    "bf16x3": ("bfloat16", 3),
    "bf16x6": ("bfloat16", 6),
    "bf16x9": ("bfloat16", 9),
    "tf32x3": ("tensorfloat32", 3),
}
"""Algorithms that split float32 operands, with the dtype of the parts and the number of products of parts."""
_PASSES = 6
"""The products in bfloat16 that compute a product of float32 operands on a TPU."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The precision-related properties of a device.

    Attributes:
      name: the device kind, as JAX reports it.
      platform: ``"gpu"``, ``"tpu"``, ``"cpu"`` or another backend's name.
      compute_capability: NVIDIA's compute capability (``"9.0"``), or another backend's equivalent (``"gfx942"``), or
        None.
      tensor_cores: the dtypes in which tensor cores compute products; on a TPU, those of the matrix unit.
        ``"tensorfloat32"`` means float32 products at reduced precision, and ``"mxfp8"`` means block-scaled float8.
      peak_tflops: the vendor's peak TFLOP/s of dense products by dtype; empty if unknown. jaxmp does not measure these
        rates.
      peak_bandwidth: the bytes per second of the device's memory; None if unknown.
      memory_bytes: the bytes of the device's memory; None if unknown, as on a CPU.
      recommended_policy: a name that :func:`jaxmp.get_policy` reads.
      reason: the reason for the recommended policy, in one sentence.
      core_memory_bytes: the bytes of vector memory in a core of a TPU; None for other devices, and if unknown.
    """

    name: str
    platform: str
    compute_capability: str | None
    tensor_cores: tuple[str, ...]
    peak_tflops: dict[str, float] = dataclasses.field(hash=False)
    peak_bandwidth: float | None
    memory_bytes: int | None
    recommended_policy: str
    reason: str
    core_memory_bytes: int | None = None

    def product_rate(self, dtype: str) -> float | None:
        """Return the peak TFLOP/s of products of a dtype; None if it is unknown.

        ``dtype`` may also be the name of an algorithm that computes a product of float32 operands as several products
        of bfloat16 or TensorFloat-32 parts: ``"bf16x3"``, ``"bf16x6"``, ``"bf16x9"`` or ``"tf32x3"``. On a TPU, a
        float32 product is six products in bfloat16. Other dtypes without a rate of their own are no faster than
        bfloat16 there.
        """
        rates = self.peak_tflops
        if dtype in _SPLIT:
            part, products = _SPLIT[dtype]
            return rates[part] / products if part in rates else None
        if self.platform != "tpu" or dtype in rates or "bfloat16" not in rates:
            return rates.get(dtype)
        return rates["bfloat16"] / (_PASSES if dtype == "float32" else 1)


def detect(device: Any = None) -> Hardware:
    """Return the fast dtypes of ``device`` and the policy to train with on it.

    ``device`` is a JAX device, or the name of a GPU in :data:`GPUS` or a TPU in :data:`TPUS`, such as ``"h200"``,
    ``"RTX 4090"`` or ``"v5e"``. The default is the first local device. Inside the context :func:`assumed`, the default
    is the device of that context. For a JAX device that jaxmp does not know, the policy is float32, which works
    everywhere.

    Raises:
      RuntimeError: you pass no device, and JAX's backend cannot start.
      ValueError: the name is unknown.

    >>> jaxmp.hardware.detect(jax.devices("cpu")[0]).recommended_policy
    'float32'
    """
    device = assumed_hardware.value if device is None else device
    if device is None:
        device = jax.local_devices()[0]
    elif isinstance(device, str):
        device = accelerator_named(device)
    name, platform = str(device.device_kind), str(device.platform)
    capability = getattr(device, "compute_capability", None)
    cores = _tensor_cores(name, platform, capability)
    policy, reason = _recommend(name, platform, capability, cores)
    tflops, bandwidth = _peaks(name, cores)
    return Hardware(
        name=name,
        platform=platform,
        compute_capability=None if capability is None else str(capability),
        tensor_cores=cores,
        peak_tflops=tflops,
        peak_bandwidth=bandwidth,
        memory_bytes=_memory(name, device),
        recommended_policy=policy,
        reason=reason,
        core_memory_bytes=getattr(BY_DEVICE_KIND.get(name), "core_memory_bytes", None),
    )


@contextlib.contextmanager
def assumed(name: str) -> Iterator[None]:
    """Trace the programs in this context for a GPU or TPU that need not be attached.

    The context is needed because float8 products and the update of a train step are traced differently for different
    devices. The tools of :mod:`jaxmp.inspect` enter the context if you pass a ``device``.

    Raises:
      ValueError: the name is unknown.

    >>> with jaxmp.hardware.assumed("h200"):
    ...     jaxmp.hardware.recommended_policy()
    'mixed_bfloat16'
    """
    accelerator_named(name)
    with assumed_hardware(name):
        yield


def recommended_policy(device: Any = None) -> str:
    """Return the name of the policy to train with on ``device``; see :func:`detect`.

    >>> jaxmp.hardware.recommended_policy(jax.devices("cpu")[0])
    'float32'
    """
    return detect(device).recommended_policy


def align_dim(n: int, divisor: int = 8) -> int:
    """Round ``n`` up to a multiple of ``divisor``, so that tensor cores are fast.

    Use a divisor of 8 for 16-bit operands and 16 for 8-bit ones. A divisor of 64 is most efficient on an A100 and later
    (NVIDIA, "Matrix Multiplication Background User's Guide").

    >>> jaxmp.hardware.align_dim(50257)
    50264
    >>> jaxmp.hardware.align_dim(50257, 64)
    50304
    """
    return -(-n // divisor) * divisor


def _parse_capability(capability: Any) -> tuple[int, int] | None:
    """Return NVIDIA's compute capability as a pair of integers.

    Return None for the values of other backends, such as ``"gfx942"`` or None.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)[a-z]?", str(capability))
    return (int(match[1]), int(match[2])) if match else None


def _tensor_cores(name: str, platform: str, capability: Any) -> tuple[str, ...]:
    if platform == "tpu":
        return tuple(BY_DEVICE_KIND[name].tflops) if name in BY_DEVICE_KIND else ("bfloat16",)
    version = _parse_capability(capability)
    if version is None or _TURING_WITHOUT.search(name):
        return ()
    return tuple(dtype for since, dtypes in _SINCE if version >= since for dtype in dtypes)


def _peaks(name: str, cores: tuple[str, ...]) -> tuple[dict[str, float], float | None]:
    if name not in BY_DEVICE_KIND:
        return {}, None
    known = BY_DEVICE_KIND[name]
    rates = {dtype: rate for dtype, rate in known.tflops.items() if dtype == "float32" or dtype in cores}
    return rates, float(known.bandwidth)


def _memory(name: str, device: Any) -> int | None:
    """Return the bytes of a device's memory.

    The number does not depend on what is allocated, nor on whether a known device is attached.
    """
    if name in BY_DEVICE_KIND:
        return BY_DEVICE_KIND[name].memory_bytes
    if device.platform == "cpu":
        return None
    try:
        statistics = device.memory_stats() or {}
    except (AttributeError, RuntimeError):  # the device of another process, or one that is only described
        return None
    limit: int | None = statistics.get("bytes_limit")
    return limit


def _recommend(name: str, platform: str, capability: Any, cores: tuple[str, ...]) -> tuple[str, str]:
    if platform == "cpu":
        return "float32", "a CPU computes half precision more slowly than float32"
    if platform == "tpu" or "bfloat16" in cores:
        unit = "the matrix unit multiplies" if platform == "tpu" else "tensor cores multiply"
        return "mixed_bfloat16", f"{unit} bfloat16, which has float32's range: no loss scale is needed"
    if "float16" in cores:
        return "mixed_float16", (
            "tensor cores multiply float16 and not bfloat16; without a loss scale small gradients vanish in float16, "
            "so write jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())"
        )
    if _parse_capability(capability) is not None:
        return "float32", f"{name} has no tensor cores: half precision would save memory, but no time"
    return "float32", (
        f"jaxmp does not know which dtypes are fast on {name}; float32 works on every device. If the vendor says "
        "that bfloat16 is fast, measure mixed_bfloat16"
    )
