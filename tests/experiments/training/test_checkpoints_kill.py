"""A run that is killed, even while it saves, ends like an undisturbed run."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

import pytest
from checkpoint_tools import Config, bits, last, leaves, processes, rows, train_in_step

import jaxmp
from experiments.training import checkpoints, run_folders

STEPS, PATIENCE_S = 30, 300
# The state has 1.6 MB that change at every step, so that Orbax writes for longer than a step takes.
CONFIG = Config(steps=STEPS, checkpoint_every=3, evaluate_every=10, ballast=400_000)


class Process:
    """A run in a new process, which waits for a command before each step."""

    def __init__(self, config: Config, cache: Path) -> None:
        context = processes()
        self._pipe, childs = context.Pipe()
        self._process = context.Process(target=train_in_step, args=(childs, config, cache), daemon=True)
        self._process.start()
        childs.close()
        self._resumes = config.resume
        self._folder = run_folders.checkpoints_folder(config.run_dir)

    def first_step(self) -> int:
        """Let the run begin its first step, and return the number of that step.

        A resumed run reads its first batch again before that, to compare the data.
        """
        while (step := self._next()) == 1 and self._resumes:
            self._pipe.send(None)
        self._pipe.send(None)
        return step

    def train_to(self, step: int) -> None:
        """Let the run begin ``step`` and no later step. After the last step, let it end."""
        try:
            while self._next() < step:
                self._pipe.send(None)
            self._pipe.send(None)
        except EOFError:
            assert step > STEPS

    def train_into_a_save(self) -> None:
        """Let the run continue until the folder of an unfinished checkpoint exists."""
        while not checkpoints.unfinished(self._folder):
            if self._pipe.poll(0.001):
                self._pipe.recv()
                self._pipe.send(None)

    def train_out_of_a_save(self) -> None:
        """Let the run finish its current save, and continue for a moment."""
        while checkpoints.unfinished(self._folder):
            time.sleep(0.001)
        self.train_to(0)

    def _next(self) -> int:
        assert self._pipe.poll(PATIENCE_S), "the run hangs"
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self.train_to(STEPS + 1)
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0


@pytest.mark.slow("kills processes")
def test_a_run_killed_twice_ends_bit_for_bit_like_an_undisturbed_run(tmp_path):
    cache = tmp_path / "compiled"  # written by the undisturbed run, so that no process is killed while it writes here
    alone = dataclasses.replace(CONFIG, run_dir=tmp_path / "alone")
    killed = dataclasses.replace(CONFIG, run_dir=tmp_path / "killed")
    folder = run_folders.checkpoints_folder(killed.run_dir)
    Process(alone, cache).end()

    def start() -> Process:
        """Begin the run, or continue it from its last checkpoint."""
        saved = jaxmp.checkpoint.list_steps(folder)
        run = Process(dataclasses.replace(killed, resume=bool(saved)), cache)
        assert run.first_step() == (saved[-1] if saved else 0) + 1
        return run

    for step in (2, 8, 14, 20, 26):  # a save may end just before the kill
        run = start()
        run.train_to(step)
        run.train_into_a_save()
        run.kill()
        if checkpoints.unfinished(folder):
            break
    assert checkpoints.unfinished(folder)

    run = start()
    run.train_to(step + 2)
    run.train_out_of_a_save()
    run.kill()
    start().end()

    expected, resumed = last(alone.run_dir), last(killed.run_dir)
    assert expected.step == resumed.step == STEPS and expected.about["batches"] == resumed.about["batches"] == STEPS
    assert bits(expected) == bits(resumed)
    assert leaves(expected)["opt_state/skipped_steps"] > 0 and leaves(expected)["params/hidden"].any()
    assert rows(alone.run_dir) == rows(killed.run_dir)
    assert not checkpoints.unfinished(folder)
