"""The seconds that the pieces of `make gpu` are foreseen to take."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import gpu
from experiments.benchmarks.report.predictions import TIMES
from experiments.benchmarks.shared import foreseen
from experiments.report.json_files import write_json


@pytest.fixture
def results(tmp_path):
    """Write a result with two rows of GPT-2."""
    rows = {
        "jaxmp-bf16": {"compile_seconds": 60.0, "ms": [34.0, 35.0, 36.0], "wall_seconds": 72.0},
        "hand-bf16": {"compile_seconds": 20.0, "ms": [400.0, 500.0, 600.0]},
        "compile-bf16": {"compile_seconds": 30.0},
        "of-an-older-version": {"compile_seconds": 1e9},
    }
    data = {"environment": {"date": "2026-11-26"}, "models": {"gpt2": {"train": rows}}}
    (tmp_path / "train_step-1").mkdir()
    write_json(tmp_path / "train_step-1" / "train_step.json", data)
    return tmp_path


def seconds(results, model, keys, known=(), rounds=8, steps=0):
    estimate = foreseen.Rows(results).estimate(model, keys, set(known), rounds, 200.0, steps)
    return None if estimate is None else estimate.seconds - foreseen.PIECE


def turns(step):
    """Return the seconds of 10 turns of a row whose step takes ``step`` seconds."""
    return foreseen.AGAIN + 10 * (max(0.2, step) + 2 * step)


def test_an_estimate_adds_up_the_compilation_the_measurement_and_the_turns_of_each_row(results):
    ours = 72.0 + turns(0.035)
    assert seconds(results, "gpt2", ["jaxmp-bf16"]) == pytest.approx(ours)
    by_hand = 20.0 + foreseen.START + turns(0.5)  # a step takes longer than a turn should
    assert seconds(results, "gpt2", ["jaxmp-bf16", "hand-bf16"]) == pytest.approx(ours + by_hand)
    assert seconds(results, "gpt2", ["jaxmp-bf16"], known=["jaxmp-bf16"]) == pytest.approx(turns(0.035))


def test_a_row_without_a_record_takes_as_long_as_those_nearest_to_it(results):
    of_bert = 60.0 + foreseen.START + turns(TIMES["bert-hand-bf16"] / 1000)
    assert seconds(results, "bert", ["jaxmp-bf16"]) == pytest.approx(of_bert)
    median = 40.0 + foreseen.START + turns(TIMES["gpt2-hand-bf16"] / 1000)
    assert seconds(results, "gpt2", ["jaxmp-bf16-2chunks"]) == pytest.approx(median)
    torch = 30.0 + foreseen.START + turns(TIMES["gpt2-hand-fp16"] / 1000)
    assert seconds(results, "gpt2", ["compile-fp16"]) == pytest.approx(torch)
    assert seconds(results, "gpt2", ["hand-fp32"]) is None


def test_training_takes_the_time_of_its_steps(results):
    trained = seconds(results, "gpt2", ["jaxmp-bf16"], known=["jaxmp-bf16"], rounds=0, steps=1000)
    assert trained == pytest.approx(72.0 + 1000 * 0.035)


def test_a_record_counts_more_than_an_estimate_and_belongs_to_its_device(results, monkeypatch):
    monkeypatch.setattr(gpu, "RESULTS", results)
    (piece,) = [piece for piece in gpu.PIECES if piece.name == "step-gpt2"]
    assert "estimate" in gpu.foreseen_seconds([piece])["step-gpt2"].source
    foreseen.save(results, "an H200", "step-gpt2", 123.26)
    foreseen.save(results, "an H100", "other", 5.0)
    assert str(gpu.foreseen_seconds([piece])["step-gpt2"]).startswith("123 s (recorded on an H200, ")
    assert "estimate" in gpu.foreseen_seconds([piece], "an H100")["step-gpt2"].source
    assert json.loads((results / foreseen.FILE).read_text())["an H200"]["step-gpt2"]["seconds"] == 123.3
