"""Steps compiled for a GPU that is not attached: tables and errors."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from experiments.benchmarks.compile_only import report, sharded
from experiments.benchmarks.compile_only import run as compile_only

ROW = {
    "label": "a step",
    "temporaries": 2**30,
    "peak": 2**31,
    "products": {"dot bf16×bf16": 2},
    "flops": {"bfloat16": 10},
    "half": 1.0,
    "launches": 1200,
    "traffic": 2e9,
    "layout": 5e8,
}


def result_of(full=True, **rows):
    variants = {name.replace("_", "-"): {**ROW, "label": name, **row} for name, row in rows.items()}
    return {"name": "gpt2", "model": "GPT-2", "full": full, "variants": variants}


# Tables.


def test_the_table_has_a_predicted_time_for_each_variant_and_no_torch_below_full_size():
    full, small = (
        report.table(result_of(full=full, hand_fp32={"peak": 2**33}, jaxmp_bf16={})) for full in (True, False)
    )
    assert full.rows[1] == (
        "jaxmp_bf16", "1,024", "2,048", "0.24", "75%", "100.00%", "1,200", "2.0", "0.5", "", "", "2 dot bf16×bf16"
    )  # fmt: skip
    assert small.rows[1][3] == ""

    result = result_of(hand_bf16={"predicted": 34.5}, jaxmp_bf16={"predicted": 34.44})
    assert [row[9:11] for row in report.table(result).rows] == [("34.5", "33.6 (+2.7%)"), ("34.4", "")]
    result["full"] = False
    assert report.table(result).rows[0][9:11] == ("34.5", "")


# Targets.


# Compiling.


@pytest.mark.slow("compiles whole train steps")
@pytest.mark.absent_gpu
def test_the_benchmark_writes_a_table_a_picture_and_json_and_resumes(tmp_path, capsys, monkeypatch):
    config = compile_only.Config(models=("gpt2",), variants=("jaxmp-bf16",), smoke=True, layers=1, run_dir=tmp_path)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        compile_only.main(config)
    written = json.loads((tmp_path / "compile_only.json").read_text())
    assert written["environment"]["target"] == "NVIDIA H200 141GB HBM3e"
    (model,) = written["results"]
    ((name, row),) = model["variants"].items()
    assert name == "jaxmp-bf16" and not model["full"]
    assert {product.split()[1] for product in row["products"]} == {"bf16×bf16"} and row["half"] == 1
    assert 0 < row["temporaries"] < row["peak"] and row["launches"] > 10 and 0.001 < row["predicted"] < 10
    markdown, printed = (tmp_path / "compile_only.md").read_text(), capsys.readouterr().out
    for text in ("NVIDIA H200", "jaxmp, bf16"):
        assert text in markdown and text in printed
    assert (tmp_path / "compile_only.png").stat().st_size > 10_000

    def compiles(*args):
        raise AssertionError("what is there is not compiled again")

    monkeypatch.setattr(compile_only, "measure", compiles)
    assert compile_only.main(config) == written["results"]


@pytest.mark.slow("compiles whole train steps")
@pytest.mark.absent_gpu
def test_sizes_split_over_many_gpus_make_a_table_and_the_next_command_continues(tmp_path, capsys, monkeypatch):
    config = compile_only.Config(
        topology=("1x2x2",), mesh="data=2,fsdp=2", sizes=("124M",), smoke=True, run_dir=tmp_path
    )
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        (row,) = compile_only.main(config)
    assert (row["topology"], row["gpus"], row["batch"]) == ("1x2x2", 4, "32×32")
    assert row["ideal"] == 8 * row["params"] * (1 - 1 / row["gpus"])
    assert sum(row["by_kind"].values()) == row["peak"] and not row["findings"]
    assert "fsdp" in "".join(row["sent"]) and "data" in "".join(row["sent"])
    other = {**row, "gpus": 2, "topology": "1x1x2"}
    monkeypatch.setattr(sharded, "measure", lambda *_: other)
    rows = compile_only.main(dataclasses.replace(config, topology=("1x1x2",), mesh=""))
    assert [(row["topology"], row["gpus"]) for row in rows] == [("1x1x2", 2), ("1x2x2", 4)]
    markdown, printed = (tmp_path / "sharded.md").read_text(), capsys.readouterr().out
    for text in ("2 (1x1x2)", "4 (1x2x2)", "NVIDIA H200"):
        assert text in markdown and text in printed
    monkeypatch.setattr(sharded, "measure", pytest.fail)  # existing results are not compiled again
    assert compile_only.main(config) == json.loads((tmp_path / "sharded.json").read_text())["rows"] == rows
