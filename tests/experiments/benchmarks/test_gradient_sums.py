"""The benchmark of gradient sums: comparisons, tables, picture and sentence."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import gradient_sums
from experiments.benchmarks.gradient_sums import AUTOCAST, BY_HAND, LINEN, NNX, POLICIES

pytestmark = pytest.mark.usefixtures("standard_promotion")
CASES = {case.name: case for case in gradient_sums.cases(smoke=True)}
JAX_WAYS = (LINEN, NNX, AUTOCAST, BY_HAND)


def test_the_bias_has_the_sums_of_the_weights_of_the_loss_and_rounding_alone_rounds_each_of_them():
    for half in POLICIES:
        case = CASES["bias"]
        weights = gradient_sums.weights(case.x.shape).astype(np.float64)[..., ::-1]
        exact = weights.sum((0, 1))
        np.testing.assert_allclose(gradient_sums.float64_gradient(case, None), exact, rtol=1e-12)
        rounded = weights.astype(jnp.dtype(half)).astype(np.float64).sum((0, 1))
        np.testing.assert_allclose(gradient_sums.float64_gradient(case, half), rounded, rtol=1e-12)
        assert 0 < gradient_sums.error(rounded, exact) < 1e-4


@pytest.mark.parametrize("name", ["embedding", "weight in a loop", "scale of a norm by hand"])
@pytest.mark.slow("a part of a benchmark")
def test_every_way_computes_the_function_of_the_float64_reference(name):
    case = CASES[name]
    want = gradient_sums.float64_gradient(case, None)
    float32_params = {name: jnp.asarray(value) for name, value in case.params.items()}
    in_float32 = jax.grad(lambda params: gradient_sums.loss_of(case, case.fun(lambda y: y, case.x, **params)))
    assert gradient_sums.error(np.asarray(in_float32(float32_params)[case.param], np.float64), want) < 1e-4
    for way in JAX_WAYS:
        gradient, params = gradient_sums.half_gradient(case, way, "bfloat16")
        shapes = jax.eval_shape(gradient, params, case.x)
        got = next(leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes) if case.param in str(path))
        assert (got.shape, got.dtype) == (want.shape, jnp.float32)
        numbers = {tuple(np.shape(leaf)): np.asarray(leaf) for leaf in jax.tree.leaves(params)}
        np.testing.assert_array_equal(numbers[case.params[case.param].shape], case.params[case.param])


def test_the_worst_entry_is_where_the_difference_is_largest_and_errors_have_two_digits():
    want = np.array([1.0, 100.0, -8.0])
    assert gradient_sums.worst(np.array([0.1, 99.0, -2.0]), want) == 0.25
    assert np.isinf(gradient_sums.worst(np.array([1.0, np.inf, -2.0]), want))
    assert gradient_sums.error(np.array([1.0, 0.0, -8.0]), want) == pytest.approx(100 / np.linalg.norm(want))

    for error, text in [(0.6364, "64 %"), (0.0042, "0.42 %"), (2e-6, "< 0.001 %"), (1.5, "150 %")]:
        assert gradient_sums.percent(error) == text


def test_pytorch_sums_the_uses_of_a_weight_in_a_loop_in_half_and_a_bias_in_float32():
    pytest.importorskip("torch")
    errors = {}
    for name in ("bias", "weight in a loop"):
        case = gradient_sums.cases(smoke=False)[list(CASES).index(name)]
        want = gradient_sums.float64_gradient(case, None)
        errors[name] = gradient_sums.error(gradient_sums.torch_gradient(case, "bfloat16"), want)
    assert errors["bias"] < 0.005 and errors["weight in a loop"] > 0.05


@pytest.mark.slow("a whole run of a benchmark")
def test_a_run_writes_tables_a_picture_and_the_sentence_of_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gradient_sums, "cases", lambda smoke: [CASES["embedding"], CASES["scale of a norm by hand"]])
    gradient_sums.main(gradient_sums.Config(halves=("bfloat16",), smoke=True, run_dir=tmp_path))
    run = json.loads((tmp_path / "gradient_sums.json").read_text())
    names = [(result["case"], result["half"]) for result in run["results"]]
    assert names == [("embedding", "bfloat16"), ("scale of a norm by hand", "bfloat16")]
    for result in run["results"]:
        assert [way for way in result["ways"] if way in JAX_WAYS] == list(JAX_WAYS)
        assert all(0 <= errors["error"] == max(errors["compiled"], errors["by operation"]) < 0.1
                   for way, errors in result["ways"].items() if way in JAX_WAYS)  # fmt: skip
    by_hand, autocast = (run["results"][0]["ways"][way]["error"] for way in (BY_HAND, AUTOCAST))
    assert by_hand > 4 * autocast
    markdown, printed = (tmp_path / "gradient_sums.md").read_text(), capsys.readouterr().out
    for text in (run["environment"]["device"], "## bfloat16", gradient_sums.percent(by_hand)):
        assert text in markdown
    assert "bfloat16" in printed and str(tmp_path) in printed
    assert 5_000 < (tmp_path / "gradient_sums.png").stat().st_size < 100_000
    assert (
        f"1,024 tokens of Zipf's law) has an error of {gradient_sums.percent(by_hand)} in bf"
        in gradient_sums.sentence(run)
    )
