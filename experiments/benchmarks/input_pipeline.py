"""How many images a second the input pipeline makes, with the model left out.

python -m experiments.benchmarks.input_pipeline --image-size 224

Random images, as many and as large as CIFAR-10's, are shuffled, cropped, mirrored, normalised and resized on the
device by the code that trains: batches of `experiments.data.images.epochs`, held on the device or sent from the host
one ahead, in float32 and in half precision. The times are warm, of all variants in turn, and waited for. `share` is
the part of its time that a consumer of --consumer images/s would give to its input, if nothing ran at once. The run
folder holds input_pipeline.md and .json.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import tyro

from experiments.data import images
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import run_folder, write_json

COLUMNS = ("batches", "images/s", "quartiles", "ms a batch", "share %")
STORED = (32, 32, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark. Sizes of 0 suit the device."""

    image_size: int = 0
    """Height and width to resize to; 0 for 224 on a GPU, 64 elsewhere."""
    batch_size: int = 256
    """Images a batch."""
    examples: int = 50_000
    """Images in the set."""
    dtypes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="DTYPE")] = ("float32", "bfloat16")
    """Dtypes of the batches."""
    shift: int = 4
    """Largest number of pixels that an image is moved each way."""
    consumer: float = 7000.0
    """Images a second that the model would take."""
    rounds: int = 15
    """Rounds of timing."""
    block_ms: float = 500.0
    """How long a turn should take, in milliseconds."""
    run_dir: cli.Folder = None
    """Folder to write to. (default: runs/input_pipeline-TIME)"""


def check(config: Config) -> None:
    """Checks the flags.

    Raises:
      ValueError: one is out of range.
    """
    for name, least in (("image_size", 0), ("batch_size", 1), ("examples", 1), ("rounds", 2)):
        cli.require(f"--{name.replace('_', '-')}", getattr(config, name), least)
    cli.require("--shift", config.shift, 0, STORED[0])
    cli.require("--consumer", config.consumer, 1)
    cli.require("--batch-size", config.batch_size, 1, config.examples + 1)
    cli.require("--block-ms", config.block_ms, 0)
    cli.require("the number of --dtypes", len(config.dtypes), 1)
    for dtype in config.dtypes:
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"--dtypes are float32, float16 and bfloat16, got {dtype!r}")


def measure(config: Config, size: int, progress: Progress) -> dict[str, Any]:
    """Times every variant: milliseconds a batch in each round, and what follows from them."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (config.examples, *STORED), np.uint8)
    on_host = images.Images(pixels, rng.integers(0, 10, config.examples, np.int32))
    held = {"device": images.Images(*map(jnp.asarray, on_host)), "host": on_host}
    mean, std = images.statistics(pixels)
    turns = {}
    for place, split in held.items():
        for dtype in config.dtypes:
            as_input = images.Pixels(size, mean, std, dtype)
            batches = images.epochs(split, config.batch_size, 0, config.shift, flip=True, pixels=as_input)
            turns[f"{dtype}, held on the {place}"] = batches.__next__

    def after_round(round_: int) -> None:
        progress.advance(int(round_ >= 0), "timing, in turn")

    times = timing.interleaved(turns, config.rounds, config.block_ms, after_round)
    return {name: _row(own, config) for name, own in times.items()}


def _row(milliseconds: list[float], config: Config) -> dict[str, Any]:
    low, ms, high = timing.quartiles(milliseconds)
    rates = [1000 * config.batch_size / each for each in (high, ms, low)]
    consumers_ms = 1000 * config.batch_size / config.consumer
    return {"milliseconds": milliseconds, "ms": ms, "images_per_s": rates, "share": ms / consumers_ms}


def table(variants: dict[str, Any], title: str) -> Table:
    """A row a variant."""
    rows = []
    for name, row in variants.items():
        low, rate, high = row["images_per_s"]
        share = f"{100 * row['share']:.1f}"
        rows.append((name, f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{row['ms']:.3g}", share))
    return Table(title, COLUMNS, rows)


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        check(config)
        folder = run_folder("input_pipeline", config.run_dir)
    size = config.image_size or (224 if jax.default_backend() == "gpu" else 64)
    where = environment()
    with Progress("input pipeline", config.rounds) as progress:
        variants = measure(config, size, progress)
    title = f"{STORED[0]}×{STORED[1]} to {size}×{size}, batches of {config.batch_size}"
    shown = table(variants, title)
    facts = [f"- {name}: {value}" for name, value in where.items()]
    intro = (
        f"Of {config.examples:,} images: shuffled, cropped (±{config.shift} pixels), mirrored, normalised, resized. "
        f"Share: of the time in which a consumer of {config.consumer:,.0f} images/s takes a batch."
    )
    lines = ["# Images a second of the input pipeline", "", *facts, "", intro, ""]
    (folder / "input_pipeline.md").write_text("\n".join([*lines, shown.markdown()]))
    result = {"environment": where, "config": dataclasses.asdict(config), "size": size, "variants": variants}
    write_json(folder / "input_pipeline.json", result)
    console = rich.console.Console()
    shown.show(console if console.is_terminal else rich.console.Console(width=120))
    console.print("\n".join(facts), markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    return result


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
