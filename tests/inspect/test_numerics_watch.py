"""Watching a run: its steps, its files, the commands and TensorBoard."""

import csv
import dataclasses
import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import jaxmp
from experiments import language_modeling
from experiments.training import loop, runs
from jaxmp import cli
from jaxmp.cli.watch import picture
from jaxmp.inspect import Watch, record
from jaxmp.inspect.run_files import WATCH_FILE, read_metrics, read_watched_steps
from jaxmp.inspect.run_writer import RunWriter

# Optax's Adam needs promotion. test_program.py and test_numerics.py test the values and counts of a watched step.
pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]


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
    rows = read_watched_steps(folder)
    assert [row["step"] for row in rows] == [2, 4] and summary["steps"] == 4
    assert all({"loss_scale", "recommended_scale", "dtype"} <= set(row) for row in rows)
    assert 0 <= rows[-1]["vanished"]["activation_gradients"]["NextToken"] < 1
    assert rows[-1]["ratio"]["Dense_0/kernel"] > 0


def test_the_command_says_what_it_needs(tmp_path, capsys):
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "a run's folder has metrics.csv" in capsys.readouterr().err
    (tmp_path / "metrics.csv").write_text("step,split,loss,grad_norm,loss_scale,skipped\n")
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert f"has no {WATCH_FILE}: watch the steps with jaxmp.inspect.Watch" in capsys.readouterr().err
    (tmp_path / WATCH_FILE).write_text("")  # before the first watched step
    assert cli.main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no step yet; no step was watched yet\n"
    assert cli.main(["watch", str(tmp_path), "--plot", str(tmp_path / "it.png")]) == 2
    assert "a heat map needs a watched step" in capsys.readouterr().err
    (tmp_path / "metrics.csv").write_text("epoch,split,loss\n1,train,2\n")  # of another program
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "metrics.csv has no step, grad_norm, loss_scale, skipped; pass the folder" in capsys.readouterr().err


def test_the_bars_of_one_step_are_under_those_of_another_at_80_columns():
    row = {"step": 1, "dtype": "float16", "recommended_scale": 8.0, "not_finite": 3}
    kinds = {"activation_gradients": {f"{n}/a_path_that_is_longer_than_its_column" * 3: 1.0 for n in "ab"},
             "gradients": {}}  # fmt: skip
    terminal = Console(width=80)
    with terminal.capture() as shown:
        terminal.print(picture(80, "title", [{**row, "vanished": kinds, "zeros": kinds}] * 50))
    lines = shown.get().splitlines()
    assert [line.rstrip().rpartition(" ")[2] for line in lines if "█" in line] == ["█" * 20] * 2
    assert max(map(len, lines)) <= 80 and "3 values not finite" in shown.get()


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(tmp_path):
    first, second = (f'{{"step": {n}, "vanished": {{}}}}\n' for n in (2, 4))
    for last in (second, second[:10], second[:4]):  # the last line of a process that was killed
        (tmp_path / WATCH_FILE).write_text(first + last)
        RunWriter(tmp_path, start=3).close()
        assert (tmp_path / WATCH_FILE).read_text() == first
    (tmp_path / WATCH_FILE).write_text(first + second[:4])  # a line that is being written
    assert read_watched_steps(tmp_path) == [json.loads(first)]


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


