"""Errors of policies on Linen modules. An error must not leave a change behind."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linen_zoo import MLP, Linear, data, model_products, numbers, quick_jit, rngs, shapes, zeros

import jaxmp
from jaxmp.linen import apply_policy
from jaxmp.linen import run as linen_run

pytestmark = pytest.mark.once

X = data(2, 8)


def test_a_pattern_that_names_a_class_like_a_path_is_an_error_that_says_how_to_write_it():
    for pattern, text in {
        "nn.Dense": "'nn.Dense' matched none; nearest paths: 'Dense_0', 'Dense_1'; write '**/Dense_*' or 'type:Dense'",
        "MLP.Dense_0": "'MLP.Dense_0' matched none; nearest paths: 'Dense_0', ",
    }.items():
        model = apply_policy(MLP(), "mixed_float16", {"Dense_0": "float32", pattern: "float32"})
        for call, first in ((model.init, rngs()), (model.apply, shapes(MLP(), X))):
            with pytest.raises(jaxmp.UnmatchedOverrideError) as error:
                jax.eval_shape(call, first, X)
            assert text in str(error.value)


class Attends(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        return jax.nn.softmax(x @ x.T) @ nn.Dense(8, dtype=self.dtype, name="l")(x)


@pytest.mark.parametrize("under", [apply_policy, jaxmp.linen.autocast])
def test_calls_of_a_model_without_a_half_product_raise_and_its_init_does_not(under):
    model = under(Attends("float32"), "mixed_bfloat16")  # the author's dtype holds for all code of the module
    variables = zeros(shapes(model, X))  # init is allowed, because it only creates variables
    for call in (lambda: model.apply(variables, X), lambda: model.bind(variables)(X)):
        with pytest.raises(ValueError, match=r"every product stays as it was: .*Attends/l \(as it is written\)"):
            call()


# --- the user's own errors --------------------------------------------------------------------------------------------


class Fails(nn.Module):
    where: str

    def setup(self):
        self.dense = nn.Dense(8)
        if self.where == "setup":
            raise RuntimeError("the user's own")

    def __call__(self, x):
        x = self.dense(x)
        if self.where == "call":
            raise RuntimeError("the user's own")
        return x.reshape(7, 7) if self.where == "shape" else x


@pytest.mark.parametrize(("where", "mixed"), [("setup", True), ("call", False)])
def test_an_error_in_the_users_code_is_raised_unchanged_and_leaves_no_state_behind(where, mixed):
    bare = nn.remat(Fails)(where) if mixed else Fails(where)
    model = apply_policy(nn.Sequential([Linear(8), bare]), "float32", {"layers_0": "mixed_float16"})
    variables = shapes(nn.Sequential([Linear(8), Fails("")]), X)
    for call in (lambda: shapes(model, X), lambda: jax.eval_shape(model.apply, variables, X)):
        with pytest.raises((RuntimeError, TypeError), match=r"the user's own|reshape"):
            call()
        assert linen_run.current_run() is None
        assert not nn.module._global_interceptor_stack
        assert jax.config.jax_default_matmul_precision is None
    assert model_products(MLP(), X) == ["float32", "float32"]
    assert model_products(apply_policy(MLP(), "mixed_bfloat16"), X) == ["bfloat16", "bfloat16"]


# --- params that were deleted ----------------------------------------------------------------------------------------


def test_params_that_a_step_has_deleted_raise_before_anything_runs():
    model = apply_policy(MLP(), "mixed_bfloat16")
    params = numbers(shapes(model, X))["params"]
    state = jaxmp.TrainState.create(params=params, tx=optax.sgd(0.1))

    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(model.apply({"params": params}, batch).astype(jnp.float32) ** 2), model_state

    before = state.params
    state, _ = jaxmp.make_train_step(loss_fn)(state, X)
    with pytest.raises(RuntimeError, match=r"params/.* was donated to an earlier step, which deleted it; use"):
        model.apply({"params": before}, X)
    assert np.all(np.isfinite(quick_jit(model.apply)({"params": state.params}, X)))
