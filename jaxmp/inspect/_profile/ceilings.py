"""Measure the fastest product and the fastest copy of the attached device."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

_WIDTHS = {"gpu": 8192, "cpu": 512}
"""The width of the square matrices that are multiplied, by backend."""
_COPIED_BYTES = 2**29
"""The bytes of the copied array: larger than the caches of all GPUs."""
_CALLS = {"gpu": 10, "cpu": 1}
"""The calls in a row that are timed together, so that the host's part of a call does not count."""
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The fastest speeds measured on a device.

    Attributes:
      flops: the FLOP/s of a large matrix product, by dtype.
      bandwidth: the bytes per second that a copy reads and writes; None if the device has no memory left for a copy,
        and for a CPU, whose caches hold the arrays of most kernels.
    """

    flops: dict[str, float]
    bandwidth: float | None

    def share(self, milliseconds: float, dtype: str, flops: int, moved: int | None) -> float | None:
        """Return the speed of a kernel relative to the ceilings.

        The result is the time that the kernel would take at the ceilings, divided by ``milliseconds``. Its products and
        its bytes have one ceiling each, and the slower one counts.
        """
        seconds = []
        if flops and dtype in self.flops:
            seconds.append(flops / self.flops[dtype])
        if moved is not None and self.bandwidth is not None:
            seconds.append(moved / self.bandwidth)
        return 1e3 * max(seconds) / milliseconds if seconds and milliseconds else None


def measure_ceilings(dtypes: Iterable[str]) -> Ceilings:
    """Measure the products of ``dtypes`` and a copy, once for each device and process.

    A product or copy for which the device has no memory left has no ceiling. Neither has a product of 8 bits, whose
    speed depends on how its operands are scaled, nor a product of split operands, such as ``"bf16x3"``.
    """
    device = jax.local_devices()[0]
    flops = {}
    for dtype in dtypes:
        speed = _product_speed(device, dtype)
        if speed is not None:
            flops[dtype] = speed
    return Ceilings(flops, None if device.platform == "cpu" else _copy_speed(device))


@functools.lru_cache
def _product_speed(device: jax.Device, dtype: str) -> float | None:
    if re.fullmatch(r"\w+x\d", dtype):
        return None
    stored = jnp.dtype("float32" if dtype == "tensorfloat32" else dtype)
    if not jnp.issubdtype(stored, jnp.floating) or stored.itemsize not in (2, 4):
        return None
    width = _WIDTHS.get(device.platform, 2048)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=precision, preferred_element_type=stored)

    def make_operands() -> list[jax.Array]:
        # A product of zeros would be faster, because it draws less power.
        keys = jax.random.split(jax.random.key(0))
        return [jax.random.normal(key, (width, width), jnp.float32).astype(stored) for key in keys]

    seconds = _seconds(device, multiply, make_operands)
    return None if seconds is None else 2 * width**3 / seconds


@functools.lru_cache
def _copy_speed(device: jax.Device) -> float | None:
    def make_operands() -> list[jax.Array]:
        return [jnp.ones(_COPIED_BYTES // 4, jnp.float32)]

    seconds = _seconds(device, jnp.copy, make_operands)
    return None if seconds is None else 2 * _COPIED_BYTES / seconds


def _seconds(device: jax.Device, fun: Callable[..., jax.Array], make_operands: Callable[[], list[Any]]) -> float | None:
    """Return the shortest time of a call; None if the device cannot run it."""
    times = []
    try:
        with jax.default_device(device):
            operands = jax.jit(make_operands)()
            compiled = jax.jit(fun).lower(*operands).compile()
            jax.block_until_ready(compiled(*operands))
            calls = _CALLS.get(device.platform, 1)
            for _ in range(_ROUNDS):
                started = time.perf_counter()
                for _ in range(calls):
                    result = compiled(*operands)
                jax.block_until_ready(result)
                times.append((time.perf_counter() - started) / calls)
    except jax.errors.JaxRuntimeError:  # no memory is left, or the device lacks such products
        return None
    return min(times)
