"""Measure how many images per second the input pipeline prepares.

No model is trained.

python -m experiments.benchmarks.input_pipeline --image-size 224

The images are random, with the number and size of CIFAR-10's images. They are shuffled, cropped, mirrored, normalised
and resized on the device by the code that the training scripts use, `experiments.data.images.epochs`. The data set is
held on the device or on the host. From the host, each batch is sent one step ahead. `share` is the time to prepare a
batch over the time in which a model uses the batch. The model takes --consumer images/s, and the two times do not
overlap. The run folder holds input_pipeline.md and .json.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.shared import records
from experiments.data import images
from experiments.measure import timing
from experiments.report.progress import Progress
from experiments.report.tables import Table, spread
from experiments.training import cli
from experiments.training.environment import environment

COLUMNS = ("batches", "images/s", "quartiles", "ms a batch", "share %")
STORED = (32, 32, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Timed):
    """Flags of the benchmark."""

    image_size: int = 0
    """Height and width to resize to; 0 for 224 on a GPU, 64 elsewhere."""
    batch_size: int = 256
    """Images per batch."""
    examples: int = 50_000
    """Images in the data set."""
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...] = ("float32", "bfloat16")
    """Dtypes of the batches."""
    shift: int = 4
    """Largest number of pixels that an image is moved in each direction."""
    consumer: float = 7000.0
    """Images per second that a model would take."""


def measure(config: Config, size: int, progress: Progress) -> dict[str, Any]:
    """Time every variant of the input pipeline.

    A row has the milliseconds per batch in each round, the images per second and the share.
    """
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (config.examples, *STORED), np.uint8)
    on_host = images.Images(pixels, rng.integers(0, 10, config.examples, np.int32))
    images_at = {"device": images.Images(*map(jnp.asarray, on_host)), "host": on_host}
    mean, std = images.statistics(pixels)
    turns, rows = {}, {}
    for (place, split), dtype in itertools.product(images_at.items(), config.dtypes):
        as_input = images.Pixels(size, mean, std, dtype)
        batches = images.epochs(split, config.batch_size, 0, config.shift, flip=True, pixels=as_input)
        turns[f"{dtype}, held on the {place}"] = batches.__next__
    times = timing.interleaved(
        turns, config.rounds, config.block_ms, lambda i: progress.advance(int(i >= 0), "timing, in turn")
    )
    for name, milliseconds in times.items():
        low, ms, high = timing.quartiles(milliseconds)
        rates = [1000 * config.batch_size / time for time in (high, ms, low)]
        rows[name] = {
            "milliseconds": milliseconds,
            "ms": ms,
            "images_per_s": rates,
            "share": config.consumer / rates[1],
        }
    return rows


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        cli.require("--shift", config.shift, 0, STORED[0])
        cli.require("--examples", config.examples, 1)
        cli.require("--batch-size", config.batch_size, 1, config.examples + 1)
        folder = records.folder_of("input_pipeline", config, rounds=2, consumer=1)
    size = config.image_size or (224 if jax.default_backend() == "gpu" else 64)
    with Progress("input pipeline", config.rounds) as progress:
        variants = measure(config, size, progress)
    rows = []
    for name, row in variants.items():
        rates, share = row["images_per_s"], f"{100 * row['share']:.1f}"
        rows.append((name, f"{rates[1]:,.0f}", spread(rates, ",.0f"), f"{row['ms']:.3g}", share))
    tables = [Table(f"{STORED[0]}×{STORED[1]} to {size}×{size}, batches of {config.batch_size}", COLUMNS, rows)]
    intro = (
        f"{config.examples:,} images are shuffled, cropped (±{config.shift} pixels), mirrored, normalised and "
        "resized. Share: the time to prepare a batch, divided by the time in which a model uses the batch. The "
        f"model takes {config.consumer:,.0f} images/s."
    )
    result = {"config": dataclasses.asdict(config), "size": size, "variants": variants}
    title = "Images a second of the input pipeline"
    records.record(folder, "input_pipeline", title, environment(), tables, result, [intro])
    return result


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
