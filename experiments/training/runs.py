"""Write a run's folder and show its progress.

The run does not wait for the device after each step. The folder has the config, metrics, curves, checkpoints and
summary.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import signal
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax

import jaxmp
from experiments.report import plots
from experiments.report.json_files import strict_json, write_json
from experiments.report.progress import Progress
from experiments.training import cli, processes
from experiments.training.environment import environment
from experiments.training.experiment import Batch, Experiment, PendingMetrics, describe
from experiments.training.run_folders import checkpoints_folder
from experiments.training.run_writer import METRICS_FILE, RunWriter
from jaxmp.inspect import Watch

if TYPE_CHECKING:  # the module imports Orbax, which is needed only for checkpoints
    from experiments.training.checkpoints import Checkpoint

COLUMNS = ("step", "split", "loss", "accuracy", "grad_norm", "loss_scale", "skipped", "examples_per_s", "input_wait")


class Run:
    """A training run, from its first step or from a checkpoint, as a context manager.

    When the context ends, the progress bar stops, the last checkpoint is written and the file of metrics is closed.
    After SIGTERM, the current step is saved and there are no further batches. If there are several processes, all save
    the same step, and only the first process writes other files.

    Attributes:
      experiment: the experiment that is trained.
      state: the current train state.
      folder: the run folder.
      summary: the results, once the run has finished.
      stopped: whether SIGTERM ended the run before its last step.

    Args:
      name: the name of the experiment.
      config: the flags.
      experiment: the experiment that the flags describe.
      state: the initial state.
      folder: the run folder.
      checkpoint: the checkpoint to resume from; None for a new run.
    """

    def __init__(
        self,
        name: str,
        config: cli.Training,
        experiment: Experiment,
        state: jaxmp.TrainState,
        folder: Path,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.experiment, self.state, self.folder = experiment, state, folder
        self._unwatched = experiment
        self.summary: dict[str, Any] = {}
        self.stopped = False
        self._terminated, self._exit_stack = threading.Event(), contextlib.ExitStack()
        self._writes = processes.first()
        self._name, self._config = name, config
        self._environment = environment()
        self._record = {"config": dataclasses.asdict(config), "precision": experiment.precision}
        self._checkpoints = None
        if config.checkpoint_every:
            from experiments.training.checkpoints import Checkpoints

            self._record["examples"] = experiment.examples(config.seed)
            self._checkpoints = Checkpoints(checkpoints_folder(folder), config.keep)
        self._start = self._step = checkpoint.step if checkpoint else 0
        size = checkpoint.about["metrics_bytes"] if checkpoint else 0
        self._rows: list[dict[str, Any]] = self._earlier_rows(size) if self._writes else []
        self._writer = None
        self._watch = Watch(experiment.step, every=config.watch) if config.watch else None
        if self._watch:
            self.experiment = dataclasses.replace(experiment, step=self._watched)
        if self._writes:
            write_json(folder / "config.json", {**self._record, "environment": self._environment})
            boards = {"tensorboard": config.tensorboard, "wandb": config.wandb}
            self._writer = RunWriter(folder, COLUMNS, start=self._start, metrics_bytes=size, **boards)
        self._pending = PendingMetrics()
        self._progress = Progress(name, experiment.steps, self._start)
        self._skipped = int(sum(row.get("skipped", 0) for row in self._rows))
        self._started = time.perf_counter()
        self._compile_s = self._paused_s = self._saving_s = self._waiting_s = self._last_read = 0.0
        self._test: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._writes:
            (self.folder / "summary.json").unlink(missing_ok=True)  # left by a finished run that now trains further
            self._progress.__enter__()
        # With several processes, JAX handles SIGTERM. A second SIGTERM calls the handler that was set before.
        if self._checkpoints and not processes.several() and threading.current_thread() is threading.main_thread():
            restore = functools.partial(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            signal.signal(signal.SIGTERM, lambda *_: (self._terminated.set(), restore()))
            self._exit_stack.callback(restore)
        processes.alive(processes.LONG)  # the first step compiles
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: Any) -> None:
        self._exit_stack.close()
        if processes.several() and kind is not None and not issubclass(kind, FloatingPointError):
            return  # other processes may be gone, and reading or writing would wait for them
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the error that ended the run is raised instead
            self._read(self._pending.drain())  # the last steps of a run that was stopped
            self._write_watched(wait=True)
        if self._writes:
            self._progress.__exit__(kind, *args)
        try:
            if self._writer:
                self._writer.close()
        finally:
            if self._checkpoints:
                self._checkpoints.__exit__(kind, *args)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the remaining steps, and measure the wait for them."""
        batches = self.experiment.train_batches(self._config.seed, self._start)
        while self._step < self.experiment.steps and not self.stopped:
            self._step += 1
            started = time.perf_counter()
            batch = next(batches)
            if self._step > self._start + 1:
                self._waiting_s += time.perf_counter() - started
            yield batch
            if self._step == 1 and not processes.several():
                with self._pause():
                    describe(self._unwatched, self.state, batch, self.folder)

    def _watched(self, state: jaxmp.TrainState, batch: Batch) -> Any:
        """Run the next step, watched if its number is a multiple of ``--watch``.

        The first watched step and the first unwatched step include compilation, so their time is not training time.
        """
        assert self._watch is not None
        every = self._config.watch
        first = (self._start // every + 1) * every
        plain = first + 1 if first == self._start + 1 and every > 1 else first
        if self._step not in (first, plain):
            return self._watch(self._step, state, batch)
        with self._pause():
            return jax.block_until_ready(self._watch(self._step, state, batch))

    def log(self, metrics: dict[str, jax.Array]) -> None:
        """Take a step's metrics, and write those of earlier steps.

        The metrics stay on the device until they are written some steps later. Evaluate and save if it is time: every
        ``--evaluate-every`` and ``--checkpoint-every`` steps, and after the last step. After SIGTERM the step is saved
        too.
        """
        if self._step == self._start + 1:  # the first step compiles, so the clock starts after it
            jax.block_until_ready(metrics)
            self._compile_s = time.perf_counter() - self._started
            self._started = self._last_read = time.perf_counter()
            self._paused_s = 0.0  # the first step may have been watched, which counts as a pause
        self._write_watched(wait=False)
        self._read(self._pending.push(self._step, metrics))
        if self._due(self._config.evaluate_every):
            self.log_evaluation(self.state)
        if self._checkpoints is not None:
            is_asked = self._terminated.is_set() or processes.asked_to_stop(self._step - self._start)
            self.stopped = is_asked and self._step < self.experiment.steps
            if self.stopped or self._due(self._config.checkpoint_every):
                self.save(self.state)
        if self._step > self._start + 1:  # the second step may compile too, because the first may change shardings
            processes.alive()

    @property
    def step(self) -> int:
        """Return the number of steps that the run has trained."""
        return self._step

    def _due(self, every: int) -> bool:
        return self._step == self.experiment.steps or (every > 0 and self._step % every == 0)

    def log_evaluation(self, state: jaxmp.TrainState) -> None:
        """Evaluate on the held-out examples and write the metrics.

        The time does not count as training.
        """
        with self._pause():
            self._test = self.experiment.evaluate(state)
            self._write({"step": self._step, "split": "test", **self._test})

    def save(self, state: jaxmp.TrainState) -> None:
        """Begin to write a checkpoint.

        The time that the run waits for the checkpoint does not count as training.
        """
        assert self._checkpoints is not None
        waited = self._paused_s
        with self._pause():
            self._write_watched(wait=True)
            size = (self.folder / METRICS_FILE).stat().st_size if self._writes else 0
            about = {**self._record, "experiment": self._name, "batches": self._step, "metrics_bytes": size}
            self._checkpoints.save(self._step, state, strict_json(about))
        self._saving_s += self._paused_s - waited

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._read(self._pending.drain())
        started = time.perf_counter()
        processes.alive(processes.LONG)
        yield
        pause = time.perf_counter() - started
        self._paused_s += pause
        self._last_read += pause

    def finish(self) -> None:
        """Write the curves and the summary."""
        state = self.state
        self._read(self._pending.drain())
        processes.alive(processes.LONG)
        seconds = time.perf_counter() - self._started - self._paused_s
        timed = self._step - self._start - 1  # the first step compiles
        if self._checkpoints:
            self._checkpoints.wait()  # before the summary, so that a run with a summary has its last checkpoint
        self._test = self._test or self.experiment.evaluate(state)
        closing = self.experiment.closing(state, self._test)
        summary = self.summary = {
            "experiment": self._name,
            **{f"test_{name}": value for name, value in self._test.items()},
            **closing.numbers,
            "steps": self.experiment.steps,
            "skipped": int(state.skipped_steps),
            "loss_scale": float(state.loss_scale),
            "ms_per_step": 1000 * seconds / timed if timed > 0 else None,
            "examples_per_s": timed * self.experiment.batch_size / seconds if timed > 0 else None,
            **({"examples_are": self.experiment.unit} if self.experiment.unit != "examples" else {}),
            "input_wait": self._waiting_s / seconds if timed > 0 else None,
            "first_step_s": self._compile_s,
            **({"waited_for_checkpoints_s": self._saving_s} if self._checkpoints else {}),
            **({"resumed_at_step": self._start} if self._start else {}),
            **self.experiment.precision,
            **self._environment,
            "platform": jax.default_backend(),
        }
        if not self._writes:
            return
        texts = {title: _readable(text) for title, text in closing.texts.items()}
        if texts:
            summary["texts"] = texts
        write_json(self.folder / "summary.json", summary)
        lines = [f"# {self._name}", "", "| | |", "|---|---|"]
        shown = {name: value for name, value in summary.items() if name not in ("experiment", "texts")}
        lines += [f"| {name} | {_shown(name, value)} |" for name, value in shown.items()]
        lines += ["", "![curves](curves.png)", ""]
        for title, text in texts.items():
            lines += [f"## {title}", "", *(f"    {line}" for line in text.splitlines()), ""]
        (self.folder / "summary.md").write_text("\n".join(lines), encoding="utf-8")
        plots.curves(self._rows, self.folder / "curves.png", self._name)

    def _read(self, old: Iterable[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in old:
            now = time.perf_counter()
            elapsed, self._last_read = now - self._last_read, now
            training = now - self._started - self._paused_s
            row: dict[str, Any] = {**metrics, "step": step, "split": "train", "skipped": int(metrics["skipped"])}
            self._skipped += row["skipped"]
            if step > self._start + 1:
                row["examples_per_s"] = self.experiment.batch_size / max(elapsed, 1e-9)
                row["input_wait"] = self._waiting_s / max(training, 1e-9)
            self._write(row)
            timed = step - self._start - 1  # the first step compiles
            if not self._writes:
                continue
            rate = f"{timed * self.experiment.batch_size / max(training, 1e-9):,.0f} {self.experiment.unit}/s  "
            accuracy = f"accuracy {row['accuracy']:.1%}  " if "accuracy" in row else ""
            self._progress.advance(
                1,
                f"loss {row['loss']:.4f}  {accuracy}{rate if timed else ''}scale {row['loss_scale']:g}  "
                f"skipped {self._skipped}" + (f"  input wait {row['input_wait']:.1%}" if timed else ""),
            )

    def _earlier_rows(self, size: int) -> list[dict[str, Any]]:
        """Read the rows in the first ``size`` bytes of the file of metrics."""
        if not size:
            return []
        path, rows = self.folder / METRICS_FILE, []
        try:
            for row in csv.DictReader(path.read_bytes()[:size].decode().splitlines()):
                numbers = {name: float(text) for name, text in row.items() if text and name != "split"}
                rows.append({**numbers, "split": row["split"], "step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"a resumed run continues after its metrics, but {path} has something else ({error}); put the file "
                "back, or start another run"
            ) from error
        return rows

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._writer:
            metrics = {name: value for name, value in row.items() if name not in ("step", "split")}
            self._writer.write_metrics(row["step"], row["split"], metrics)

    def _write_watched(self, wait: bool) -> None:
        if self._watch and self._writer:
            self._writer.write_watched(self._watch, wait=wait)


def _readable(text: str) -> str:
    """Replace control characters, which would control the terminal.

    A model may write such characters.
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not measured: this process ran a single step, which compiled"
    if name == "loss_scale":
        return f"{value:g}"
    if isinstance(value, float):
        return f"{value:.2%}" if name in ("input_wait", "test_accuracy") else f"{value:,.5g}"
    return str(value)
