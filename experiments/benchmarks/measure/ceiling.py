"""Measure this device's ceilings, the highest speeds that XLA reaches on it.

The ceilings are the TFLOP/s of a large product in each dtype, and the rate of a copy. They are measured speeds, not the
peaks in a data sheet. Utilisation is relative to them. fp32 has precision "highest", and tf32 has JAX's default
precision on a GPU. The bytes of a copy are those read plus those written.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from experiments.measure import timing

Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (16384, 4096, 4096))
"""Rows, terms and columns of the products: a large cube, and a layer of a transformer of width 4096."""
SMOKE_SHAPES: tuple[Shape, ...] = ((256, 256, 256),)
COPY_BYTES, SMOKE_COPY_BYTES = 2**31, 2**22
KINDS: dict[str, tuple[Any, jax.lax.Precision]] = {
    "fp32": (jnp.float32, jax.lax.Precision.HIGHEST),
    "tf32": (jnp.float32, jax.lax.Precision.DEFAULT),
    "bf16": (jnp.bfloat16, jax.lax.Precision.DEFAULT),
    "fp16": (jnp.float16, jax.lax.Precision.DEFAULT),
}
"""The dtype of both matrices and of their product, and the precision of the product."""


def ceilings(smoke: bool) -> dict[str, Any]:
    """Measure the ceilings.

    Returns:
      ``"best"``: the highest TFLOP/s by precision, for the precisions that the device has. ``"copy"``: TB/s of a copy,
      read plus written.
    """
    rounds, block_ms = (1, 1.0) if smoke else (5, 50.0)
    tf32 = "tensorfloat32" in jaxmp.hardware.detect().tensor_cores
    best: dict[str, float] = {}
    for shape in SMOKE_SHAPES if smoke else SHAPES:
        turns: dict[str, Callable[[], Any]] = {}
        for kind in KINDS:
            if kind != "tf32" or tf32:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # out of memory
                    turns[kind] = product(kind, shape)
        # A product that fails has no ceiling, and the others are still measured.
        for kind, times in timing.interleaved(turns, rounds, block_ms, failed=lambda *_: None).items():
            best[kind] = max(best.get(kind, 0.0), 2 * math.prod(shape) / timing.quartiles(times)[1] / 1e9)
    x = jnp.zeros((SMOKE_COPY_BYTES if smoke else COPY_BYTES) // 4, jnp.float32)
    copy = functools.partial(jax.jit(lambda x: jnp.array(x, copy=True)), x)
    times = timing.interleaved({"copy": copy}, rounds, block_ms)["copy"]
    return {"best": best, "copy": 2 * x.nbytes / timing.quartiles(times)[1] / 1e9}


def product(kind: str, shape: Shape) -> Callable[[], jax.Array]:
    """Return a function that multiplies two random matrices.

    The matrices are (rows, terms) and (terms, columns).
    """
    rows, terms, columns = shape
    dtype, precision = KINDS[kind]
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (rows, terms), jnp.float32).astype(dtype)
    b = jax.random.normal(keys[1], (terms, columns), jnp.float32).astype(dtype)
    return functools.partial(jax.jit(functools.partial(jax.lax.dot, precision=precision)), a, b)


def sentence(figures: dict[str, Any]) -> str:
    """Return a sentence with the ceilings."""
    best = ", ".join(f"{kind} {tflops:.3g}" for kind, tflops in figures.get("best", {}).items())
    return f"Fastest product on this device, TFLOP/s: {best}; a copy moves {figures.get('copy', 0):.3g} TB/s."
