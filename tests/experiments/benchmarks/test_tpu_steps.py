"""Train steps compiled for TPUs that are not attached: tables, and the benchmark at small size."""

from __future__ import annotations

import json

import jax
import pytest

from experiments.benchmarks.compile_only import run as compile_only
from experiments.benchmarks.compile_only import tpu_report


def row(label, cycles, peak, **more):
    parts = {"kernels": cycles / 1.5e6, "memory": 1.0, "links": 0.0}
    return {"label": label, "cycles": cycles, "peak": peak, "parts": parts, "half": 1.0, "kernels": 7, **more}


def test_each_row_is_compared_with_bfloat16_by_hand():
    rows = {
        "hand-fp32": row("JAX by hand, fp32", 600e6, 2**31, half=0.0),
        "hand-bf16": row("by hand", 100e6, 2**30),
        "jaxmp-bf16": row("jaxmp", 102e6, 2**29),
        "unprepared-bf16": row("autocast", 104e6, 2**30),
    }
    table = tpu_report.table({"name": "gpt2", "model": "GPT-2", "variants": rows})
    assert table.rows[0] == (
        "JAX by hand, float32, highest precision", "600.0", "6.000", "400.0", "1.0", "2,048", "2.000", "0.00%", "7"
    )  # fmt: skip
    assert [cells[2] for cells in table.rows] == ["6.000", "1.000", "1.020", "1.040"]
    del rows["hand-bf16"]
    table = tpu_report.table({"name": "gpt2", "model": "GPT-2", "variants": rows})
    assert table.rows[1][2] == ""


@pytest.mark.slow("compiles whole train steps")
@pytest.mark.absent_tpu
def test_the_benchmark_compiles_a_step_and_a_slice_for_tpus(tmp_path, capsys):
    small = {"smoke": True, "run_dir": tmp_path / "steps", "layers": 1}
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        (result,) = compile_only.main(
            compile_only.Config(models=("gpt2",), variants=("jaxmp-bf16",), target="v5e", **small)
        )
        (of_slice,) = compile_only.main(
            compile_only.Config(
                topology=("v5e:2x2",),
                sizes=("llama-8B",),
                mesh="fsdp=2,tensor=2",
                smoke=True,
                run_dir=tmp_path / "slices",
            )
        )
    compiled = result["variants"]["jaxmp-bf16"]
    assert compiled["half"] == 1 and 0 < compiled["cycles"] <= 1.5e6 * compiled["parts"]["kernels"]
    assert json.loads((tmp_path / "steps" / "tpu_steps.json").read_text())["environment"]["target"] == "TPU v5 lite"
    assert (
        of_slice["gpus"] == 4 and of_slice["wire"] > 0 and of_slice["parts"]["links"] > 0 and not of_slice["findings"]
    )
    assert "Cycles estimated by the compiler, not run" in (tmp_path / "slices" / "tpu_slices.md").read_text()
    assert "tokens/s at best" in capsys.readouterr().out
