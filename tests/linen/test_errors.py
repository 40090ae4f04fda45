"""Errors of policies on Linen modules. An error must not leave a change behind."""

from __future__ import annotations

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linen_zoo import MLP, Linear, data, model_products, numbers, products, quick_jit, shapes, zeros

import jaxmp
from jaxmp.linen import apply_policy
from jaxmp.linen import run as linen_run

pytestmark = pytest.mark.once

X = data(2, 8)


def message(model: nn.Module, *args: Any, error: type[Exception] = ValueError) -> str:
    """Return the error of ``model``, the same from ``init`` and ``apply``."""
    args = args or (X,)
    bare = shapes(MLP(), X) if isinstance(model, MLP) else None
    with pytest.raises(error) as raised:
        shapes(model, *args)
    text, *_ = str(raised.value).split("\n----")  # JAX appends how to see the whole traceback
    if bare is not None:
        with pytest.raises(error, match=re.escape(text)):
            jax.eval_shape(model.apply, bare, *args)
    return text


# --- a pattern that matches nothing -----------------------------------------------------------------------------------


def test_a_pattern_that_names_a_class_like_a_path_is_an_error_that_says_how_to_write_it():
    for pattern, text in {
        "Dence_1": "'Dence_1' matched none; nearest paths: 'Dense_1', 'Dense_0'",
        "nn.Dense": "'nn.Dense' matched none; nearest paths: 'Dense_0', 'Dense_1'; write '**/Dense_*' or 'type:Dense'",
        "MLP.Dense_0": "'MLP.Dense_0' matched none; nearest paths: 'Dense_0', ",
    }.items():
        rules: dict[Any, str] = {"Dense_0": "float32", pattern: "float32"}
        assert text in message(apply_policy(MLP(), "mixed_float16", rules))


def test_a_pattern_may_match_a_module_that_this_method_does_not_call():
    class Two(nn.Module):
        def setup(self):
            self.embed, self.encoder, self.head = nn.Embed(8, 8), nn.Dense(8), Linear()

        def __call__(self, ids):
            return self.head(self.encoder(self.embed(ids)))

        def decode(self, x):
            return self.head(x)

    ids = jnp.array([1, 2])
    rules: dict[Any, str] = {nn.Dense: "float32", "encoder": "float32", "type:Emb*": "float32"}
    model = apply_policy(Two(), "mixed_float16", rules)
    apply = functools.partial(model.apply, method="decode")
    assert products(apply, shapes(Two(), ids), X) == ["float16"]

    model = apply_policy(BodyAndHead(), "mixed_float16", {"body": "mixed_bfloat16"})
    assert shapes(model, X, method="logits")["params"].keys() == {"head"}


class BodyAndHead(nn.Module):
    def setup(self):
        self.body, self.head = nn.Dense(8), nn.Dense(8, dtype="float32")

    def __call__(self, x):
        return self.head(self.body(x))

    def logits(self, x):
        return self.head(x)


def test_patterns_of_a_root_in_a_bare_parent_are_checked_and_outer_patterns_may_match_a_nested_root():
    parent = nn.Sequential([nn.Dense(8), apply_policy(MLP(), "mixed_float16", {"Dence_0": "float32"})])
    assert "'Dence_0' matched none; nearest paths: 'Dense_0'" in message(parent)
    part = apply_policy(MLP(), "mixed_float16")
    model = apply_policy(nn.Sequential([part, nn.Dense(8)]), "mixed_bfloat16", {"layers_0/Dense_0": "float32"})
    assert model_products(model, X) == ["float16", "float16", "bfloat16"]
    absent = apply_policy(nn.Sequential([part, nn.Dense(8)]), "mixed_bfloat16", {nn.Conv: "float32"})
    assert "'type:Conv' matched none" in message(absent)


# --- a half policy that changes no product ----------------------------------------------------------------------------


def test_a_lookup_is_not_a_half_product():
    class Lookup(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(8, dtype=jnp.float32)(nn.Embed(8, 8)(ids))

    ids = jnp.array([1])
    model = apply_policy(Lookup(), "mixed_float16")
    with pytest.raises(ValueError, match=r"every product stays as it was: Lookup/Dense_0 \(as it is written"):
        model.apply(zeros(shapes(model, ids)), ids)


def test_a_float32_product_of_a_narrow_layer_or_of_a_part_that_is_called_alone_is_not_an_error():
    narrow_head = apply_policy(nn.Sequential([nn.Dense(8), nn.Dense(1)]), "mixed_bfloat16", {"layers_0": "float32"})
    assert products(narrow_head.apply, shapes(narrow_head, X), X) == ["float32"] * 2
    model = apply_policy(BodyAndHead(), "mixed_float16")
    apply = functools.partial(model.apply, method="logits")
    assert products(apply, shapes(BodyAndHead(), X), X) == ["float32"]


class Attends(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        return jax.nn.softmax(x @ x.T) @ nn.Dense(8, dtype=self.dtype, name="l")(x)


class Scaled(nn.Module):
    """A module whose param has two axes, but is not in a product."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="l")(x * self.param("scale", nn.initializers.ones, x.shape))


@pytest.mark.parametrize("under", [apply_policy, jaxmp.linen.autocast])
def test_calls_of_a_model_without_a_half_product_raise_and_its_init_does_not(under):
    model = under(Attends("float32"), "mixed_bfloat16")  # the author's dtype holds for all code of the module
    with pytest.raises(ValueError, match=r"every product stays as it was: .*Attends/l \(as it is written\)"):
        jax.eval_shape(model.apply, shapes(model, X), X)
    model = under(Scaled(), "mixed_bfloat16", {"l": "float32"})
    variables = zeros(shapes(Scaled(), X))
    shapes(model, X)  # init is allowed, because it only creates variables
    for call in (lambda: model.apply(variables, X), lambda: model.bind(variables)(X)):
        with pytest.raises(
            ValueError,
            match=r"every product stays as it was: Scaled/l \(the policy of its module\)\.\nDrop the override",
        ):
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


def test_a_model_that_catches_an_error_of_a_submodule_continues():
    class Tries(nn.Module):
        @nn.compact
        def __call__(self, x):
            try:
                Fails("call")(x)
            except RuntimeError:
                x = nn.Dense(8)(x)
            return apply_policy(nn.Dense(8), "mixed_bfloat16")(x)

    assert model_products(apply_policy(Tries(), "mixed_float16"), X) == ["float16", "float16", "bfloat16"]


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
