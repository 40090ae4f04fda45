"""The training loop of every script.

The loop starts a run, or resumes a run from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jaxmp
from experiments.report.json_files import strict_json
from experiments.training import cli, processes
from experiments.training.experiment import Experiment
from experiments.training.run_folders import alone_in, checkpoints_folder, folder_to_resume, run_folder
from experiments.training.runs import Run

if TYPE_CHECKING:  # the module imports Orbax, which is needed only for checkpoints
    from experiments.training.checkpoints import Checkpoint

C = TypeVar("C", bound=cli.Training)

# Flags in which runs of an experiment may differ. A comparison sets them itself, and a resumed run may change them.
OF_A_RUN = frozenset(
    ("policy", "loss_scale", "opt_level", "autocast", "checkpoint_every", "keep", "resume", "data_dir", "run_dir",
     "watch", "tensorboard", "wandb", "mesh", "coordinator", "processes", "process_id", "stall_seconds")
)  # fmt: skip
# Flags that a resumed run may change. If the precision changes, the state is converted.
MAY_CHANGE = OF_A_RUN | {
    "override", "remat", "steps", "epochs", "evaluate_every", "memory_limit", "prompt", "sample_tokens", "temperature",
    "top_k",
}  # fmt: skip
_LENGTH = frozenset(("steps", "epochs"))


def train(name: str, config: C, prepare: Callable[[C], Experiment]) -> dict[str, Any]:
    """Train as the scripts do, and return the summary of the run.

    See :func:`running`.
    """
    with running(name, config, prepare) as run:
        for batch in run.batches():
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
    return run.summary


@contextlib.contextmanager
def running(
    name: str, config: C, prepare: Callable[[C], Experiment], largest_batch: Callable[[C], int] | None = None
) -> Iterator[Any]:
    """Open a run in its folder, from its first step or its last checkpoint.

    The block loops over its batches. When the block ends, the run is evaluated and ``run.summary`` has the results,
    unless SIGTERM stopped the run before its last step. If the folder cannot be written to any more, the process ends
    with one line. If there are several processes, all call this function. The first process makes the folder, writes to
    it and shows progress.

    Args:
      name: the name of the experiment, for the run folder.
      config: the flags.
      prepare: makes the experiment that the flags describe.
      largest_batch: returns the largest useful batch for the flags, for ``--batch-size auto``.
    """
    with contextlib.ExitStack() as locks:
        with cli.bad_values_end_it():
            if largest_batch is not None and (config.batch_size == "auto" or config.memory_limit is not None):
                from experiments.training import batch_size

                config = batch_size.settled(name, config, prepare, largest_batch)
            if processes.several() and config.watch:
                raise ValueError("--watch works in a single process only; leave it out with --processes")
            run = (_resume if config.resume else _start)(name, config, prepare, locks)
        if isinstance(run, Finished):
            yield run
            return
        try:
            with run:
                yield run
                if not run.stopped:
                    run.finish()
        except OSError as error:
            folder = checkpoints_folder(run.folder)
            is_saved = folder.is_dir() and jaxmp.checkpoint.list_steps(folder)
            remedy = "continue with --resume" if is_saved else "start again"
            cli.fail(f"the run in {run.folder} cannot continue: {error}; once there is room, {remedy}", 1)
    _tell_the_end(run)


def _start(name: str, config: C, prepare: Callable[[C], Experiment], locks: contextlib.ExitStack) -> Run:
    """Begin a run in a new folder, or in ``--run-dir``."""
    experiment = processes.together(lambda: prepare(config), first_before=True)

    def new_folder() -> Path:
        folder = locks.enter_context(alone_in(run_folder(name, config.run_dir)))
        require_new(folder)
        return folder

    folder = processes.folder_of_first(new_folder)
    return Run(name, config, experiment, experiment.init(config.seed), folder, None)


def _resume(name: str, config: C, prepare: Callable[[C], Experiment], locks: contextlib.ExitStack) -> Run | Finished:
    """Resume the run that the flags name, from its last checkpoint."""

    def locked_folder() -> Path:
        return locks.enter_context(alone_in(folder_to_resume(name, config.run_dir)))

    folder = processes.folder_of_first(locked_folder)
    checkpoint = processes.together(lambda: to_resume(name, config, folder))
    experiment = processes.together(lambda: prepare(config), first_before=True)
    require_same_data(checkpoint, experiment, config.seed)
    summary = finished(folder, checkpoint, experiment)
    if summary is not None:
        tell(f"{folder} has trained all its {experiment.steps} steps; raise --steps to train further")
        return Finished(summary)
    state = checkpoint.restore(experiment.init(config.seed))
    tell(f"resuming {folder} at step {checkpoint.step}", file=sys.stderr)
    return Run(name, config, experiment, state, folder, checkpoint)


def _tell_the_end(run: Run) -> None:
    """Print the result of a run, or how to continue it."""
    if run.stopped:
        tell(
            f"stopped by SIGTERM after step {run.step}, which is saved; to continue, run the same command with "
            f"--resume --run-dir {shlex.quote(str(run.folder))}"
        )
        return
    tell(
        f"held-out accuracy {run.summary['test_accuracy']:.2%}, loss {run.summary['test_loss']:.4f}, "
        f"{run.summary['skipped']} of {run.summary['steps']} steps skipped; written to {run.folder}"
    )
    for title, text in run.summary.get("texts", {}).items():
        tell(f"\n{title}\n\n{text}")


def tell(text: str, **options: Any) -> None:
    """Print a text in the first process only."""
    if processes.first():
        print(text, **options)


class Finished(NamedTuple):
    """A run that trained all its steps in an earlier process."""

    summary: dict[str, Any]

    def batches(self) -> tuple[()]:
        """Return no batches, because no steps are left."""
        return ()


def require_new(folder: Path) -> None:
    """Check that a run may begin in a folder.

    Raises:
      ValueError: the folder has checkpoints or the summary of another run.
    """
    earlier = checkpoints_folder(folder)
    steps = jaxmp.checkpoint.list_steps(earlier) if earlier.is_dir() else []
    if steps:
        raise ValueError(
            f"a run begins in a folder without checkpoints, but {folder} has one of step {steps[-1]}; continue "
            "with --resume, or take another --run-dir"
        )
    if (folder / "summary.json").exists():
        raise ValueError(
            f"a run begins in a folder without a finished run, but {folder} has summary.json; take another --run-dir, "
            "or remove that folder"
        )


def to_resume(name: str, config: cli.Training, folder: Path) -> Checkpoint:
    """Return the last checkpoint of the run in a folder.

    Raises:
      ValueError: there is no checkpoint, or the flags differ from those of the run.
    """
    from experiments.training import checkpoints

    for path in checkpoints.unfinished(checkpoints_folder(folder)):
        tell(f"warning: {path} was not finished when its process ended, and is ignored", file=sys.stderr)
    checkpoint = checkpoints.read_last(checkpoints_folder(folder))
    require_same_flags(name, config, checkpoint)
    metrics, size = folder / "metrics.csv", checkpoint.about["metrics_bytes"]
    if not metrics.is_file() or metrics.stat().st_size < size:
        raise ValueError(
            f"a resumed run continues after the first {size} bytes of its metrics, but {metrics} has fewer; put the "
            "file back, or start another run"
        )
    return checkpoint


def require_same_flags(name: str, config: cli.Training, checkpoint: Checkpoint) -> None:
    """Check that no flag was changed that a resumed run must keep.

    Raises:
      ValueError: such a flag was changed, or the checkpoint is of another experiment.
    """
    began = checkpoint.about["experiment"]
    if began != name:
        raise ValueError(f"--resume continues a run of {name}, but {checkpoint.folder} is of {began}")
    before = checkpoint.about["config"]
    # With a schedule, the learning rate depends on the number of steps.
    may_change = MAY_CHANGE if getattr(config, "schedule", "constant") == "constant" else MAY_CHANGE - _LENGTH
    changed, remedy = [], []
    for field in dataclasses.fields(config):
        now = strict_json(getattr(config, field.name))
        then = before.get(field.name, strict_json(field.default))
        if field.name not in may_change and now != then:
            flag = f"--{field.name.replace('_', '-')}"
            changed.append(f"{flag} was {then} and is {now} now")
            remedy.append(f"without {flag}" if then is False else f"with {flag if then is True else f'{flag} {then}'}")
    if changed:
        raise ValueError(
            f"a resumed run keeps its flags, but in {checkpoint.folder.parents[1]} {', '.join(changed)}; resume "
            f"{' and '.join(remedy)}, or start another run"
        )


def require_same_data(checkpoint: Checkpoint, experiment: Experiment, seed: int) -> None:
    """Check that the examples are the same as when the run began.

    The data may be in another folder.

    Raises:
      ValueError: the examples are different.
    """
    there = checkpoint.about["precision"].get("data", "data"), checkpoint.about["examples"]
    here = experiment.precision.get("data", "data"), experiment.examples(seed)
    if there != here:
        was, now = (f"{origin!r} (first batch {examples})" for origin, examples in (there, here))
        raise ValueError(
            f"a resumed run keeps its data, but {checkpoint.folder.parents[1]} was trained on {was} and here is {now}; "
            "resume with the --data-dir of that run, or start another run"
        )


def finished(folder: Path, checkpoint: Checkpoint, experiment: Experiment) -> dict[str, Any] | None:
    """Return the summary of a run that has trained all its steps.

    The result is None if the run has steps left.

    Raises:
      ValueError: the run has trained more steps than the flags ask for, or its summary is damaged.
    """
    if checkpoint.step > experiment.steps:
        raise ValueError(
            f"--steps must be at least the {checkpoint.step} that {folder} has trained, got {experiment.steps}; "
            "start another run to train less"
        )
    path = folder / "summary.json"
    if checkpoint.step < experiment.steps or not path.is_file():
        return None
    try:
        summary = json.loads(path.read_text())
        return summary if summary["steps"] == experiment.steps else None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a summary of a run ({type(error).__name__}: {error}); remove it, and --resume writes a new "
            "one"
        ) from error
