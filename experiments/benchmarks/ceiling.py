"""This device's own ceilings: TFLOP/s of one matrix product in each dtype, and the bandwidth of a copy.

python -m experiments.benchmarks.ceiling

What the utilisation of benchmarks.train_step is measured against: not a data sheet's peak, but the most that one large
product reaches through XLA here. float32 is at precision highest, tensorfloat32 at JAX's default on a GPU; float8 is
once multiplied as it is, and once in the form that XLA hands to cuBLASLt (both sides scaled in bfloat16, then
multiplied). A copy counts the bytes it reads and those it writes. Warm, waited for, the dtypes in turn; the median
counts. The run folder holds ceiling.md and ceiling.json.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import tyro

import jaxmp
from experiments.measure import timing
from experiments.measure.environment import environment, require_gpu
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import run_folder, write_json

Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (16384, 768, 3072), (16384, 4096, 4096))
"""Rows, terms and columns of the products: a large cube, and layers of transformers 768 and 4096 wide."""
SMOKE_SHAPES: tuple[Shape, ...] = ((256, 256, 256), (512, 64, 256))
COPY_BYTES, SMOKE_COPY_BYTES = 2**31, 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small products, on any device, to see that everything runs."""
    rounds: int = 10
    """Rounds of timing."""
    block_ms: float = 50.0
    """How long a turn should take, in milliseconds."""
    run_dir: cli.Folder = None
    """Folder to write to. (default: runs/ceiling-TIME)"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How two matrices are multiplied: the dtype of both, that of the result, and what is done on the way."""

    dtype: Any
    result: Any
    precision: jax.lax.Precision | None = None
    scaled: bool = False

    def matrices(self, shape: Shape) -> tuple[jax.Array, jax.Array]:
        """Two random ones, (rows, terms) and (terms, columns)."""
        rows, terms, columns = shape
        a, b = _draw((rows, terms), 0), _draw((terms, columns), 1)
        return a.astype(self.dtype), b.astype(self.dtype)

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Their product in the result's dtype."""
        if self.scaled:
            scale = jnp.bfloat16(0.5)
            a, b = a.astype(scale.dtype) * scale, b.astype(scale.dtype) * scale
        return jax.lax.dot(a, b, precision=self.precision, preferred_element_type=self.result)


KINDS = {
    "float32": Kind(jnp.float32, jnp.float32, jax.lax.Precision.HIGHEST),
    "tensorfloat32": Kind(jnp.float32, jnp.float32, jax.lax.Precision.DEFAULT),
    "bfloat16": Kind(jnp.bfloat16, jnp.bfloat16),
    "float16": Kind(jnp.float16, jnp.float16),
    "float8_e4m3fn": Kind(jnp.float8_e4m3fn, jnp.bfloat16),
    "float8_e4m3fn, scaled": Kind(jnp.float8_e4m3fn, jnp.bfloat16, scaled=True),
    "int8": Kind(jnp.int8, jnp.int32),
}
"""What is multiplied, by the name of its column."""


@functools.partial(jax.jit, static_argnums=0)
def _draw(shape: tuple[int, int], seed: int) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape, jnp.float32, -4, 4)  # what int8 tells apart, too


def ceilings(
    shapes: tuple[Shape, ...] = SHAPES,
    copy_bytes: int = COPY_BYTES,
    rounds: int = 10,
    block_ms: float = 50.0,
    kinds: tuple[str, ...] | None = None,
    after_each: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures them.

    Args:
      shapes: rows, terms and columns of the products.
      copy_bytes: size of what is copied.
      rounds: rounds of timing.
      block_ms: how long a turn should take.
      kinds: names among ``KINDS``; None for all.
      after_each: called with what comes next.

    Returns:
      ``"matmul"``: TFLOP/s by dtype and shape, ``"8192×8192×8192"``, or why there is none, a string; ``"copy"``:
      TB/s, read plus written; ``"best"``: the highest TFLOP/s by dtype.
    """
    kinds = kinds or tuple(KINDS)
    matmul: dict[str, dict[str, float | str]] = {kind: {} for kind in kinds}
    for shape in shapes:
        name = "×".join(map(str, shape))
        turns: dict[str, Callable[[], Any]] = {}
        for kind in kinds:
            after_each(f"{name} in {kind}")
            if kind == "tensorfloat32" and kind not in jaxmp.hardware.detect().tensor_cores:
                matmul[kind][name] = "no tensorfloat32 on this device"
                continue
            try:
                turns[kind] = _turn(kind, shape)
            except (
                jax.errors.JaxRuntimeError,
                NotImplementedError,
            ) as error:  # no such product here, or no room
                matmul[kind][name] = next(iter(str(error).splitlines()), type(error).__name__)
        for kind, times in timing.interleaved(turns, rounds, block_ms).items():
            matmul[kind][name] = 2 * math.prod(shape) / timing.quartiles(times)[1] / 1e9
    after_each("copy")
    numbers = {kind: [v for v in row.values() if isinstance(v, float)] for kind, row in matmul.items()}
    return {
        "matmul": matmul,
        "copy": _copy_bandwidth(copy_bytes, rounds, block_ms),
        "best": {kind: max(row) for kind, row in numbers.items() if row},
    }


def _turn(kind: str, shape: Shape) -> Callable[[], Any]:
    how = KINDS[kind]
    product = jax.jit(how.product)
    a, b = how.matrices(shape)
    jax.block_until_ready(product(a, b))  # what the device cannot do shows here
    return functools.partial(product, a, b)


def _copy_bandwidth(size: int, rounds: int, block_ms: float) -> float:
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: jnp.array(x, copy=True))
    times = timing.interleaved({"copy": lambda: copy(x)}, rounds, block_ms)["copy"]
    return 2 * x.nbytes / timing.quartiles(times)[1] / 1e9


def table(result: dict[str, Any]) -> Table:
    """A row a shape, a column a dtype."""
    matmul = result["matmul"]
    shapes = list(next(iter(matmul.values())))
    rows = [(shape, *(_cell(matmul[kind][shape]) for kind in matmul)) for shape in shapes]
    reasons = {
        f"–: {kind}: {value}" for kind, row in matmul.items() for value in row.values() if isinstance(value, str)
    }
    copy = f"A copy moves {result['copy']:.3g} TB/s, bytes read plus bytes written."
    return Table("TFLOP/s of one matrix product", ("m×k×n", *matmul), rows, notes=(copy, *sorted(reasons)))


def _cell(value: float | str) -> str:
    return "–" if isinstance(value, str) else f"{value:.3g}"


def main(config: Config) -> dict[str, Any]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with cli.bad_values_end_it():
        cli.require("--rounds", config.rounds, 1)
        cli.require("--block-ms", config.block_ms, 0.1)
        require_gpu(config.smoke)
        folder = run_folder("ceiling", config.run_dir)
    shapes = SMOKE_SHAPES if config.smoke else SHAPES
    with Progress("ceilings", len(shapes) * len(KINDS) + 1) as progress:
        result = ceilings(
            shapes,
            SMOKE_COPY_BYTES if config.smoke else COPY_BYTES,
            config.rounds,
            config.block_ms,
            after_each=lambda text: progress.advance(1, text),
        )
    where = environment()
    facts = [f"- {name}: {value}" for name, value in where.items()]
    text = ["# Ceilings of a device", "", *facts, "", table(result).markdown()]
    (folder / "ceiling.md").write_text("\n".join(text))
    write_json(folder / "ceiling.json", {"environment": where, **result})
    console = rich.console.Console()
    table(result).show(console if console.is_terminal else rich.console.Console(width=140))
    console.print("\n".join(facts), markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    return result


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
