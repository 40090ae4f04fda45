"""The scripts run a few steps, write the promised files to their folders, and resume."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
from places import ROOT
from run_tools import run_main, start

import jaxmp
from experiments import image_classification, language_modeling
from experiments.benchmarks import loss_scaling
from experiments.training import loop

SOURCES = str(Path(sysconfig.get_path("stdlib"), "asyncio"))  # reading the whole library takes seconds
FILES = ["checkpoints", "config.json", "curves.png", "memory.json", "metrics.csv", "plan.json", "summary.json"]

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_run(folder: Path) -> tuple[dict, dict, list[dict[str, str]]]:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    config, summary = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
    rows = read_rows(folder)
    assert tuple(rows[0]) == loop.COLUMNS
    assert 5_000 < (folder / "curves.png").stat().st_size < 300_000
    return config, summary, rows


@pytest.mark.once
def test_image_classification_trains_two_steps_with_every_flag(tmp_path, data_dir, monkeypatch, capsys):
    flags = ["--opt-level", "O2", "--loss-scale", "dynamic:1024,period=1", "--override", "**/Dense_1=float32"]
    flags += ["--remat", "dots", "--accumulate", "2", "--ema", "0.5", "--seed", "3", "--shift", "1"]
    flags += ["--steps", "2", "--batch-size", "32", "--evaluate-every", "1", "--data-dir", str(data_dir)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", image_classification)  # as under `python -m`
    run_main(monkeypatch, image_classification.Config, image_classification.train, *flags)
    shown = capsys.readouterr()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("image_classification-")
    assert str(folder.relative_to(tmp_path)) in shown.out.replace("\n", "") and "held-out accuracy" in shown.out
    assert "2/2" in shown.err and "\x1b" not in shown.err

    config, summary, rows = read_run(folder)
    assert config["config"]["override"] == ["**/Dense_1=float32"] and config["config"]["seed"] == 3
    assert config["environment"]["command"].startswith("python -m experiments.image_classification --opt-level O2")
    assert [(row["step"], row["split"]) for row in rows] == [
        ("1", "train"), ("1", "test"), ("2", "train"), ("2", "test"),
    ]  # fmt: skip
    assert [float(row["loss_scale"]) for row in rows if row["split"] == "train"] == [1024, 2048]
    assert summary["loss_scale"] == 4096 and summary["skipped"] == 0 and summary["steps"] == 2
    assert 0 <= summary["test_accuracy"] <= 1 and summary["examples_per_s"] > 0
    assert "jax " in summary["versions"] and "cpu" in summary["device"]


def test_a_resumed_run_ends_bit_for_bit_where_the_other_ends_and_may_change_its_policy(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(loop, "curves", lambda *_: None)
    flags = {"batch_size": 32, "checkpoint_every": 2, "evaluate_every": 2, "data_dir": data_dir, "policy": "float32"}
    whole = image_classification.Config(steps=4, run_dir=tmp_path / "whole", **flags)
    parts = dataclasses.replace(whole, steps=2, run_dir=tmp_path / "parts")
    expected = image_classification.train(whole)
    image_classification.train(parts)
    with (parts.run_dir / "metrics.csv").open("a") as file:
        file.write("3,train,9,9,9,9,0,9\n")  # a step after the last checkpoint
    resumed = dataclasses.replace(parts, steps=4, resume=True)
    summary = image_classification.train(resumed)
    assert summary["resumed_at_step"] == 2 and summary["test_loss"] == expected["test_loss"]
    losses = [[(row["step"], row["split"], row["loss"]) for row in read_rows(c.run_dir)] for c in (whole, parts)]
    assert losses[0] == losses[1]

    state = image_classification.prepare(whole).init(0)
    states = [jaxmp.checkpoint.restore(c.run_dir / "checkpoints", state, step=4) for c in (whole, parts)]
    jax.tree.map(np.testing.assert_array_equal, states[0].params, states[1].params)

    half = dataclasses.replace(resumed, steps=5, policy="mixed_float16")
    assert image_classification.train(half)["loss_scale_rule"] == "dynamic"


def test_a_folder_with_another_run_or_without_one_is_an_error(tmp_path, data_dir, capsys, monkeypatch):
    monkeypatch.setattr(loop, "curves", lambda *_: None)
    config = image_classification.Config(data_dir=data_dir, run_dir=tmp_path, batch_size=32, steps=1, evaluate_every=0)
    image_classification.train(config)
    for changes, message in [
        ({}, "has a run with 1 steps; continue with --resume, or take another --run-dir"),
        ({"resume": True, "run_dir": tmp_path / "new"}, "has no checkpoint to resume from; start without --resume"),
        ({"resume": True, "run_dir": None}, "--resume continues the run in --run-dir; give its folder"),
    ]:
        with pytest.raises(SystemExit):
            image_classification.train(dataclasses.replace(config, **changes))
        assert message in capsys.readouterr().err


@pytest.mark.once
def test_language_modeling_trains_two_steps_and_warns_without_a_loss_scale(tmp_path, data_dir):
    flags = {"dataset": SOURCES, "vocabulary": 64, "batch_size": 128, "steps": 2, "test_batches": 2}
    config = language_modeling.Config(
        policy="mixed_float16", loss_scale="none", data_dir=data_dir, run_dir=tmp_path / "run", **flags
    )
    with pytest.warns(UserWarning, match="float16 products and no loss scale"):
        language_modeling.train(config)
    _, summary, rows = read_run(tmp_path / "run")
    assert summary["loss_scale_rule"] == "none" and summary["loss_scale"] == 1
    assert 3 < float(rows[0]["loss"]) < 5  # near log(64) = 4.16
    assert rows[-1]["split"] == "test" and float(rows[-1]["loss"]) == pytest.approx(summary["test_loss"], rel=1e-6)


def test_a_script_started_as_a_file_finds_its_packages_and_ends_bad_values_with_one_line(tmp_path):
    script = str(ROOT / "experiments" / "image_classification.py")
    done = start(script, "--policy", "mixed_float17", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown policy 'mixed_float17'") and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow("a whole run of a benchmark")
def test_the_benchmark_of_loss_scaling_times_every_variant_and_writes_what_it_found(tmp_path, capsys):
    config = loss_scaling.Config(models=("mlp",), rounds=2, block_ms=1, batch_size=2, layers=1, width=8)
    folder = tmp_path / "run"
    loss_scaling.main(dataclasses.replace(config, run_dir=folder))
    printed = capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "loss_scaling.json", "loss_scaling.md", "loss_scaling.png", "measured-mlp.json",
    ]  # fmt: skip
    (model,) = json.loads((folder / "loss_scaling.json").read_text())["results"]
    losses = [row["loss"] for row in model["variants"].values()]
    assert len(losses) == 8 and losses == pytest.approx([losses[0]] * 8, rel=0.2)  # all trained in the same way
    for label in ("no scaling", "jaxmp.loss_scaling", "jmp.DynamicLossScale", "flax DynamicScale"):
        assert label in printed and label in (folder / "loss_scaling.md").read_text()
