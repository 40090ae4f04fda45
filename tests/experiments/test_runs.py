"""The scripts run two steps, and write the promised files to their folders."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import sysconfig
from pathlib import Path

import jax
import pytest
from places import ROOT
from run_tools import run_main, start

from experiments import image_classification, language_modeling
from experiments.benchmarks import loss_scaling
from experiments.training import cli, run_folders, runs
from experiments.training.experiment import describe

SOURCES = str(Path(sysconfig.get_path("stdlib"), "asyncio"))  # reading the whole library takes seconds


def read_run(folder: Path) -> tuple[dict, dict, list[dict[str, str]]]:
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "checkpoints", "config.json", "curves.png", "memory.json", "metrics.csv", "plan.json", "summary.json",
        "summary.md",
    ]  # fmt: skip
    config, summary = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
    with (folder / "metrics.csv").open() as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert tuple(reader.fieldnames) == runs.COLUMNS
    assert 5_000 < (folder / "curves.png").stat().st_size < 300_000
    return config, summary, rows


@pytest.mark.once
def test_image_classification_trains_two_steps_with_every_flag(tmp_path, data_dir, monkeypatch, capsys):
    flags = ["--opt-level", "O2", "--loss-scale", "dynamic:1024,period=1", "--override", "**/Dense_1=float32"]
    flags += ["--remat", "dots", "--accumulate", "2", "--ema", "0.5", "--seed", "3", "--shift", "1"]
    flags += ["--steps", "2", "--batch-size", "32", "--evaluate-every", "1", "--data-dir", str(data_dir)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", image_classification)  # as under `python -m`
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        run_main(monkeypatch, image_classification.Config, image_classification.train, *flags)
    shown = capsys.readouterr()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("image_classification-")
    assert str(folder.relative_to(tmp_path)) in shown.out.replace("\n", "") and "held-out accuracy" in shown.out
    assert "2/2" in shown.err and "input wait" in shown.err and "\x1b" not in shown.err

    config, summary, rows = read_run(folder)
    assert config["config"]["override"] == ["**/Dense_1=float32"] and config["config"]["seed"] == 3
    assert config["environment"]["command"].startswith("python -m experiments.image_classification --opt-level O2")
    assert [(row["step"], row["split"]) for row in rows] == [
        ("1", "train"), ("1", "test"), ("2", "train"), ("2", "test"),
    ]  # fmt: skip
    assert [float(row["loss_scale"]) for row in rows if row["split"] == "train"] == [1024, 2048]
    assert summary["loss_scale"] == 4096 and summary["skipped"] == 0 and summary["steps"] == 2
    assert 0 <= summary["test_accuracy"] <= 1 and 0 <= summary["input_wait"] <= 1 and summary["examples_per_s"] > 0
    assert "jax " in summary["versions"] and "cpu" in summary["device"]


@pytest.mark.slow("trains a network")
def test_a_run_of_one_step_claims_no_rate(tmp_path, data_dir, capsys):
    config = image_classification.Config(steps=1, data_dir=data_dir, run_dir=tmp_path / "run")
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        image_classification.train(config)
    bar = capsys.readouterr().err
    assert "1/1" in bar and "examples/s" not in bar and "input wait" not in bar
    _, summary, rows = read_run(tmp_path / "run")
    assert summary["ms_per_step"] is summary["examples_per_s"] is None and rows[0]["examples_per_s"] == ""
    shown = (tmp_path / "run" / "summary.md").read_text()
    assert (
        "None" not in shown
        and "| ms_per_step | not measured: this process ran a single step, which compiled |" in shown
    )


def test_the_plan_and_the_memory_of_a_step_that_ran_compile_nothing_and_an_error_is_a_warning(tmp_path, data_dir):
    compiled = []

    def count(event, *_, **__):
        compiled.append(event) if event.endswith("backend_compile_duration") else None

    config = image_classification.Config(policy="mixed_bfloat16", autocast=True, data_dir=data_dir)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        experiment = image_classification.prepare(config)
        batch = next(experiment.train_batches(0))
        state, metrics = jax.block_until_ready(experiment.step(experiment.init(0), batch))
        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            describe(experiment, state, batch, tmp_path)
        finally:
            jax.monitoring.unregister_event_duration_listener(count)
    plan, memory = (json.loads((tmp_path / name).read_text()) for name in ("plan.json", "memory.json"))
    assert not compiled and "product" in {row["why"] for row in plan["rows"]} and memory["peak"] > 0

    broken = dataclasses.replace(experiment, cast_plan=None, step=None)
    with pytest.warns(UserWarning, match="has no (plan|memory).json"):
        describe(broken, state, batch, tmp_path / "none")
    assert metrics["loss"] > 0 and not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_to_or_has_no_name_is_refused_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for run_dir, reason in (
        ("file", "file is a file"),
        ("file/run", "file is a file"),
        ("/proc/foo", r"nothing can be written to /proc/foo \(.+\)"),
        ("/proc", r"nothing can be written to /proc \(.+\)"),
    ):
        message = f"^--run-dir must name a folder to write to, but {reason}; take another --run-dir$"
        with pytest.raises(ValueError, match=message):
            run_folders.run_folder("name", Path(run_dir))
    (tmp_path / "runs").touch()
    with pytest.raises(ValueError, match="a run needs a folder to write to, but runs is a file; name another folder"):
        run_folders.run_folder("name", None)

    for flag in ["--run-dir", "--data-dir"]:
        with pytest.raises(SystemExit) as end:
            cli.parse(cli.Training, "", [flag, ""])
        shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
        said = f"{flag}: a folder must have a name, got '' (an unset variable?); write . for the current folder"
        assert end.value.code == 2 and said in shown
        assert cli.parse(cli.Training, "", ["--run-dir", "."]).run_dir == Path()


@pytest.mark.once
def test_language_modeling_trains_two_steps_and_warns_without_a_loss_scale(tmp_path, data_dir):
    flags = {"dataset": SOURCES, "vocabulary": 64, "batch_size": 128, "steps": 2, "test_batches": 2}
    config = language_modeling.Config(
        policy="mixed_float16", loss_scale="none", data_dir=data_dir, run_dir=tmp_path / "run", **flags
    )
    with pytest.warns(UserWarning, match="float16 products and no loss scale"), jax.numpy_dtype_promotion("standard"):
        language_modeling.train(config)
    _, summary, rows = read_run(tmp_path / "run")
    assert summary["loss_scale_rule"] == "none" and summary["loss_scale"] == 1
    assert 3 < float(rows[0]["loss"]) < 5  # near log(64) = 4.16
    assert rows[-1]["split"] == "test" and float(rows[-1]["loss"]) == pytest.approx(summary["test_loss"], rel=1e-6)


@pytest.mark.slow("a process of its own, whose files may not grow")
def test_a_full_disk_is_one_line_with_the_folder_and_what_to_do(tmp_path, data_dir):
    """Limit files to 50 kB, as if the disk were full.

    Compiled programs may be larger, so they are not cached.
    """
    code = """
