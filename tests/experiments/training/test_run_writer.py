"""The files that a run writes during training, and what TensorBoard and Weights & Biases get."""

import csv
import json
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from experiments.training import loop
from experiments.training.run_writer import WATCH_FILE, RunWriter
from jaxmp.inspect import Watch


class Board:
    """A tracker that keeps its numbers in memory."""

    def __init__(self, *args, **settings):
        self.settings, self.scalars, self.logged, self.is_closed = settings, {}, [], False

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, numbers):
        self.logged.append(numbers)

    def close(self):
        self.is_closed = True

    finish = close


@pytest.fixture
def boards(monkeypatch):
    made = []

    def make(*args, **settings):
        made.append(Board(*args, **settings))
        return made[-1]

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=make))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=make))
    return made


def watch_two_steps(writer):
    watch = Watch(lambda params, x: jnp.sum(params * x), every=2)
    for step in (1, 2):
        watch(step, jnp.float32(1), jnp.zeros(4))
        writer.write_metrics(step, "train", {"loss": jnp.float32(0.5), "lr": 0.25, "phase": "warm-up"})
        writer.write_watched(watch, wait=True)


def test_metrics_and_watched_steps_are_in_the_files_at_once(tmp_path):
    writer = RunWriter(tmp_path, loop.COLUMNS)
    watch_two_steps(writer)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"]) for row in rows] == [("1", "0.5"), ("2", "0.5")]
    (line,) = (tmp_path / WATCH_FILE).read_text().splitlines()
    assert json.loads(line)["step"] == 2 and json.loads(line)["gradients/zeros"] == 1
    writer.close()


def test_trackers_get_every_number_with_its_step(tmp_path, boards):
    (tmp_path / "half").mkdir()
    writer = RunWriter(tmp_path / "half", loop.COLUMNS, start=3, tensorboard=True, wandb=True)
    watch_two_steps(writer)
    writer.close()
    wandb, tensorboard = boards
    assert wandb.settings == {"name": "half", "dir": str(tmp_path / "half")} and wandb.is_closed
    assert tensorboard.settings == {"purge_step": 4} and tensorboard.is_closed
    assert tensorboard.scalars["train/lr", 1] == 0.25 and tensorboard.scalars["gradients/zeros", 2] == 1
    assert [numbers["step"] for numbers in wandb.logged] == [1, 2, 2]