def test_the_command_shows_a_run(tmp_path, capsys):
    def loss_fn(params, model_state, batch, rng):
        with jax.named_scope("square"):
            loss = params**2
        return loss, model_state

    state = jaxmp.TrainState.create(params=jnp.float32(1), tx=optax.sgd(0.1))
    experiment = nine_steps(jaxmp.make_train_step(loss_fn))
    config = language_modeling.Config(checkpoint_every=0, evaluate_every=0, watch=2)
    with runs.Run("it", config, experiment, state, tmp_path, None) as run:
        for batch in zip(run.batches(), range(4), strict=False):
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
    capsys.readouterr()
    assert cli.main(["watch", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 4  loss" in shown and "activation gradients square" in shown and "watched at step 4" in shown
    assert cli.main(["watch", str(tmp_path), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [2, 4]


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


def test_watch_keeps_every_nth_step():
    watch = Watch(lambda params, x: 2e-10 * jnp.sum(params * x), every=3)
    returned = [watch(step, jnp.float32(1), jnp.ones(4), loss_scale=2.0**step) for step in range(1, 8)]
    assert [step_numerics is not None for step_numerics in returned] == [False, False, True, False, False, True, False]
    assert {step: step_numerics.loss_scale for step, step_numerics in watch.steps.items()} == {3: 8.0, 6: 64.0}
    assert watch.shares("gradients") == {"": [1.0, 0.0]}


def loss_fn(params, model_state, batch, rng):
    """Return the loss of two layers in scopes, with noise on the inputs."""
    x = batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape)
    with jax.named_scope("one"):
        y = jnp.tanh(x @ params["w"])
    with jax.named_scope("two"):
        z = y @ params["v"] * abs(params["phase"])
    return 1e-3 * jnp.mean((z - batch["y"]) ** 2), model_state, {"size": jnp.mean(abs(z))}


TX = jaxmp.loss_scaling(optax.adamw(1e-2), jaxmp.DynamicLossScale(2.0**8))
W, V, INPUTS, TARGETS = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)


def fresh_state():
    params = {"w": jnp.array(W), "v": jnp.array(V), "phase": jnp.array(INPUTS[0] + 1j * TARGETS[0])}
    return jaxmp.TrainState.create(params=params, tx=TX, rng=0)


def check_counts(step_numerics, before, after, metrics):
    assert (step_numerics.loss, step_numerics.loss_scale) == (float(metrics["loss"]), 2.0**8)
    assert list(step_numerics.activations) == list(step_numerics.activation_gradients) == ["one", "two"]
    assert step_numerics.activations["one"].count == step_numerics.activation_gradients["two"].count == 64
    assert step_numerics.gradients["w"].mean_abs > 0 and step_numerics.weights["w"].amax == abs(before["w"]).max()
    for name, update in step_numerics.updates.items():
        moved = np.asarray(after.params[name]) - before[name]
        parts = np.stack([moved.real, moved.imag]) if np.iscomplexobj(moved) else moved
        np.testing.assert_allclose((update.count, update.mean_abs), (parts.size, abs(parts).mean()), rtol=1e-4)
        np.testing.assert_allclose(update.ratio, np.linalg.norm(moved) / np.linalg.norm(before[name]), rtol=1e-4)


def test_a_watched_step_trains_as_the_plain_one_and_counts_what_it_computes():
    ends, batch = [], {"x": jnp.array(INPUTS), "y": jnp.array(TARGETS)}
    step = jaxmp.make_train_step(loss_fn, policy="mixed_float16", accumulate_steps=2, remat="dots")
    for every in (2, 100):
        state, watch = fresh_state(), Watch(step, every=every)
        for n in range(1, 4):
            before = jax.tree.map(np.array, state.params)
            state, metrics = watch(n, state, batch)
            if n == every:
                check_counts(watch.steps[n], before, state, metrics)
        ends.append((state.params, state.opt_state, metrics))
        assert list(watch.steps) == ([2] if every == 2 else [])
        assert set(metrics) == {"loss", "grad_norm", "loss_scale", "skipped", "size"}
    for watched_leaf, plain_leaf in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(watched_leaf, plain_leaf)


def test_a_watched_step_of_nnx_changes_model_and_optimizer():
    ends, step, tx = [], jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2)), optax.sgd(0.1)
    for every in (1, 100):
        model = jaxmp.nnx.apply_policy(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
        optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param)
        watch = Watch(step, every=every)
        for n in (1, 2):
            metrics = watch(n, model, optimizer, jnp.ones((4, 4)))
        ends.append((model.kernel[...], metrics))
        assert [step_numerics.loss for step_numerics in watch.steps.values()][1:] == (
            [float(metrics["loss"])] if every == 1 else []
        )
    for watched_leaf, plain_leaf in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(watched_leaf, plain_leaf)


