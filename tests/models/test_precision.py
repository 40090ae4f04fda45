"""The precision of the products of Linen and NNX models."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from both_apis import X, each_api, mixed, pure

import jaxmp
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations

pytestmark = pytest.mark.once


def precisions(model: Any, *, gradients: bool = False) -> list[str]:
    """Return the precision of every product of ``model``; ``-`` for JAX's default."""
    function = pure(model, X)
    loss = function.loss(X)
    jaxpr = jax.make_jaxpr(jax.grad(loss) if gradients else loss)(function.params)
    params = [eqn.params["precision"] for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]
    of_operands = [precision[0] if isinstance(precision, tuple) else precision for precision in params]
    return ["-" if precision is None else str(precision) for precision in of_operands]


THREE = "BF16_BF16_F32_X3"


@each_api
def test_products_of_the_preset_float32_have_the_highest_precision_also_in_gradients(api):
    for bare in (api.dense(), api.conv(), api.WithParam(lambda w, x: x @ w)):
        assert set(precisions(mixed(bare, "float32"))) == {"HIGHEST"}
        assert set(precisions(mixed(bare, "float32"), gradients=True)) == {"HIGHEST"}


@each_api
def test_the_precision_of_an_override_holds_only_for_the_modules_it_covers_and_their_gradients(api):
    bare = api.named(first=api.dense, second=api.dense)
    for policy, override, expected in (
        ("mixed_float16", "float32", ["-", "HIGHEST"]),
        ("float32", "mixed_float16", ["HIGHEST", "-"]),
        ("mixed_bfloat16", f"matmul_precision={THREE}", ["-", THREE]),
    ):
        assert precisions(mixed(bare, policy, {"second": override})) == expected
    model = api.autocast(bare, "mixed_bfloat16", {"second": f"matmul_precision={THREE}"})
    assert precisions(model, gradients=True).count(THREE) == 3
    with jax.default_matmul_precision("high"):  # half products need no precision
        assert precisions(mixed(bare, "mixed_float16", {"second": "float32"})) == ["-", "HIGHEST"]


@each_api
def test_the_precision_of_a_region_or_of_the_code_wins_over_the_policy_of_its_module(api):
    def careful(context: Any) -> Any:
        def run(w: jax.Array, x: jax.Array) -> jax.Array:
            with context():
                x = x @ w
            return x @ w

        return api.WithParam(run)

    algorithm = jaxmp.Policy("float32", "float32", "float32", matmul_precision=THREE)
    for level, expected in ((algorithm, THREE), ("tensorfloat32", "-"), ("float32", "HIGHEST")):
        for policy in ("float32", "mixed_float16", "matmul_precision=high"):
            model = mixed(careful(functools.partial(jaxmp.precision, level)), policy)
            assert precisions(model)[0] == expected
