"""Rules of qwix beside a policy: a rule decides the products of its modules, and the policy all other operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from both_apis import X, each_api, mixed, pure
from linen_zoo import dtypes_of, products, quick_jit, same_bits

qwix = pytest.importorskip("qwix")

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Flax, for qwix
    pytest.mark.usefixtures("standard_promotion"),
]

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FORWARD = {"weight_qtype": "int8", "act_qtype": "int8"}
INT8 = {**FORWARD, "bwd_qtype": "int8"}
FLOAT8 = {"weight_qtype": E4M3, "act_qtype": E4M3, "bwd_qtype": E5M2}


def bare_model(api: Any) -> Any:
    return api.named(norm=api.norm, first=api.dense, second=api.dense)


def quantised(model: Any, **settings: Any) -> Any:
    """Return a model whose layer ``first`` has a rule for quantised training."""
    provider = qwix.QtProvider([qwix.QtRule(module_path="first", **settings)])
    return qwix.quantize_model(model, provider, *(() if isinstance(model, nn.Module) else (X,)))


def in_each_order(api: Any, policy: str, overrides: Any = None, **settings: Any) -> Iterator[Any]:
    """Yield the models in which the rule or the policy came first."""
    yield mixed(quantised(bare_model(api), **settings), policy, overrides)
    yield quantised(mixed(bare_model(api), policy, overrides), **settings)


def products_of_gradient(model: Any) -> list[str]:
    """Return the operand dtypes of the products in a loss and its gradient: two forward, then four backward."""
    whole = pure(model, X)
    return products(jax.grad(whole.loss(X)), whole.params)


@each_api
def test_a_rule_decides_the_products_of_its_modules_and_the_policy_all_others(api: Any) -> None:
    half = "float16"
    for settings, forward, backward in (
        (FORWARD, "int8", half),
        (INT8, "int8", "int8"),
        (FLOAT8, E4M3, f"{E5M2}*{E4M3}"),
    ):
        for model in in_each_order(api, "mixed_float16", **settings):
            assert products_of_gradient(model) == [forward, half, half, half, backward, backward]


@each_api
def test_an_override_does_not_change_the_products_that_a_rule_quantises(api: Any) -> None:
    for model in in_each_order(api, "mixed_bfloat16", {"first": "float32"}, **FLOAT8):
        assert products_of_gradient(model) == [E4M3, *["bfloat16"] * 3, *[f"{E5M2}*{E4M3}"] * 2]
    for model in in_each_order(api, "mixed_bfloat16", {"first": "float32"}, **FORWARD):
        assert products_of_gradient(model) == ["int8", *["bfloat16"] * 3, "float32", "float32"]


@each_api
def test_gradients_are_float32_and_near_those_of_the_rule_without_a_policy(api: Any) -> None:
    def gradient(model: Any) -> Any:
        whole = pure(model, X)
        return quick_jit(jax.grad(whole.loss(X)))(whole.params)

    def as_vector(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    expected = as_vector(gradient(quantised(bare_model(api), **INT8)))
    rule_first, policy_first = map(gradient, in_each_order(api, "mixed_bfloat16", **INT8))
    same_bits(rule_first, policy_first)
    assert dtypes_of(rule_first) == {"float32"}
    difference = np.linalg.norm(as_vector(rule_first) - expected)
    assert 0 < difference < 0.02 * np.linalg.norm(expected)
