"""The run of every script: its folder, its metrics, its evaluations and its checkpoints.

The run does not wait for the device after each step. The folder has the config, metrics, curves, checkpoints and
summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import jax

import jaxmp
from experiments.report.curves import curves
from experiments.report.json_files import write_json
from experiments.report.progress import Progress
from experiments.training import cli
from experiments.training.environment import environment
from experiments.training.experiment import Batch, Experiment, PendingMetrics, describe
from experiments.training.run_writer import RunWriter
from jaxmp.inspect import Watch

C = TypeVar("C", bound=cli.Training)
COLUMNS = ("step", "split", "loss", "accuracy", "grad_norm", "loss_scale", "skipped", "examples_per_s")
OF_A_RUN = frozenset(
    ("policy", "loss_scale", "opt_level", "autocast", "checkpoint_every", "keep", "resume", "data_dir", "run_dir",
     "watch", "tensorboard", "wandb", "mesh", "seed")
)  # fmt: skip
"""Flags in which the runs of a comparison may differ. The comparison sets them itself."""


@contextlib.contextmanager
def running(name: str, config: C, prepare: Callable[[C], Experiment]) -> Iterator[Run]:
    """Open a run in its folder, from its first step or its last checkpoint.

    The block loops over its batches. When the block ends, the run is evaluated, and ``run.summary`` has the results.

    Args:
      name: the name of the experiment, for the run folder.
      config: the flags.
      prepare: makes the experiment that the flags describe.
    """
    with cli.bad_values_end_it():
        run = Run(name, config, prepare(config))
    with run:
        yield run
        run.finish()
    summary = run.summary
    print(
        f"held-out accuracy {summary['test_accuracy']:.2%}, loss {summary['test_loss']:.4f}, "
        f"{summary['skipped']} of {summary['steps']} steps skipped; written to {run.folder}"
    )
    for title, text in summary.get("texts", {}).items():
        print(f"\n{title}\n\n{text}")


class Run:
    """A training run, from its first step or from a checkpoint, as a context manager.

    When the context ends, the last checkpoint is written and the file of metrics is closed.

    Attributes:
      experiment: the experiment that is trained.
      state: the current train state.
      folder: the run folder.
      step: the number of steps that the run has trained.
      summary: the results, once the run has finished.

    Args:
      name: the name of the experiment.
      config: the flags.
      experiment: the experiment that the flags describe.

    Raises:
      ValueError: there is no checkpoint to resume from, or the folder has another run.
    """

    def __init__(self, name: str, config: cli.Training, experiment: Experiment) -> None:
        if config.resume and config.run_dir is None:
            raise ValueError("--resume continues the run in --run-dir; give its folder")
        self.experiment, self.summary = experiment, dict[str, Any]()
        self.folder = cli.run_folder(name, config.run_dir)
        self._name, self._config, self._environment = name, config, environment()
        self._checkpoints = self.folder / "checkpoints"
        self.state, self._start = self._first_state(experiment.init(config.seed))
        self.step = self._start
        about = {"config": dataclasses.asdict(config), "precision": experiment.precision}
        write_json(self.folder / "config.json", {**about, "environment": self._environment})
        boards = {"tensorboard": config.tensorboard, "wandb": config.wandb}
        self._writer = RunWriter(self.folder, COLUMNS, start=self._start, **boards)
        self._rows = self._writer.rows
        self._watch = Watch(experiment.step, every=config.watch) if config.watch else None
        if self._watch:
            self.experiment = dataclasses.replace(experiment, step=self._watched)
        self._unwatched = experiment
        self._pending, self._progress = PendingMetrics(), Progress(name, experiment.steps, self._start)
        self._skipped = int(sum(row.get("skipped", 0) for row in self._rows))
        self._started = time.perf_counter()
        self._compile_s = self._paused_s = self._last_read = 0.0
        self._test: dict[str, float] = {}

    def _first_state(self, state: jaxmp.TrainState) -> tuple[jaxmp.TrainState, int]:
        """Return the state that the run begins with, and its number of steps."""
        steps = jaxmp.checkpoint.list_steps(self._checkpoints) if self._checkpoints.is_dir() else []
        if not self._config.resume:
            if steps:
                raise ValueError(
                    f"{self.folder} has a run with {steps[-1]} steps; continue with --resume, or take another --run-dir"
                )
            return state, 0
        if not steps:
            raise ValueError(f"{self.folder} has no checkpoint to resume from; start without --resume")
        if steps[-1] > self.experiment.steps:
            raise ValueError(f"--steps must be at least the {steps[-1]} that {self.folder} has trained")
        return jaxmp.checkpoint.restore(self._checkpoints, state, step=steps[-1]), steps[-1]

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the error that ended the run is raised instead
            self._read(self._pending.drain())  # the last steps of a run that was stopped
            if self._watch:
                self._writer.write_watched(self._watch, wait=True)
        self._progress.__exit__(kind, error, at)
        self._writer.close()
        if self._config.checkpoint_every:
            jaxmp.checkpoint.wait()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the remaining steps."""
        batches = self.experiment.train_batches(self._config.seed, self._start)
        while self.step < self.experiment.steps:
            self.step += 1
            batch = next(batches)
            yield batch
            if self.step == 1:
                with self._pause():
                    describe(self._unwatched, self.state, batch, self.folder)

    def _watched(self, state: jaxmp.TrainState, batch: Batch) -> Any:
        """Run the next step, watched if its number is a multiple of ``--watch``."""
        assert self._watch is not None
        return self._watch(self.step, state, batch)

    def log(self, metrics: dict[str, jax.Array]) -> None:
        """Take a step's metrics, and write those of earlier steps.

        The metrics stay on the device until they are written some steps later. Evaluate and save if it is time: every
        ``--evaluate-every`` and ``--checkpoint-every`` steps, and after the last step.
        """
        if self.step == self._start + 1:  # the first step compiles, so the clock starts after it
            jax.block_until_ready(metrics)
            self._compile_s = time.perf_counter() - self._started
            self._started = self._last_read = time.perf_counter()
            self._paused_s = 0.0
        if self._watch:
            self._writer.write_watched(self._watch)
        self._read(self._pending.push(self.step, metrics))
        if self._is_due(self._config.evaluate_every):
            with self._pause():
                self._test = self.experiment.evaluate(self.state)
                self._write({"step": self.step, "split": "test", **self._test})
        if self._config.checkpoint_every and self._is_due(self._config.checkpoint_every):
            with self._pause():
                jaxmp.checkpoint.save(self._checkpoints, self.state, step=self.step, keep=self._config.keep)

    def _is_due(self, every: int) -> bool:
        return self.step == self.experiment.steps or (every > 0 and self.step % every == 0)

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Leave the time of the block out of the time of training."""
        self._read(self._pending.drain())
        started = time.perf_counter()
        yield
        pause = time.perf_counter() - started
        self._paused_s += pause
        self._last_read += pause

    def finish(self) -> None:
        """Write the curves and the summary."""
        self._read(self._pending.drain())
        seconds = time.perf_counter() - self._started - self._paused_s
        timed = self.step - self._start - 1  # the first step compiles
        test = self._test or self.experiment.evaluate(self.state)
        closing = self.experiment.closing(self.state, test)
        texts = {title: _readable(text) for title, text in closing.texts.items()}
        self.summary = {
            "experiment": self._name,
            **{f"test_{name}": value for name, value in test.items()},
            **closing.numbers,
            "steps": self.experiment.steps,
            "skipped": int(self.state.skipped_steps),
            "loss_scale": float(self.state.loss_scale),
            "ms_per_step": 1000 * seconds / timed if timed > 0 else None,
            "examples_per_s": timed * self.experiment.batch_size / seconds if timed > 0 else None,
            "examples_are": self.experiment.unit,
            "first_step_s": self._compile_s,
            "resumed_at_step": self._start,
            **self.experiment.precision,
            **self._environment,
            "platform": jax.default_backend(),
            **({"texts": texts} if texts else {}),
        }
        write_json(self.folder / "summary.json", self.summary)
        curves(self._rows, self.folder / "curves.png", self._name)

    def _read(self, old: Iterable[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in old:
            now = time.perf_counter()
            elapsed, self._last_read = now - self._last_read, now
            row: dict[str, Any] = {**metrics, "step": step, "split": "train", "skipped": int(metrics["skipped"])}
            self._skipped += row["skipped"]
            shown = [f"loss {row['loss']:.4f}"]
            if "accuracy" in row:
                shown.append(f"accuracy {row['accuracy']:.1%}")
            if step > self._start + 1:
                row["examples_per_s"] = self.experiment.batch_size / max(elapsed, 1e-9)
                timed = (step - self._start - 1) * self.experiment.batch_size
                rate = timed / max(now - self._started - self._paused_s, 1e-9)
                shown.append(f"{rate:,.0f} {self.experiment.unit}/s")
            self._write(row)
            shown += [f"scale {row['loss_scale']:g}", f"skipped {self._skipped}"]
            self._progress.advance(1, "  ".join(shown))

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        metrics = {name: value for name, value in row.items() if name not in ("step", "split")}
        self._writer.write_metrics(row["step"], row["split"], metrics)


def _readable(text: str) -> str:
    """Replace control characters, which would control the terminal.

    A model may write such characters.
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)
