"""Measure this device's ceilings, which utilisation refers to.

They are TFLOP/s of one product in each dtype, and the rate of a copy.

Not a data sheet's peak, but the most that one large product reaches through XLA here. fp32 is at precision highest,
tf32 at JAX's default on a GPU. A copy counts the bytes that it reads and those that it writes.
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
SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (16384, 768, 3072), (16384, 4096, 4096))
"""Rows, terms and columns of the products: a large cube, and layers of transformers 768 and 4096 wide."""
SMOKE_SHAPES: tuple[Shape, ...] = ((256, 256, 256),)
COPY_BYTES, SMOKE_COPY_BYTES = 2**31, 2**22
KINDS: dict[str, tuple[Any, jax.lax.Precision]] = {
    "fp32": (jnp.float32, jax.lax.Precision.HIGHEST),
    "tf32": (jnp.float32, jax.lax.Precision.DEFAULT),
    "bf16": (jnp.bfloat16, jax.lax.Precision.DEFAULT),
    "fp16": (jnp.float16, jax.lax.Precision.DEFAULT),
}
"""The dtype of both matrices and of their product, and its precision."""


def ceilings(smoke: bool) -> dict[str, Any]:
    """Measures them.

    Returns:
      ``"best"``: the highest TFLOP/s by precision, of those that the device can multiply; ``"copy"``: TB/s, read plus
      written.
    """
    rounds, block_ms = (1, 1.0) if smoke else (5, 50.0)
    tf32 = "tensorfloat32" in jaxmp.hardware.detect().tensor_cores
    best: dict[str, float] = {}
    for shape in SMOKE_SHAPES if smoke else SHAPES:
        turns: dict[str, Callable[[], Any]] = {}
        for kind in KINDS:
            if kind != "tf32" or tf32:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # no room
                    turns[kind] = product(kind, shape)
        # What the device cannot do has no ceiling, and the others have theirs.
        for kind, times in timing.interleaved(turns, rounds, block_ms, failed=lambda *_: None).items():
            best[kind] = max(best.get(kind, 0.0), 2 * math.prod(shape) / timing.quartiles(times)[1] / 1e9)
    x = jnp.zeros((SMOKE_COPY_BYTES if smoke else COPY_BYTES) // 4, jnp.float32)
    copy = functools.partial(jax.jit(lambda x: jnp.array(x, copy=True)), x)
    times = timing.interleaved({"copy": copy}, rounds, block_ms)["copy"]
    return {"best": best, "copy": 2 * x.nbytes / timing.quartiles(times)[1] / 1e9}


def product(kind: str, shape: Shape) -> Callable[[], jax.Array]:
    """A product of two random matrices, (rows, terms) and (terms, columns)."""
    rows, terms, columns = shape
    dtype, precision = KINDS[kind]
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (rows, terms), jnp.float32).astype(dtype)
    b = jax.random.normal(keys[1], (terms, columns), jnp.float32).astype(dtype)
    return functools.partial(jax.jit(functools.partial(jax.lax.dot, precision=precision)), a, b)


def sentence(figures: dict[str, Any]) -> str:
    """The ceilings in a sentence."""
    best = ", ".join(f"{kind} {tflops:.3g}" for kind, tflops in figures.get("best", {}).items())
    return f"Fastest product on this device, TFLOP/s: {best}; a copy moves {figures.get('copy', 0):.3g} TB/s."