def test_the_command_counts_a_function(tmp_path, monkeypatch, capsys):
    (tmp_path / "numerics_model.py").write_text(
        "import numpy as np\n"
        "def loss_fn(w, x):\n    return 1e-9 * (x @ w).sum()\n"
        "def args():\n    return np.ones((3, 2), np.float32), np.ones((4, 3), np.float32)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["numerics", "numerics_model:loss_fn", "--args", "numerics_model:args"]) == 0
    assert "gradients" in capsys.readouterr().out
    command = ["numerics", "numerics_model:loss_fn", "--args", "numerics_model:args", "--loss-scale"]
    assert cli.main([*command, "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradients"][""]["amax"] == float(np.float32(4 * np.float32(1e-9)))
    assert cli.main([*command, "3"]) == 2
    assert "jaxmp numerics: error: loss_scale must be a power of two here" in capsys.readouterr().err


@pytest.mark.slow("trains a model on text")
def test_tensorboard_gets_the_metrics_of_each_step_and_what_was_counted(run):
    _, folder, _ = run
    board, *_ = BOARDS
    assert board.closed and board.folder == str(folder / "tensorboard") and board.purge_step is None
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        names = ("loss", "accuracy") if row["split"] == "test" else ("loss", "accuracy", "grad_norm", "loss_scale")
        for name in names:
            assert board.scalars[f"{row['split']}/{name}", int(row["step"])] == pytest.approx(float(row[name]), 1e-6)
    lines = read_watched_steps(folder)
    expected = {}
    for line in lines:
        for share_name in ("vanished", "zeros"):
            for kind, shares in line[share_name].items():
                expected |= {(f"{kind}/{share_name}/{path}", line["step"]): share for path, share in shares.items()}
    written = {key: value for key, value in board.scalars.items() if not key[0].startswith(("train/", "test/"))}
    assert written == expected and len({step for _, step in expected}) == 2


def test_tensorboard_goes_on_where_a_run_is_resumed_and_needs_a_package(tmp_path, monkeypatch):
    BOARDS.clear()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Board))
    RunWriter(tmp_path, start=3, tensorboard=True).close()
    assert BOARDS[0].purge_step == 4 and BOARDS[0].closed
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboardX"), record(tmp_path, tensorboard=True):
        pytest.fail("there is no writer")
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"), record(tmp_path, wandb=True):
        pytest.fail("there is no writer")


def test_tensorboard_gets_the_numbers_that_were_logged_and_no_others(tmp_path, monkeypatch):
    BOARDS.clear()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Board))
    left = tmp_path / "tensorboard" / "events of an earlier run"
    left.mkdir(parents=True)
    with record(tmp_path, tensorboard=True) as run:
        run.log(1, {"loss": 0.5, "rate": jnp.float32(0.1), "by layer": jnp.ones(3), "phase": "warm-up"})
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
    with record(tmp_path / "half", wandb=True) as run:
        run.watch(watch)
        for step in (1, 2):
            watch(step, jnp.float32(1), jnp.zeros(4))
            run.log(step, {"loss": jnp.float32(0.5), "lr": 0.25})
    assert started == [{"name": "half", "dir": str(tmp_path / "half")}] and wandb_run.finished
    metrics = [numbers for numbers in wandb_run.logged if "train/loss" in numbers]
    assert [numbers["step"] for numbers in metrics] == [1, 2] and metrics[0]["train/lr"] == 0.25
    (counts,) = (numbers for numbers in wandb_run.logged if "train/loss" not in numbers)
    assert counts["step"] == 2 and counts["gradients/zeros/"] == 1
    assert read_metrics(tmp_path / "half")[0]["loss"] == "0.5"


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboardX")
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    writer = RunWriter(tmp_path, tensorboard=True)
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
