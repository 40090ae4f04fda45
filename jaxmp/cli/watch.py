"""``jaxmp watch``."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

from jaxmp.cli.flags import PLOT, RUN
from jaxmp.cli.printing import console, plot, print_json, print_rich

ARGUMENTS = RUN | PLOT
_BLOCKS = " ▁▂▃▄▅▆▇█"


def run(options: argparse.Namespace) -> int:
    """Show a run as it trains: loss, loss scale, skipped steps, vanishing gradients.

    The run must be watched: by jaxmp.inspect.Watch, or by --watch N of a training script. On a terminal, the table is
    updated until the run ends. In a pipe or a file, and with --plot, the table is printed once. The exit code is 2 if
    the folder is not the folder of a watched run.
    """
    title, rows = watched(Path(options.run))
    plot(options, lambda plots: plots.training(options.run))
    if options.json:
        print_json(rows)
    elif sys.stdout.isatty() and options.plot is None:
        with contextlib.suppress(KeyboardInterrupt):  # the user stops the command
            live(console(), Path(options.run))
    else:
        terminal = console()
        print_rich(terminal, picture(terminal.width, title, rows))
    return 0


def watched(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return a line about the last step of a run, and the rows of its watched steps.

    Raises:
      UsageError: ``folder`` is not the folder of a run, or the run is not watched.
    """
    from jaxmp.cli.loading import usage_errors
    from jaxmp.inspect.run_files import read_metrics, read_watched_steps

    with usage_errors(FileNotFoundError, ValueError):
        rows, watched_steps = read_metrics(folder), read_watched_steps(folder)
    if not rows:
        return "no step yet", watched_steps
    last, skipped = rows[-1], sum(int(row["skipped"]) for row in rows)
    names = ("step", "loss", "grad_norm", "loss_scale")
    return "  ".join(f"{name} {last[name]}" for name in names) + f"  skipped {skipped}", watched_steps


def picture(columns: int, title: str, rows: list[dict[str, Any]]) -> Any:
    """Return a table of the share of gradients that vanish in each tensor.

    A row of the table has the share in the last watched step, and a bar for each of the recent watched steps. A
    gradient vanishes if it is not 0, but becomes 0 when it is multiplied by the loss scale of the step and rounded to
    the dtype in the caption.
    """
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(f"{title}; no step was watched yet")
    last = rows[-1]
    caption = (
        f"in {last['dtype']}, watched at step {last['step']}; recommended loss scale {last['recommended_scale']:g}"
    )
    if last["not_finite"]:
        caption += f", {last['not_finite']} values not finite"
    grid = Table(title=Text(title), caption=Text(caption), box=None, pad_edge=False, title_justify="left")
    width = min(40, columns // 4)
    grid.add_column("tensor", overflow="fold")
    for name in ("become 0", "were 0", "by step (full: 100 %)"):
        grid.add_column(name, no_wrap=True)
    for kind in ("activation_gradients", "gradients"):
        for path, share in last["vanished"][kind].items():
            history = [row["vanished"][kind].get(path, 0.0) for row in rows[-width:]]
            bars = "".join(_BLOCKS[min(8, math.ceil(8 * vanished))] for vanished in history)
            zeros = f"{last['zeros'][kind][path]:.1%}"
            grid.add_row(Text(f"{kind.replace('_', ' ')} {path}"), f"{share:.1%}", zeros, Text(bars))
    return grid


def live(console: Any, folder: Path, seconds: float = 2.0) -> None:
    """Show a run until it writes its summary or the user stops the command."""
    from rich.live import Live

    with Live(picture(console.width, *watched(folder)), console=console, auto_refresh=False) as display:
        while not (folder / "summary.json").exists():
            time.sleep(seconds)
            display.update(picture(console.width, *watched(folder)), refresh=True)
        display.update(picture(console.width, *watched(folder)), refresh=True)
