"""The scripts run two steps, each in a process of its own, and leave in their folders what they promise."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import jax
import pytest
from places import ROOT
from run_tools import start, train

from experiments import image_classification
from experiments.benchmarks import loss_scaling
from experiments.comparison import report as comparison_report
from experiments.training import cli, run_folders, runs


def read_run(folder: Path) -> tuple[dict, dict, list[dict[str, str]]]:
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "checkpoints", "config.json", "curves.png", "metrics.csv", "summary.json", "summary.md",
    ]  # fmt: skip
    config, summary = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
    with (folder / "metrics.csv").open() as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert tuple(reader.fieldnames) == runs.COLUMNS
    assert (folder / "curves.png").stat().st_size < 300_000
    return config, summary, rows


def test_image_classification_trains_two_steps_with_every_flag(tmp_path, data_dir):
    flags = ["--opt-level", "O2", "--loss-scale", "dynamic:1024,period=1", "--override", "**/Dense_1=float32"]
    flags += ["--remat", "dots", "--accumulate", "2", "--ema", "0.5", "--seed", "3", "--shift", "1"]
    flags += ["--steps", "2", "--batch-size", "32", "--evaluate-every", "1", "--data-dir", str(data_dir)]
    done = train("image_classification", *flags, cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("image_classification-")
    assert str(folder.relative_to(tmp_path)) in done.stdout.replace("\n", "") and "held-out accuracy" in done.stdout
    assert "2/2" in done.stderr and "input wait" in done.stderr and "\x1b" not in done.stderr

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


def test_a_run_of_one_step_claims_no_rate(tmp_path, data_dir, capsys):
    config = image_classification.Config(steps=1, data_dir=data_dir, run_dir=tmp_path / "run")
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        image_classification.train(config)
    bar = capsys.readouterr().err
    assert "1/1" in bar and "examples/s" not in bar and "input wait" not in bar
    _, summary, rows = read_run(tmp_path / "run")
    assert summary["ms_per_step"] is summary["examples_per_s"] is None and rows[0]["examples_per_s"] == ""
    shown = (tmp_path / "run" / "summary.md").read_text()
    assert "None" not in shown and "| ms_per_step | not measured: the one step of this process compiled |" in shown


@pytest.mark.parametrize(
    ("run_dir", "reason"),
    [
        ("file", "file is a file"),
        ("file/run", "file is a file"),
        ("/proc/foo", r"nothing can be written to /proc/foo \(.+\)"),
        ("/proc", r"nothing can be written to /proc \(.+\)"),
    ],
)
def test_a_run_dir_that_no_file_can_be_written_to_is_named_with_the_reason(run_dir, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=f"^--run-dir must name a folder to write to, but {reason}; take another --run-dir$"
    ):
        run_folders.run_folder("name", Path(run_dir))


@pytest.mark.parametrize("flag", ["--run-dir", "--data-dir"])
def test_a_folder_without_a_name_is_refused_and_not_taken_for_the_current_one(flag, capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse(cli.Training, "", [flag, ""])
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    said = f"{flag}: a folder must have a name, got '' (an unset variable of the shell?); write . for this one"
    assert end.value.code == 2 and said in shown
    assert cli.parse(cli.Training, "", ["--run-dir", "."]).run_dir == Path()


def test_a_run_without_a_place_for_its_folder_is_told_to_name_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(
        ValueError, match=r"a run needs a folder to write to, but runs is a file; name another folder wi"
    ):
        run_folders.run_folder("name", None)


@pytest.mark.once
def test_language_modeling_trains_two_steps_and_warns_without_a_loss_scale(tmp_path, data_dir):
    flags = ["--policy", "mixed_float16", "--loss-scale", "none", "--vocabulary", "64", "--batch-size", "128"]
    flags += ["--steps", "2", "--test-batches", "2", "--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run")]
    done = train("language_modeling", *flags, cwd=tmp_path)
    warning = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warning) == 1 and "float16 products and no loss scale" in warning[0]
    _, summary, rows = read_run(tmp_path / "run")
    assert summary["loss_scale_rule"] == "none" and summary["loss_scale"] == 1
    assert 3 < float(rows[0]["loss"]) < 5  # near log(64) = 4.16
    assert rows[-1]["split"] == "test" and float(rows[-1]["loss"]) == pytest.approx(summary["test_loss"], rel=1e-6)


def test_a_full_disk_is_one_line_with_the_folder_and_what_to_do(tmp_path, data_dir):
    """No file may have more than 50 kB, as if the disk had no more room."""
    code = """
