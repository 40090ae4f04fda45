"""--resume: a stopped run ends like an undisturbed run, or an error says why."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest
from checkpoint_tools import NAME, Config, bits, last, leaves, prepare, rows, train
from places import ROOT

import jaxmp
from experiments import image_classification, language_modeling
from experiments.report import json_files
from experiments.training import loop, runs

pytestmark = pytest.mark.usefixtures("empty_curves")


def stopped(folder: Path, after: int) -> Path:
    """Make a finished run look as if it was killed after the checkpoint of a step.

    The run was writing a later row of its metrics.
    """
    for step in jaxmp.checkpoint.list_steps(folder / "checkpoints"):
        if step > after:
            shutil.rmtree(folder / "checkpoints" / str(step))
    for name in ("summary.json", "summary.md", "curves.png"):
        (folder / name).unlink()
    with (folder / "metrics.csv").open("a") as file:
        file.write("1,trai")
    return folder


def ends_with(config: Any, train: Callable[[Any], Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train(config)
    assert end.value.code == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, Any]]:
    """Return an undisturbed run of 8 steps, and its summary."""
    config = Config(run_dir=tmp_path_factory.mktemp("runs") / "whole", keep=9)
    return config, train(config)


@pytest.fixture
def run(undisturbed, tmp_path) -> Config:
    """Return the flags to resume that run, as if it was killed after step 4."""
    shutil.copytree(undisturbed[0].run_dir, tmp_path / "run")
    return dataclasses.replace(undisturbed[0], run_dir=stopped(tmp_path / "run", after=4), resume=True)


# --- the same, bit for bit -------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_where_the_other_ends_with_its_metrics_and_summary(undisturbed, run, monkeypatch, capsys):
    shown = []

    class Progress(runs.Progress):
        def __init__(self, *args: Any) -> None:
            shown.append(args)
            super().__init__(*args)

    monkeypatch.setattr(runs, "Progress", Progress)
    half = run.run_dir / "checkpoints" / "6.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    summary = train(run)
    assert shown == [(NAME, 8, 4)]
    said = capsys.readouterr().err
    assert f"warning: {half} was not finished when its process ended, and is ignored" in said and not half.exists()
    assert bits(last(run.run_dir)) == bits(last(undisturbed[0].run_dir))
    assert rows(run.run_dir) == rows(undisturbed[0].run_dir)
    assert [row[:2] for row in rows(run.run_dir)] == [
        ["1", "train"], ["2", "train"], ["3", "train"], ["3", "test"], ["4", "train"], ["5", "train"], ["6", "train"],
        ["6", "test"], ["7", "train"], ["8", "train"], ["8", "test"],
    ]  # fmt: skip
    assert summary["resumed_at_step"] == 4 and "resumed_at_step" not in undisturbed[1]
    same = ("test_loss", "test_accuracy", "steps", "skipped", "loss_scale", "policy", "loss_scale_rule")
    assert [summary[name] for name in same] == [undisturbed[1][name] for name in same]
    assert summary["skipped"] > 0 and json.loads((run.run_dir / "summary.json").read_text())["steps"] == 8
    assert f"resuming {run.run_dir} at step 4" in said


def test_sigterm_saves_the_current_step_and_the_run_resumes_from_there(undisturbed, tmp_path, capsys):
    def terminated(config: Config) -> Any:
        experiment = prepare(config)

        def train_batches(seed: int, start: int = 0) -> Any:
            for step, batch in enumerate(experiment.train_batches(seed, start), start + 1):
                if step == 3:
                    assert signal.getsignal(signal.SIGTERM) is not before  # else it would end the tests
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return dataclasses.replace(experiment, train_batches=train_batches)

    before = signal.getsignal(signal.SIGTERM)
    config = dataclasses.replace(undisturbed[0], run_dir=tmp_path / "a run")
    with jax.numpy_dtype_promotion("standard"):
        assert loop.train(NAME, config, terminated) == {}
    assert signal.getsignal(signal.SIGTERM) is before
    assert jaxmp.checkpoint.list_steps(config.run_dir / "checkpoints") == [2, 3]
    assert not (config.run_dir / "summary.json").exists()
    said = "stopped by SIGTERM after step 3, which is saved; to continue, run the same command with --resume --run-dir "
    assert f"{said}'{config.run_dir}'\n" in capsys.readouterr().out
    assert train(dataclasses.replace(config, resume=True))["resumed_at_step"] == 3
    assert bits(last(config.run_dir)) == bits(last(undisturbed[0].run_dir))
    assert rows(config.run_dir) == rows(undisturbed[0].run_dir)


def test_a_finished_run_says_so_and_is_left_alone(undisturbed, capsys):
    config, summary = undisturbed
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in config.run_dir.rglob("*")}
    again = train(dataclasses.replace(config, resume=True))
    assert again == json.loads(json.dumps(json_files.strict_json(summary)))
    assert f"{config.run_dir} has trained all its 8 steps; raise --steps to train further" in capsys.readouterr().out
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in config.run_dir.rglob("*")}


@pytest.mark.slow("trains twice")
def test_a_finished_run_trains_on_when_steps_are_raised(undisturbed, tmp_path):
    config = dataclasses.replace(undisturbed[0], run_dir=tmp_path / "run", steps=5)
    train(config)
    train(dataclasses.replace(config, steps=8, resume=True, evaluate_every=4, checkpoint_every=3, keep=2))
    assert bits(last(config.run_dir)) == bits(last(undisturbed[0].run_dir))
    assert jaxmp.checkpoint.list_steps(config.run_dir / "checkpoints") == [6, 8]
    tests = [row[0] for row in rows(config.run_dir) if row[1] == "test"]
    assert tests == ["3", "5", "8"]  # the evaluation at the old end


@pytest.mark.slow("trains a network twice")
def test_a_script_resumes_bit_for_bit(tmp_path, data_dir):
    flags = {
        "policy": "mixed_float16", "loss_scale": "dynamic:loss_scale=65536,period=2", "accumulate": 2, "ema": 0.9,
        "steps": 10, "evaluate_every": 4, "checkpoint_every": 4, "data_dir": data_dir, "shift": 2,
        "batch_size": 200,  # an epoch has 7 batches, so the run is resumed in the second epoch
    }  # fmt: skip
    config = image_classification.Config(run_dir=tmp_path / "whole", **flags)
    with jax.numpy_dtype_promotion("standard"):
        image_classification.train(config)
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        stopped(tmp_path / "run", after=8)
        image_classification.train(dataclasses.replace(config, run_dir=tmp_path / "run", resume=True))
    expected, resumed = last(tmp_path / "whole"), last(tmp_path / "run")
    assert expected.step == resumed.step == 10 and bits(expected) == bits(resumed)
    assert leaves(expected)["opt_state/skipped_steps"] > 0
    assert any(name.startswith("ema_params/") for name in leaves(expected))
    assert rows(tmp_path / "whole") == rows(tmp_path / "run")


# --- when a run may be resumed -------------------------------------------------------------------------------------


def test_without_a_folder_it_is_the_newest_run_of_the_experiment(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(run, run_dir=None)
    ends_with(config, train, f"runs/ has no run of {NAME}; give its folder with --run-dir, or start without", capsys)
    for name in ("20260101-000000-2", "20260101-000000-10", "20251231-235959", "20260101-000000", "20260301-000000"):
        (tmp_path / "runs" / f"{NAME}-{name}").mkdir(parents=True)
    newest = tmp_path / "runs" / f"{NAME}-20260101-000000-10"  # the run of March has no config.json
    for folder in newest.parent.iterdir():
        if "20260301" not in folder.name:
            shutil.copytree(run.run_dir, folder, dirs_exist_ok=True)
    train(config)
    assert [folder.name for folder in newest.parent.iterdir() if (folder / "summary.json").is_file()] == [newest.name]


def test_flags_that_a_resumed_run_must_keep_are_checked(run, capsys):
    where = f"{run.run_dir}"
    keeps = f"a resumed run keeps its flags, but in {where} "
    for changes, message in (
        ({"batch_size": 32}, f"{keeps}--batch-size was 16 and is 32 now; resume with --batch-size 16, or start anothe"),
        ({"learning_rate": 0.1}, f"{keeps}--learning-rate was 0.01 and is 0.1 now; resume with --learning-rate 0.01, "),
        ({"dataset": "mnist"}, "--dataset was digits and is mnist now; resume with --dataset digits, or"),
        ({"accumulate": 1}, "--accumulate was 2 and is 1 now"),
        ({"ema": 0.0}, "--ema was 0.9 and is 0.0 now"),
        ({"seed": 1, "width": 4}, "--seed was 0 and is 1 now, --width was 8 and is 4 now; resume with --seed 0 and wi"),
        ({"flip": True}, "--flip was False and is True now; resume without --flip, or"),
        ({"steps": 3}, f"--steps must be at least the 4 that {where} has trained, got 3; start another run to train "),
        ({"resume": False}, f"a run begins in a folder without checkpoints, but {where} has one of step 4; continue "),
    ):  # fmt: skip
        ends_with(dataclasses.replace(run, **changes), train, message, capsys)
    config = language_modeling.Config(run_dir=run.run_dir, resume=True)
    ends_with(config, language_modeling.train, "a run of language_modeling, but", capsys)


def test_the_number_of_steps_may_not_change_under_a_schedule(undisturbed, tmp_path, capsys):
    """Under a schedule, the learning rate depends on the number of steps."""
    config = dataclasses.replace(undisturbed[0], schedule="cosine", run_dir=tmp_path / "run", steps=4)
    train(config)
    message = "--steps was 4 and is 8 now; resume with --steps 4, or start another run"
    ends_with(dataclasses.replace(config, steps=8, resume=True), train, message, capsys)


@pytest.mark.slow("trains twice")
def test_a_run_resumes_under_another_policy_with_the_same_params_and_loss_scale(undisturbed, run):
    config = dataclasses.replace(run, policy="mixed_bfloat16", loss_scale="dynamic:loss_scale=8,period=3", remat="full")
    assert train(config)["policy"] == str(jaxmp.get_policy("mixed_bfloat16"))
    resumed_rows, undisturbed_rows = (
        [row for row in rows(folder) if row[1] == "train"] for folder in (run.run_dir, undisturbed[0].run_dir)
    )
    assert resumed_rows[:4] == undisturbed_rows[:4] and resumed_rows[4:] != undisturbed_rows[4:]
    assert resumed_rows[4][5] == undisturbed_rows[4][5] != "8"


@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_a_run_resumes_with_params_of_another_dtype_and_says_so(run, capsys):
    config = dataclasses.replace(run, policy="bfloat16", loss_scale="none", steps=5)
    assert train(config)["policy"] == str(jaxmp.get_policy("bfloat16"))
    said = capsys.readouterr().out
    assert f"restored step 4 of {run.run_dir}/checkpoints: the loss scale DynamicLossScale -> NoOpLossScale" in said
    assert "params float32 -> bfloat16 (2 arrays)" in said
    assert leaves(last(run.run_dir))["params/hidden"].dtype == "bfloat16"


def test_a_folder_without_a_run_or_without_a_checkpoint_is_an_error(run, tmp_path, capsys):
    none = dataclasses.replace(run, run_dir=tmp_path / "none")
    ends_with(none, train, f"continues a run, but {none.run_dir} has no config.json of a run; start", capsys)
    assert not none.run_dir.exists()
    shutil.rmtree(run.run_dir / "checkpoints")
    ends_with(run, train, f"{run.run_dir}/checkpoints has no finished checkpoint to resume from; start again", capsys)


def test_a_new_run_does_not_begin_in_a_folder_with_a_finished_run_or_where_no_checkpoint_can_be_kept(tmp_path, capsys):
    config = Config(run_dir=tmp_path / "run", steps=1, checkpoint_every=0)
    assert "waited_for_checkpoints_s" not in train(config) and not (config.run_dir / "checkpoints").exists()
    before = rows(config.run_dir)
    message = f"but {config.run_dir} has summary.json; take another --run-dir, or remove that folder"
    ends_with(config, train, message, capsys)
    assert rows(config.run_dir) == before
    config = Config(run_dir=tmp_path / "run[1]", steps=1)
    message = f"Orbax cannot read a folder with [ or \\ in its path, got {config.run_dir}/checkpoints; save to another"
    ends_with(config, train, message, capsys)
    assert not (config.run_dir / "config.json").exists()


def test_other_data_are_refused_wherever_they_lie(run, capsys):
    """Compare the origin and the first examples; the folder may differ."""

    def train_on(origin: str, shift: int) -> Callable[[Config], Any]:
        def other(config: Config) -> Any:
            experiment = prepare(config)

            def train_batches(seed: int, start: int = 0) -> Any:
                for batch in experiment.train_batches(seed, start):
                    yield {**batch, "label": (batch["label"] + shift) % 10}

            precision = {**experiment.precision, **({"data": origin} if origin else {})}
            return dataclasses.replace(experiment, train_batches=train_batches, precision=precision)

        return lambda config: loop.train(NAME, config, other)

    examples = prepare(run).examples(run.seed)
    message = f"keeps its data, but {run.run_dir} was trained on 'data' (first batch {examples}) and here is "
    now = f"'digits 2' (first batch {examples}); resume with the --data-dir of that run, or"
    ends_with(run, train_on("digits 2", 0), f"{message}{now}", capsys)
    ends_with(run, train_on("", 1), f"{message}'data' (first batch ", capsys)
    with jax.numpy_dtype_promotion("standard"):
        assert train_on("", 0)(run)["resumed_at_step"] == 4


def test_a_second_process_in_the_folder_is_refused_and_may_train_when_the_first_is_killed(run, capsys):
    program = (  # the process only does what a run does first: it locks its folder
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from experiments.training.run_folders import alone_in\n"
        "with alone_in(Path(sys.argv[2])): print('alone', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", program, str(ROOT), str(run.run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "alone\n"
        for config in (run, dataclasses.replace(run, resume=False)):
            ends_with(config, train, f"but another process trains in {run.run_dir}; wait until it ends, or", capsys)
        first.kill()
    assert train(dataclasses.replace(run, steps=5))["steps"] == 5


def test_a_run_that_can_no_longer_be_written_ends_with_one_line_and_can_be_resumed(
    undisturbed, run, monkeypatch, capsys
):
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ocp.path.atomicity.AtomicRenameTemporaryPath, "finalize", fail)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train(run)
    *_, error = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and error == (
        f"error: the run in {run.run_dir} cannot continue: a checkpoint cannot be written to "
        f"{run.run_dir}/checkpoints (no space left); once there is room, continue with --resume"
    )
    monkeypatch.undo()
    train(run)
    assert bits(last(run.run_dir)) == bits(last(undisturbed[0].run_dir))


def test_a_damaged_summary_is_an_error_and_can_be_written_again(undisturbed, tmp_path, capsys):
    config = dataclasses.replace(undisturbed[0], run_dir=tmp_path / "run", resume=True)
    shutil.copytree(undisturbed[0].run_dir, config.run_dir)
    path = config.run_dir / "summary.json"
    for content in (b"{}", b"{", b"[]", b"\xff"):
        path.write_bytes(content)
        ends_with(config, train, f"{path} is not a summary of a run (", capsys)
    stopped(config.run_dir, after=8)  # as if the run was killed before it wrote the summary
    assert train(config)["test_loss"] == undisturbed[1]["test_loss"] and (config.run_dir / "summary.md").is_file()
    assert rows(config.run_dir) == rows(undisturbed[0].run_dir)


def test_metrics_that_are_something_else_or_were_cut_off_are_an_error(run, capsys):
    metrics = run.run_dir / "metrics.csv"
    content = metrics.read_bytes()
    for garbage in (b"\xff", b"a,b\nx,y\n", b"step,split,loss\n1\n", b"step,split\n1,train,2,3\n"):
        metrics.write_bytes(garbage * len(content))
        ends_with(run, train, f"continues after its metrics, but {metrics} has something else (", capsys)
    metrics.write_bytes(content[:90])
    ends_with(run, train, f"bytes of its metrics, but {metrics} has fewer; put the file back, or start another", capsys)


# --- without checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.slow("starts a process")
def test_orbax_is_imported_only_when_checkpoints_are_used():
    code = """
import sys
import experiments.image_classification, experiments.language_modeling, experiments.compare
assert not [name for name in sys.modules if name.startswith("orbax")]
from jax._src import xla_bridge
assert not xla_bridge._backends  # processes of a job meet before JAX looks for its devices
import experiments.training.checkpoints
assert "orbax.checkpoint" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
