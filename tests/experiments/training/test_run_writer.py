"""The files that a run writes during training, and what TensorBoard and Weights & Biases get."""

import csv
import dataclasses
import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import optax
import pytest

import jaxmp
from experiments import language_modeling
from experiments.training import loop, runs
from experiments.training.run_writer import WATCH_FILE, RunWriter
from jaxmp.inspect import Watch

pytestmark = pytest.mark.usefixtures("standard_promotion")

BOARDS = []
TEXTS = Path(sysconfig.get_path("stdlib"), "concurrent")  # a small package, because reading is slow


class Board:
    """A SummaryWriter that keeps its scalars in memory."""

    def __init__(self, folder, purge_step=None):
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, {}, False
        BOARDS.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def close(self):
        self.closed = True


def read_metrics(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_watched(folder):
    return [json.loads(line) for line in (folder / WATCH_FILE).read_text().splitlines()]


def settings(folder, **changes):
    config = language_modeling.Config(
        dataset=str(TEXTS), policy="float32", loss_scale="none", steps=4, batch_size=64, vocabulary=256,
        test_batches=1, watch=2, tensorboard=True, data_dir=folder / "data", run_dir=folder / "run", checkpoint_every=0,
    )  # fmt: skip
    return language_modeling.text_training.settled(dataclasses.replace(config, **changes), "next_token")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a language model in float32, and return its summary, folder and settings."""
    BOARDS.clear()  # they may hold the boards of an earlier use of this fixture
    folder = tmp_path_factory.mktemp("watched")
    config = settings(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Board))
        return loop.train("language_modeling", config, language_modeling.prepare), folder / "run", config


@pytest.mark.slow("trains a model on text; a run of two numbers is in the tests below")
def test_a_watched_run_writes_what_was_counted(run):
    summary, folder, _ = run
    rows = read_watched(folder)
    assert [row["step"] for row in rows] == [2, 4] and summary["steps"] == 4
    assert 0 <= rows[-1]["activation_gradients/vanished/NextToken"] < 1
    assert rows[-1]["updates/ratio/Dense_0/kernel"] > 0


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(tmp_path):
    first, second = (f'{{"step": {n}, "gradients/zeros": 0.0}}\n' for n in (2, 4))
    for last in (second, second[:10], second[:4]):  # the last line of a process that was killed
        (tmp_path / WATCH_FILE).write_text(first + last)
        RunWriter(tmp_path, runs.COLUMNS, start=3).close()
        assert (tmp_path / WATCH_FILE).read_text() == first
    RunWriter(tmp_path, runs.COLUMNS).close()
    assert not (tmp_path / WATCH_FILE).exists()


def nine_steps(step):
    fields = {"step": step, "steps": 9, "precision": {}, "unit": "examples", "batch_size": 1, "cast_plan": None,
              "create_on_mesh": None,
              "train_batches": lambda seed, start: iter(range(9))}  # fmt: skip
    return dataclasses.make_dataclass("Few", fields)(**fields)


def test_whoever_watches_reads_each_step_at_once_and_nothing_of_an_earlier_run(tmp_path):
    step = jaxmp.make_train_step(lambda params, model_state, batch, rng: (params**2, model_state))
    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(2.0**24))
    state = jaxmp.TrainState.create(params=jnp.float32(1), tx=tx)
    experiment = nine_steps(step)
    for name in (WATCH_FILE, "summary.json"):
        (tmp_path / name).write_text('{"step": 1}\n')
    config = language_modeling.Config(checkpoint_every=0, evaluate_every=0)
    with runs.Run("it", config, experiment, state, tmp_path, None) as run:
        assert not (tmp_path / WATCH_FILE).exists() and not (tmp_path / "summary.json").exists()
        for batch in zip(run.batches(), range(8), strict=False):
            run.state, metrics = step(run.state, batch)
            run.log(metrics)
        run._read(run._pending.drain())
        logged_scales = [(row["step"], row["loss_scale"]) for row in read_metrics(tmp_path)]
    assert logged_scales == [(str(n), str(2**24)) for n in range(1, 9)]


def test_the_time_of_a_run_whose_first_step_is_watched_is_that_of_its_steps(tmp_path):
    step = jaxmp.make_train_step(lambda params, model_state, batch, rng: (params**2, model_state))
    state = jaxmp.TrainState.create(params=jnp.float32(1), tx=optax.sgd(0.1))
    experiment = nine_steps(step)
    checkpoint = SimpleNamespace(step=1, about={"metrics_bytes": 0})
    config = language_modeling.Config(checkpoint_every=0, evaluate_every=0, watch=2)
    with runs.Run("it", config, experiment, state, tmp_path, checkpoint) as run:
        pauses = []
        for batch in zip(run.batches(), range(4), strict=False):
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
            pauses.append(run._paused_s)
        run._read(run._pending.drain())
    assert pauses[0] == 0 < pauses[1] == pauses[3]  # the step that is not watched compiles next
    assert all(row["input_wait"] < 1 for row in run._rows[1:])


@pytest.mark.slow("trains a model on text")
def test_tensorboard_gets_the_metrics_of_each_step_and_what_was_counted(run):
    _, folder, _ = run
    board, *_ = BOARDS
    assert board.closed and board.folder == str(folder / "tensorboard") and board.purge_step is None
    for row in read_metrics(folder):
        names = ("loss", "accuracy") if row["split"] == "test" else ("loss", "accuracy", "grad_norm", "loss_scale")
        for name in names:
            assert board.scalars[f"{row['split']}/{name}", int(row["step"])] == pytest.approx(float(row[name]), 1e-6)
    expected = {}
    for line in read_watched(folder):
        step = line.pop("step")
        expected |= {(name, step): number for name, number in line.items()}
    written = {key: value for key, value in board.scalars.items() if not key[0].startswith(("train/", "test/"))}
    assert written == expected and len({step for _, step in expected}) == 2


def test_tensorboard_goes_on_where_a_run_is_resumed_and_needs_a_package(tmp_path, monkeypatch):
    BOARDS.clear()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Board))
    RunWriter(tmp_path, runs.COLUMNS, start=3, tensorboard=True).close()
    assert BOARDS[0].purge_step == 4 and BOARDS[0].closed
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboardX"):
        RunWriter(tmp_path, runs.COLUMNS, tensorboard=True)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        RunWriter(tmp_path, runs.COLUMNS, wandb=True)


def test_tensorboard_gets_the_numbers_that_were_logged_and_no_others(tmp_path, monkeypatch):
    BOARDS.clear()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Board))
    left = tmp_path / "tensorboard" / "events of an earlier run"
    left.mkdir(parents=True)
    writer = RunWriter(tmp_path, runs.COLUMNS, tensorboard=True)
    metrics = {"loss": 0.5, "rate": jnp.float32(0.1), "by layer": jnp.ones(3), "phase": "warm-up"}
    writer.write_metrics(1, "train", metrics)
    writer.close()
    assert BOARDS[0].scalars == {("train/loss", 1): 0.5, ("train/rate", 1): pytest.approx(0.1)}
    assert not left.exists()


def test_weights_and_biases_gets_every_number_with_its_step(tmp_path, monkeypatch):
    class WandbRun:
        def __init__(self):
            self.logged, self.finished = [], False

        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, numbers):
            self.logged.append(numbers)

        def finish(self):
            self.finished = True

    started, wandb_run = [], WandbRun()

    def init(**settings):
        started.append(settings)
        return wandb_run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    watch = Watch(lambda params, x: jnp.sum(params * x), every=2)
    (tmp_path / "half").mkdir()
    writer = RunWriter(tmp_path / "half", runs.COLUMNS, wandb=True)
    for step in (1, 2):
        watch(step, jnp.float32(1), jnp.zeros(4))
        writer.write_metrics(step, "train", {"loss": jnp.float32(0.5), "lr": 0.25})
        writer.write_watched(watch)
    writer.close()
    assert started == [{"name": "half", "dir": str(tmp_path / "half")}] and wandb_run.finished
    metrics = [numbers for numbers in wandb_run.logged if "train/loss" in numbers]
    assert [numbers["step"] for numbers in metrics] == [1, 2] and metrics[0]["train/lr"] == 0.25
    (counts,) = (numbers for numbers in wandb_run.logged if "train/loss" not in numbers)
    assert counts["step"] == 2 and counts["gradients/zeros"] == 1
    assert read_metrics(tmp_path / "half")[0]["loss"] == "0.5"


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboardX")
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    writer = RunWriter(tmp_path, runs.COLUMNS, tensorboard=True)
    writer.write_metrics(7, "train", {"loss": 0.25})
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # records of TensorFlow: length, its checksum, an event, its checksum
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        events += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    assert events == [(7, "train/loss", 0.25)]
