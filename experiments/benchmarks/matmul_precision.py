"""Measure the errors of float32 products by precision, compared with float64.

python -m experiments.benchmarks.matmul_precision --run-dir experiments/results/matmul_precision

Hardware that multiplies bfloat16 or TensorFloat-32 computes a float32 product in parts. Each operand is split into a
rounded number, the rounded rest, and so on. The products of the parts are exact in float32 and are summed in float32.
The algorithms of `jax.lax.DotAlgorithmPreset` differ in the format of the parts and in the pairs that they multiply:

- `BF16_BF16_F32_X3` (two parts) and `BF16_BF16_F32_X6` (three parts) leave out the smallest products of parts
- `BF16_BF16_F32_X9` (three parts) multiplies all pairs
- `TF32_TF32_F32_X3` (two parts) leaves out the smallest product

The errors are emulated with float32 products, so they do not depend on the device. Parts are rounded to nearest, and
the sums have the order of the device's float32 product. On a GPU, the products themselves run too: their errors and
times are added to the table. An error is the relative L2 error of a product of normal random matrices. The run folder
holds matmul_precision.md and .json.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.shared import records
from experiments.measure import timing
from experiments.report.progress import Progress
from experiments.report.tables import Table, titled
from experiments.training import cli
from experiments.training.environment import environment

LENGTHS = (256, 16384)
"""The numbers of terms of a sum for which errors are measured."""
NOT_MEASURED = "not measured yet"
EMULATED = "The errors are emulated: a CPU has no such products. The times need a GPU."
MEASURED = "The errors are emulated. In brackets: the errors of the GPU's own products."


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An algorithm for float32 products.

    Attributes:
      mantissa_bits: the mantissa bits of a part, without the leading one.
      parts: the number of parts of an operand.
      most: the largest sum of the positions of two parts that are multiplied. Part 0 is the largest.
    """

    mantissa_bits: int
    parts: int
    most: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of parts that are multiplied, the smallest products first."""
        positions = range(self.parts)
        pairs = [(left, right) for left in positions for right in positions if left + right <= self.most]
        return sorted(pairs, key=sum, reverse=True)

    def split(self, operand: jax.Array) -> list[jax.Array]:
        """Return the parts of a float32 operand, as float32 arrays."""
        parts, remainder = [], operand
        for _ in range(self.parts):
            part = jax.lax.reduce_precision(remainder, exponent_bits=8, mantissa_bits=self.mantissa_bits)
            parts.append(part)
            remainder = remainder - part
        return parts

    def product(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """Return the emulated float32 product of two matrices."""
        left_parts, right_parts = self.split(left), self.split(right)
        total = jnp.zeros((left.shape[0], right.shape[1]), jnp.float32)
        for of_left, of_right in self.pairs:
            total += jnp.dot(left_parts[of_left], right_parts[of_right], precision="highest")
        return total


ALGORITHMS = {
    "BF16_BF16_F32": Algorithm(mantissa_bits=7, parts=1, most=0),
    "TF32_TF32_F32": Algorithm(mantissa_bits=10, parts=1, most=0),
    "BF16_BF16_F32_X3": Algorithm(mantissa_bits=7, parts=2, most=1),
    "TF32_TF32_F32_X3": Algorithm(mantissa_bits=10, parts=2, most=1),
    "BF16_BF16_F32_X6": Algorithm(mantissa_bits=7, parts=3, most=2),
    "BF16_BF16_F32_X9": Algorithm(mantissa_bits=7, parts=3, most=4),
    "F32_F32_F32": Algorithm(mantissa_bits=23, parts=1, most=0),
}
"""The algorithms of float32 products, by their names in JAX."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Small, records.Timed):
    """Flags of the benchmark."""


def operands(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two normal random matrices whose product sums ``length`` terms."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, length)).astype(np.float32), rng.standard_normal((length, rows)).astype(
        np.float32
    )


def error(product: Callable[[Any, Any], Any], rows: int, length: int) -> float:
    """Return the relative L2 error of a product, compared with float64."""
    left, right = operands(rows, length)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    difference = np.asarray(jax.jit(product)(left, right), np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def on_device(name: str) -> Callable[[Any, Any], Any]:
    """Return the product of the device itself in an algorithm."""
    return functools.partial(jnp.dot, precision=jax.lax.DotAlgorithmPreset[name])


def milliseconds(config: Config, size: int) -> dict[str, float]:
    """Return the median time of a square product on this device, by algorithm."""
    left, right = map(jnp.asarray, operands(size, size))
    products = {name: functools.partial(jax.jit(on_device(name)), left, right) for name in ALGORITHMS}
    times = timing.interleaved(products, config.rounds, config.block_ms)
    return {name: timing.quartiles(of_name)[1] for name, of_name in times.items()}


def measure(config: Config) -> list[dict[str, Any]]:
    """Return a row for each algorithm."""
    rows, size = (32, 128) if config.smoke else (256, 8192)
    results = []
    is_gpu = jax.default_backend() == "gpu"
    times = milliseconds(config, size) if is_gpu else {}
    with Progress("matmul_precision", len(ALGORITHMS)) as progress:
        for name, algorithm in ALGORITHMS.items():
            emulated = {str(length): error(algorithm.product, rows, length) for length in LENGTHS}
            measured = {str(length): error(on_device(name), rows, length) for length in LENGTHS} if is_gpu else {}
            row = {"name": name, "products": len(algorithm.pairs), "error": emulated, "on_device": measured}
            results.append({**row, "size": size, "ms": times.get(name)})
            progress.advance(1, name)
    return results


def table(results: list[dict[str, Any]], smoke: bool = False) -> Table:
    """Return the table of errors and times."""
    columns = ("precision", "products", *(f"error, {length:,} terms" for length in LENGTHS), "time")
    rows = []
    for row in results:
        cells = []
        for length in map(str, LENGTHS):
            on_device = f" ({row['on_device'][length]:.1e})" if row["on_device"] else ""
            cells.append(f"{row['error'][length]:.1e}{on_device}")
        time = NOT_MEASURED if row["ms"] is None else f"{row['ms']:.2f} ms ({row['size']:,}³)"
        rows.append((f"`{row['name']}`", str(row["products"]), *cells, time))
    note = MEASURED if any(row["on_device"] for row in results) else EMULATED
    return Table(titled("Errors of float32 products", smoke), columns, rows, notes=(note,))


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        folder = records.folder_of("matmul_precision", config)
    results = measure(config)
    where, data = environment(), {"smoke": config.smoke, "results": results}
    if jax.default_backend() != "gpu":
        where = {**where, "device": f"emulated on {where['device']}"}
    title = "Float32 products by precision"
    records.record(folder, "matmul_precision", title, where, [table(results, config.smoke)], data)
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
