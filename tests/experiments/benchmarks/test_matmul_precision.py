"""The benchmark matmul_precision: the emulated algorithms, and its record."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import matmul_precision
from experiments.benchmarks.matmul_precision import ALGORITHMS


def test_an_algorithm_multiplies_as_many_pairs_as_its_name_says():
    for name, algorithm in ALGORITHMS.items():
        _, _, times = name.partition("_X")
        assert len(algorithm.pairs) == int(times or 1) and name in jax.lax.DotAlgorithmPreset.__members__


def test_three_parts_of_bfloat16_are_the_whole_operand():
    left, _ = matmul_precision.operands(8, 8)
    parts = ALGORITHMS["BF16_BF16_F32_X9"].split(jnp.asarray(left))
    assert all(np.array_equal(part, part.astype(jnp.bfloat16).astype(jnp.float32)) for part in parts)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), left)


def test_one_product_of_bfloat16_is_the_product_of_rounded_operands():
    left, right = map(jnp.asarray, matmul_precision.operands(8, 64))
    expected = jnp.dot(*(operand.astype(jnp.bfloat16).astype(jnp.float32) for operand in (left, right)))
    np.testing.assert_array_equal(ALGORITHMS["BF16_BF16_F32"].product(left, right), expected)


def test_each_algorithm_is_as_exact_as_its_number_of_products():
    errors = {name: matmul_precision.error(algorithm.product, 16, 256) for name, algorithm in ALGORITHMS.items()}
    order = ("BF16_BF16_F32", "TF32_TF32_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6")
    assert sorted(order, key=errors.__getitem__, reverse=True) == list(order)
    assert all(errors[name] < 1e-6 for name in ("TF32_TF32_F32_X3", "BF16_BF16_F32_X9", "F32_F32_F32"))


def test_a_run_without_a_gpu_records_emulated_errors_and_no_times(tmp_path):
    matmul_precision.main(matmul_precision.Config(smoke=True, run_dir=tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "matmul_precision.json").read_text())
    assert [row["name"] for row in record["results"]] == list(ALGORITHMS)
    assert {row["ms"] for row in record["results"]} == {None}
    text = (tmp_path / "run" / "matmul_precision.md").read_text()
    assert "device: emulated on" in text and text.count(matmul_precision.NOT_MEASURED) == len(ALGORITHMS)