import resource, sys
from experiments import data, image_classification as script
from experiments.training import cli
data.read("digits", sys.argv[-1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
cli.main(script.Config, script.train, "")
"""
    flags = ["--steps", "3", "--checkpoint-every", "1", "--run-dir", "run", "--data-dir", str(data_dir)]
    done = start("-c", code, *flags, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if "loss" not in line]  # the bar's lines have it
    assert error.startswith("error: the run in run cannot go on: a checkpoint cannot be written to run/checkpoints (")
    assert "File too large" in error and error.endswith("; once there is room, start again")


def test_a_script_started_as_a_file_finds_its_packages_and_ends_bad_values_with_one_line(tmp_path):
    script = str(ROOT / "experiments" / "image_classification.py")
    done = start(script, "--policy", "mixed_float17", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown policy 'mixed_float17'") and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_compare_trains_two_steps_and_leaves_tables_numbers_and_picture(tmp_path, data_dir):
    flags = ["--policies", "mixed_float16", "--loss-scales", "dynamic", "--seeds", "0", "1", "--steps", "2"]
    flags += ["--batch-size", "32", "--rounds", "2", "--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run")]
    done = train("compare", *flags, cwd=tmp_path)
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["compare.json", "compare.md", "compare.png"]
    *_, conclusion, picture = done.stdout.strip().splitlines()
    assert picture == f"Picture: {folder / 'compare.png'}"
    assert (folder / "compare.png").stat().st_size < 300_000

    result = json.loads((folder / "compare.json").read_text())
    assert result["conclusion"].startswith("On digits ") and result["conclusion"].endswith(conclusion.strip()[-20:])
    outcomes = result["tasks"]["digits"]
    assert [(o["policy"], o["loss_scale"]) for o in outcomes] == [("float32", "none"), ("mixed_float16", "dynamic")]
    for outcome in outcomes:
        assert [len(outcome[name]) for name in ("test", "curves", "skipped", "final_scale", "milliseconds")] == [2] * 5
        assert outcome["step_bytes"] > 0 and outcome["ms_per_step"] > 0
    assert outcomes[0]["zero_activations"] == 0 and outcomes[0]["tensor_core_share"] == 0
    assert outcomes[1]["tensor_core_share"] == 1 and outcomes[1]["final_scale"] == [2.0**15] * 2
    # Same params and batches: half precision starts where float32 does.
    assert outcomes[1]["curves"][0][0] == pytest.approx(outcomes[0]["curves"][0][0], rel=1e-3)

    markdown = (folder / "compare.md").read_text()
    for columns in (comparison_report.RESULT_COLUMNS, comparison_report.COST_COLUMNS, comparison_report.RULE_COLUMNS):
        assert f"| {' | '.join(columns)} |" in markdown
    assert "- versions: Python " in markdown and "![comparison](compare.png)" in markdown
    assert "| not judged |" in markdown and "| no |" not in markdown and "This device has no tensor cores" in markdown


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
    assert len(losses) == len(model["variants"]) == 7
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.2)  # all have trained alike
    assert all(len(row["milliseconds"]) == 2 for row in model["variants"].values())
    for label in (
        "no scaling",
        "jaxmp.loss_scaling",
        "jmp.DynamicLossScale",
        "flax DynamicScale",
        "optax.apply_if_finite",
    ):
        assert label in printed
        assert label in (folder / "loss_scaling.md").read_text()


def test_a_variant_that_breaks_is_told_in_its_row_and_the_others_are_timed(tmp_path, monkeypatch):
    def breaks(*_):
        raise RuntimeError("no such kernel")

    config = loss_scaling.Config(models=("mlp",), rounds=2, block_ms=1, batch_size=2, layers=1, width=8)
    variants = {"no scaling": loss_scaling.VARIANTS["no scaling"], "jmp": breaks}
    monkeypatch.setattr(loss_scaling, "VARIANTS", variants)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        (result,) = loss_scaling.main(dataclasses.replace(config, run_dir=tmp_path / "one"))
        variants["no scaling"] = breaks
        with pytest.raises(FloatingPointError, match="no scaling, which all are held against: RuntimeError: no such"):
            loss_scaling.main(dataclasses.replace(config, run_dir=tmp_path / "none"))
    assert result["variants"]["jmp"] == {"error": "RuntimeError: no such kernel"}
    assert len(result["variants"]["no scaling"]["milliseconds"]) == 2
    assert "| jmp | RuntimeError: no such kernel |" in (tmp_path / "one" / "loss_scaling.md").read_text()


def test_the_cost_of_loss_scaling_of_a_model_that_was_measured_is_kept(tmp_path, monkeypatch, capsys):
    def measured(name, *_):
        asked.append(name)
        if len(asked) == 2:  # the time was up
            return None
        row = {"milliseconds": [2.0, 2.0], "ms": (2.0,) * 3, "ratio": (1.0,) * 3}
        return {"model": f"{name}, batch 1", "policy": "half", "variants": {"no scaling": row}}

    asked = []
    monkeypatch.setattr(loss_scaling, "measure", measured)
    monkeypatch.setattr(loss_scaling.plots, "panels", lambda *_: None)
    config = loss_scaling.Config(layers=1, width=64, vocabulary=64, batch_size=1, sequence=8, run_dir=tmp_path)
    assert [each["model"] for each in loss_scaling.main(config)] == ["mlp, batch 1"]
    assert [each["model"] for each in loss_scaling.main(config)] == ["mlp, batch 1", "gpt2, batch 1"]
    assert asked == ["mlp", "gpt2", "gpt2"] and "## gpt2, batch 1: ms" in (tmp_path / "loss_scaling.md").read_text()
    with pytest.raises(SystemExit, match="2"):
        loss_scaling.main(dataclasses.replace(config, rounds=3))
    assert "rounds is 20 there and 3 here; take the device" in capsys.readouterr().err


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
