"""This device's own ceilings, which utilisation is measured against: TFLOP/s of one product in each dtype, and a copy.

Not a data sheet's peak, but the most that one large product reaches through XLA here. float32 is at precision highest,
tensorfloat32 at JAX's default on a GPU. A copy counts the bytes that it reads and those that it writes.
"""

from __future__ import annotations

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
    "float32": (jnp.float32, jax.lax.Precision.HIGHEST),
    "tensorfloat32": (jnp.float32, jax.lax.Precision.DEFAULT),
    "bfloat16": (jnp.bfloat16, jax.lax.Precision.DEFAULT),
    "float16": (jnp.float16, jax.lax.Precision.DEFAULT),
}
"""The dtype of both matrices and of their product, and its precision."""


def ceilings(smoke: bool) -> dict[str, Any]:
    """Measures them.

    Returns:
      ``"matmul"``: TFLOP/s by dtype and shape, ``"8192×8192×8192"``, or why there is none, a string; ``"copy"``:
      TB/s, read plus written; ``"best"``: the highest TFLOP/s by dtype.
    """
    rounds, block_ms = (1, 1.0) if smoke else (5, 50.0)
    matmul: dict[str, dict[str, float | str]] = {kind: {} for kind in KINDS}
    for shape in SMOKE_SHAPES if smoke else SHAPES:
        name = "×".join(map(str, shape))
        turns: dict[str, Callable[[], Any]] = {}
        for kind in KINDS:
            if kind == "tensorfloat32" and kind not in jaxmp.hardware.detect().tensor_cores:
                matmul[kind][name] = "no tensorfloat32 on this device"
                continue
            try:
                turns[kind] = product(kind, shape)
                jax.block_until_ready(turns[kind]())  # what the device cannot do shows here
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:  # no such product here, or no room
                turns.pop(kind, None)
                matmul[kind][name] = next(iter(str(error).splitlines()), type(error).__name__)
        for kind, times in timing.interleaved(turns, rounds, block_ms).items():
            matmul[kind][name] = 2 * math.prod(shape) / timing.quartiles(times)[1] / 1e9
    numbers = {kind: [v for v in row.values() if isinstance(v, float)] for kind, row in matmul.items()}
    x = jnp.zeros((SMOKE_COPY_BYTES if smoke else COPY_BYTES) // 4, jnp.float32)
    copy = functools.partial(jax.jit(lambda x: jnp.array(x, copy=True)), x)
    times = timing.interleaved({"copy": copy}, rounds, block_ms)["copy"]
    return {
        "matmul": matmul,
        "copy": 2 * x.nbytes / timing.quartiles(times)[1] / 1e9,
        "best": {kind: max(row) for kind, row in numbers.items() if row},
    }


def product(kind: str, shape: Shape) -> Callable[[], jax.Array]:
    """A product of two random matrices, (rows, terms) and (terms, columns)."""
    rows, terms, columns = shape
    dtype, precision = KINDS[kind]
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (rows, terms), jnp.float32).astype(dtype)
    b = jax.random.normal(keys[1], (terms, columns), jnp.float32).astype(dtype)
    return functools.partial(jax.jit(functools.partial(jax.lax.dot, precision=precision)), a, b)


def sentence(found: dict[str, Any]) -> str:
    """The ceilings in a sentence."""
    best = ", ".join(f"{kind} {tflops:.3g}" for kind, tflops in found.get("best", {}).items())
    return f"Fastest product on this device, TFLOP/s: {best}; a copy moves {found.get('copy', 0):.3g} TB/s."