import os, resource, sys
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
from experiments import data, image_classification as script
from experiments.training import cli
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
try: data.read("digits", "data")
except data.DataError as error: print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
data.read("digits", sys.argv[-1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
cli.main(script.Config, script.train, "")
"""
    flags = ["--steps", "3", "--checkpoint-every", "1", "--run-dir", "run", "--data-dir", str(data_dir)]
    done = start("-c", code, *flags, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"cannot keep digits under {tmp_path / 'data'} (") and "File too large" in first
    assert first.endswith("name another folder with --data-dir") and not list((tmp_path / "data").iterdir())
    # The lines of the progress bar have the loss.
    (error,) = [line for line in done.stderr.splitlines() if "loss" not in line]
    assert error.startswith(
        "error: the run in run cannot continue: a checkpoint cannot be written to run/checkpoints ("
    )
    assert "File too large" in error and error.endswith("; once there is room, start again")


def test_a_script_started_as_a_file_finds_its_packages_and_ends_bad_values_with_one_line(tmp_path):
    script = str(ROOT / "experiments" / "image_classification.py")
    done = start(script, "--policy", "mixed_float17", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown policy 'mixed_float17'") and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow("a whole run of a benchmark")
def test_the_benchmark_times_every_variant_and_writes_what_it_found(tmp_path, capsys):
    config = loss_scaling.Config(models=("mlp",), rounds=2, block_ms=1, batch_size=2, layers=1, width=8)
    folder = tmp_path / "run"
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        loss_scaling.main(dataclasses.replace(config, run_dir=folder))
    printed = capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "loss_scaling.json", "loss_scaling.md", "loss_scaling.png", "measured-mlp.json",
    ]  # fmt: skip
    result = json.loads((folder / "loss_scaling.json").read_text())
    assert "jmp " in result["environment"]["versions"]
    (model,) = result["results"]
    assert model["model"] == "mlp, 1 layers of 8, batch 2"
    losses = [row["loss"] for row in model["variants"].values()]
    assert len(losses) == len(model["variants"]) == 8
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.2)  # all variants trained in the same way
    assert all(len(row["milliseconds"]) == 2 for row in model["variants"].values())
    for label in (
        "no scaling",
        "constant scale",
        "jaxmp.loss_scaling",
        "jmp.DynamicLossScale",
        "flax DynamicScale",
        "optax.apply_if_finite",
    ):
        assert label in printed
        assert label in (folder / "loss_scaling.md").read_text()


def test_a_variant_that_fails_has_an_error_in_its_row_and_the_others_are_timed(tmp_path, monkeypatch):
    def breaks(*_):
        raise RuntimeError("no such kernel")

    config = loss_scaling.Config(models=("mlp",), rounds=2, block_ms=1, batch_size=2, layers=1, width=8)
    variants = {"no scaling": loss_scaling.VARIANTS["no scaling"], "jmp": breaks}
    monkeypatch.setattr(loss_scaling, "VARIANTS", variants)
    monkeypatch.setattr(loss_scaling.plots, "panels", lambda *_: None)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        (result,) = loss_scaling.main(dataclasses.replace(config, run_dir=tmp_path / "one"))
        variants["no scaling"] = breaks
        with pytest.raises(
            FloatingPointError, match="no scaling, which all variants are compared with: RuntimeError: no such"
        ):
            loss_scaling.main(dataclasses.replace(config, run_dir=tmp_path / "none"))
    assert result["variants"]["jmp"] == {"error": "RuntimeError: no such kernel"}
    assert len(result["variants"]["no scaling"]["milliseconds"]) == 2
    assert "| jmp | RuntimeError: no such kernel |" in (tmp_path / "one" / "loss_scaling.md").read_text()


def test_the_cost_of_loss_scaling_of_a_model_that_was_measured_is_kept(tmp_path, monkeypatch, capsys):
    def measured(name, *_):
        measured_models.append(name)
        if len(measured_models) == 2:  # the time was up
            return None
        row = {"milliseconds": [2.0, 2.0], "ms": (2.0,) * 3, "ratio": (1.0,) * 3}
        return {"model": f"{name}, batch 1", "policy": "half", "variants": {"no scaling": row}}

    measured_models = []
    monkeypatch.setattr(loss_scaling, "measure", measured)
    monkeypatch.setattr(loss_scaling.plots, "panels", lambda *_: None)
    config = loss_scaling.Config(layers=1, width=64, vocabulary=64, batch_size=1, sequence=8, run_dir=tmp_path)
    assert [result["model"] for result in loss_scaling.main(config)] == ["mlp, batch 1"]
    assert [result["model"] for result in loss_scaling.main(config)] == ["mlp, batch 1", "gpt2, batch 1"]
    assert (
        measured_models == ["mlp", "gpt2", "gpt2"]
        and "## gpt2, batch 1: ms" in (tmp_path / "loss_scaling.md").read_text()
    )
    with pytest.raises(SystemExit, match="2"):
        loss_scaling.main(dataclasses.replace(config, rounds=3))
    assert "rounds is 20 there and 3 here; use the device" in capsys.readouterr().err


def test_a_run_that_is_stopped_has_the_rows_of_all_its_steps(tmp_path, data_dir):
    config = image_classification.Config(data_dir=data_dir, run_dir=tmp_path, steps=9, checkpoint_every=0)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        experiment = image_classification.prepare(config)
        run = runs.Run("image_classification", config, experiment, experiment.init(0), tmp_path, None)
        with pytest.raises(KeyboardInterrupt), run:
            for step, batch in enumerate(run.batches(), 1):
                run.state, metrics = experiment.step(run.state, batch)
                run.log(metrics)
                if step == 5:
                    raise KeyboardInterrupt
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5"]
