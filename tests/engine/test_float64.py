"""The warning for float64 under a half policy, and the finding of the audit."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import half, in_turn, products
from flax import nnx

import jaxmp

pytestmark = pytest.mark.usefixtures("standard_promotion")
X, W = np.ones((2, 8), np.float32), np.ones((8, 8), np.float32)


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


ENTRIES = {
    "linspace": lambda x: x * jnp.linspace(0, 1, 8),
    "zeros": lambda x: x + jnp.zeros(8),
    "np.float64": lambda x: x * np.float64(0.5),
    "NumPy array": lambda x: x * np.ones(8),
    "random number": lambda x: x + jax.random.normal(jax.random.key(0), (8,)),
}
NOT_ENTRIES = {
    "cast": lambda x: x.astype("float64"),
    "cast of integers": lambda x: x * jnp.arange(8).astype("float64"),
    "named dtype": lambda x: x @ jnp.eye(8, dtype="float64"),
    "Python number": lambda x: 0.5 * x * jnp.arange(8),
    "cast back": lambda x: (x * np.float64(0.5)).astype("float32"),
}


@pytest.mark.parametrize(("name", "policy"), in_turn(ENTRIES))
def test_a_float64_value_in_a_function_is_named_at_its_line(name: str, policy: str) -> None:
    def fun(x: Any, w: Any) -> Any:
        return jnp.tanh(ENTRIES[name](x) @ w) @ w

    line = inspect.getsourcelines(ENTRIES[name])[1]
    match = rf"computes in {policy[6:]}, but products are float64: float64 enters at .*test_float64.py:{line}\.\n"
    with pytest.warns(UserWarning, match=match):
        assert products(half(fun, policy), X, W) == ["float32+float64"] * 2


def test_a_float64_value_in_a_jitted_function_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="products are float64: float64 enters at"):
        products(half(jax.jit(lambda x, w: ENTRIES["NumPy array"](x) @ w)), X, W)


def test_float64_that_the_author_asked_for_is_not_warned_about() -> None:
    for name, make in NOT_ENTRIES.items():
        expected = ["bfloat16"] if name in ("Python number", "cast back") else ["float32+float64"]
        assert products(half(lambda x, w, make=make: make(x) @ w), X, W)[-1:] == expected

    def in_region(x: Any, w: Any) -> Any:
        with jaxmp.precision("float32"):
            return (x * np.ones(8)) @ w

    assert products(half(in_region), X, W) == ["float32+float64"]
    assert products(half(lambda x, w: x @ w, overrides={"class:half": "float32"}), X.astype(float), W) == [
        "float32+float64"
    ]
    layers = nn.Sequential([nn.Dense(8, dtype=np.float64), lambda x: x.astype("float32"), nn.Dense(8)])
    model = jaxmp.linen.apply_policy(layers, "mixed_bfloat16")
    assert products(model.apply, layers.init(jax.random.key(0), X), X.astype(float)) == ["float64", "bfloat16"]


def _linen_model(x: Any) -> Any:
    model = jaxmp.linen.apply_policy(nn.Dense(8), "mixed_bfloat16")
    return model.apply(model.init(jax.random.key(0), X), x)


def _nnx_model(x: Any) -> Any:
    return jaxmp.nnx.apply_policy(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_bfloat16")(x)


def _train_step(x: Any) -> Any:
    step = jaxmp.make_train_step(lambda params, batch: jnp.mean(batch @ params), policy="mixed_bfloat16")
    return step(jaxmp.TrainState.create(params=jnp.asarray(W), tx=optax.sgd(0.1)), x)


@pytest.mark.parametrize("call", [_linen_model, _nnx_model, _train_step])
def test_a_float64_batch_is_named_by_its_shape(call: Any) -> None:
    line = rf", which .*test_float64.py:{inspect.getsourcelines(call)[1] + 1} reads" if call is _train_step else ""
    with pytest.warns(UserWarning, match=rf"float64 enters with an argument of shape \(2, 8\){line}\.\n"):
        call(X.astype(float))
    call(X)


def test_the_audit_finds_float64_if_all_products_are_float64() -> None:
    def fun(x: Any, w: Any) -> Any:
        return ENTRIES["linspace"](x) @ w.astype(x.dtype)

    def kinds(fun: Any, policy: Any = None) -> set[str]:
        findings = jaxmp.inspect.audit(fun, expect=policy, compile=False)(X, W).findings
        return {finding.kind for finding in findings} - {"mixed-product"}

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the finding replaces the warning
        assert kinds(half(fun)) == kinds(fun, "mixed_bfloat16") == {"float64"}
        assert kinds(fun) == kinds(fun, "float32") == kinds(jaxmp.autocast(fun, "float32")) == set()
