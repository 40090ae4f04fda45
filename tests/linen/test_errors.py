"""Errors of policies on Linen modules. An error must not leave a change behind."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linen_zoo import MLP, Linear, data, model_products, numbers, products, quick_jit, rngs, shapes, zeros

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


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_paths_or_classes():
    for pattern, text in {
        "Dence_1": "'Dence_1' matched none; nearest paths: 'Dense_1', 'Dense_0'",
        nn.DenseGeneral: "'type:DenseGeneral' matched none; nearest classes: 'Dense', 'MLP'",
        "type:*Norm": "'type:*Norm' matched none",
        "Dense_0/Dense_1": "'Dense_0/Dense_1' matched none",
        "mlp/Dense_0": "'mlp/Dense_0' matched none",
        "dense_0": "'dense_0' matched none",
        "nn.Dense": "'nn.Dense' matched none; nearest paths: 'Dense_0', 'Dense_1'; write '**/Dense_*' or 'type:Dense'",
        nnx.Linear: "it is a class of flax.nnx, but the model is of flax.linen: write a class of flax.linen",
        "Dense_0/kernel": "'Dense_0/kernel' matched none; nearest paths: 'Dense_0', ",
        "MLP.Dense_0": "'MLP.Dense_0' matched none; nearest paths: 'Dense_0', ",
    }.items():
        rules: dict[Any, str] = {"Dense_0": "float32", pattern: "float32"}
        assert text in message(apply_policy(MLP(), "mixed_float16", rules))
    for root in ("", "/"):
        assert set(model_products(apply_policy(MLP(), "mixed_float16", {root: "mixed_bfloat16"}), X)) == {"bfloat16"}


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


def refusal(model: nn.Module, *args: Any) -> str:
    """Return the error for a half policy that leaves all products in float32."""
    args = args or (X,)
    variables = zeros(shapes(model, *args))
    with pytest.raises(ValueError, match="every product stays as it was") as raised:
        model.apply(variables, *args)
    text, *_ = str(raised.value).split("\n----")  # JAX appends how to see the whole traceback
    return text


def test_the_error_for_a_half_policy_without_half_products_names_the_modules_and_the_override():
    class Stubborn(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, dtype=jnp.float32, name="head")(nn.LayerNorm()(nn.Dense(8, dtype="float32")(x)))

    with jax.numpy_dtype_promotion("standard"):
        text = refusal(apply_policy(Stubborn(), "mixed_bfloat16"))
    assert text == (
        "the policy computes in bfloat16, but every product stays as it was: Dense_0 (its own dtype=float32), head "
        "(its own dtype=float32).\nTo overrule the dtype of a module, override it: overrides={'**': 'half'}."
    )


@dataclasses.dataclass(frozen=True)
class Config:
    dtype: Any = jnp.float32


class TiedModel(nn.Module):
    """Layers with a dtype from a config, and a last product that reads the embedding."""

    config: Config
    layers: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(16, 8)
        x = embed(tokens)
        for _ in range(self.layers):
            x = nn.Dense(8, dtype=self.config.dtype)(x)
        return embed.attend(x)


def test_dtypes_from_a_config_that_leave_most_products_in_float32_are_warned_of():
    tokens = jnp.zeros((2, 3), jnp.int32)
    model = TiedModel(Config(), layers=2)
    variables = zeros(shapes(model, tokens))
    expected = (
        r"computes in float16, but 2 of 3 products stay as they were: Dense_0 \(its own dtype=float32\), Dense_1 "
        r"\(its own dtype=float32\)\.\n.* overrides=\{'\*\*': 'half'\}"
    )
    with pytest.warns(UserWarning, match=expected):
        apply_policy(model, "mixed_float16").apply(variables, tokens)
    under = apply_policy(model, "mixed_float16", {"**": "half"})
    assert set(products(under.apply, variables, tokens)) == {"float16"}
    one_float32_layer = TiedModel(Config(), layers=1)
    apply_policy(one_float32_layer, "mixed_float16").apply(zeros(shapes(one_float32_layer, tokens)), tokens)


def test_if_overrides_keep_every_product_in_float32_the_error_says_to_drop_or_narrow_them():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, dtype="float32", name="head")(nn.Dense(8)(nn.Dense(8)(x)))

    text = refusal(apply_policy(Mixed(), "mixed_float16", {"Dense_0": "float32", "Dense_*": "float32"}))
    assert "Dense_1 (override 'Dense_*'), Dense_0 (override 'Dense_0'), head (its own dtype=float32)." in text
    text = refusal(apply_policy(nn.Sequential([nn.Dense(8)]), "mixed_float16", {nn.Dense: "float32"}))
    assert text.endswith("layers_0 (override 'type:Dense').\nDrop the override, or narrow its pattern.")


def test_the_override_that_the_error_proposes_makes_the_products_half():
    bare = nn.Sequential([nn.Dense(8, dtype="float32")])
    text = refusal(apply_policy(bare, "mixed_float16"))
    (override,) = re.findall(r"overrides=\{'\*\*': '(.*)'\}", text)
    assert model_products(apply_policy(bare, "mixed_float16", {"**": override}), X) == ["float16"]


def test_a_lookup_is_not_a_product_and_a_single_layer_is_named_by_its_class():
    class Lookup(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(8, dtype=jnp.float32)(nn.Embed(8, 8)(ids))

    assert "Dense_0 (its own" in refusal(apply_policy(Lookup(), "mixed_float16"), jnp.array([1]))
    assert "Dense (its own dtype=float32)" in refusal(apply_policy(nn.Dense(8, dtype="float32"), "mixed_float16"))


def test_a_model_with_a_half_product_or_without_products_is_not_an_error():
    wide, part = nn.Dense(8, dtype="float32"), apply_policy(MLP(), "mixed_float16")
    with_half = [nn.Sequential([wide, half]) for half in (nn.Dense(8), Linear(), part)]
    for bare in (nn.LayerNorm(), nn.Dropout(0.5, deterministic=True), *with_half):
        with jax.numpy_dtype_promotion("standard"):
            model = apply_policy(bare, "mixed_bfloat16")
            assert jax.eval_shape(model.apply, shapes(model, X), X).dtype == jnp.float32

    narrow_head = apply_policy(nn.Sequential([nn.Dense(8), nn.Dense(1)]), "mixed_bfloat16", {"layers_0": "float32"})
    assert products(narrow_head.apply, shapes(narrow_head, X), X) == ["float32"] * 2
    model = apply_policy(BodyAndHead(), "mixed_float16")
    apply = functools.partial(model.apply, method="logits")
    assert products(apply, shapes(BodyAndHead(), X), X) == ["float32"]


class Attends(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(8, dtype=self.dtype, name="l")(x))
        return jax.nn.softmax(x @ x.T) @ x


class Scaled(nn.Module):
    """A module whose param has two axes, but is not in a product."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="l")(x * self.param("scale", nn.initializers.ones, x.shape))


@pytest.mark.parametrize("under", [apply_policy, jaxmp.linen.autocast])
def test_half_products_are_searched_in_the_traced_program(under):
    model, x = under(Attends(), "mixed_bfloat16", {"l": "float32"}), data(8, 8)
    assert products(model.apply, shapes(model, x), x) == ["float32", "bfloat16", "bfloat16"]
    model = under(Attends("float32"), "mixed_bfloat16")  # the author's dtype holds for all code of the module
    with pytest.raises(ValueError, match=r"every product stays as it was: l \(its own dtype=float32\)"):
        jax.eval_shape(model.apply, shapes(model, X), X)
    model = under(Scaled(), "mixed_bfloat16", {"l": "float32"})
    variables = zeros(shapes(Scaled(), X))
    model.init(rngs(), X)  # init is allowed, because it only creates variables
    for call in (lambda: model.apply(variables, X), lambda: model.bind(variables)(X)):
        with pytest.raises(ValueError, match=r"every product stays as it was: l \(override 'l'\)\.\nDrop the override"):
            call()


def test_a_model_without_a_half_product_is_allowed_inside_a_model_with_a_policy():
    class Around(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(self.part(x))

    variables = zeros(shapes(Around(BodyAndHead()), X))
    for under in (apply_policy, jaxmp.linen.autocast):
        part = under(BodyAndHead(), "mixed_float16", {"**": "float32"})
        assert model_products(apply_policy(Around(part), "mixed_float16"), X) == ["float32", "float32", "float16"]
        with pytest.raises(ValueError, match="every product stays as it was"):
            Around(part).apply(variables, X)


# --- arguments that are not modules, policies or patterns -------------------------------------------------------------


def test_arguments_that_are_not_a_module_policy_or_override_raise_at_once():
    for model, text in (
        (nn.Dense, r"got the class Dense; create an instance: Dense\(...\)"),
        ("model", "got builtins.str; jaxmp.nnx.apply_policy takes modules of flax.nnx"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "got flax.nnx.nn.linear.Linear; jaxmp.nnx.apply_policy takes modules of"),
    ):
        with pytest.raises(TypeError, match=f"jaxmp.linen.apply_policy takes a flax.linen.Module, {text}"):
            apply_policy(model, "mixed_float16")

    with pytest.raises(ValueError, match=r"unknown policy 'mixed_float17'.*nearest first: 'mixed_float16'"):
        apply_policy(MLP(), "mixed_float17")
    with pytest.raises(ValueError, match="unknown policy 'halfish'"):
        apply_policy(MLP(), "mixed_float16", {"Dense_0": "halfish"})
    with pytest.raises(TypeError, match="an override must be a single policy"):
        apply_policy(MLP(), "mixed_float16", {"Dense_0": "O2"})
    with pytest.raises(
        TypeError,
        match=r"a pattern must be a glob on the module path.*or a module class, got an instance of Dense; for",
    ):
        apply_policy(MLP(), "mixed_float16", {nn.Dense(3): "float32"})


def test_the_error_for_swapped_model_and_policy_does_not_print_the_arrays():
    models, policies = (nn.Dense(2), nnx.Linear(2, 2, rngs=nnx.Rngs(0))), ("O2", jaxmp.get_policy("mixed_float16"))
    calls = [(adapter, name) for adapter in (jaxmp.linen, jaxmp.nnx) for name in ("apply_policy", "autocast")]
    for model, policy, (adapter, name) in itertools.product(models, policies, calls):
        with pytest.raises(TypeError) as error:
            getattr(adapter, name)(policy, model)
        came, call = "'O2'" if policy == "O2" else "Policy", f"{adapter.__name__}.{name}"
        got = f"got ({came}, {type(model).__name__}), which are swapped; write {call}(model, policy)"
        assert str(error.value).endswith(got)


def test_a_module_in_place_of_a_policy_or_pattern_is_named_by_its_class_in_the_error():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    calls = [
        jaxmp.get_policy,
        lambda module: jaxmp.nnx.apply_policy(model, "mixed_float16", {module: "float32"}),
        lambda module: jaxmp.nnx.autocast(model, "mixed_float16", {"**": module}),
        lambda module: jaxmp.autocast(jnp.sin, "mixed_float16", {module: "float32"}),
        lambda module: jaxmp.autocast(jnp.sin, "mixed_float16", {"**": module}),
    ]
    for call, module in itertools.product(calls, (nn.Dense(2), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))):
        text = f", got an instance of {type(module).__name__}[;:]"
        with pytest.raises((TypeError, ValueError), match=text) as error:
            call(module)
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="got an instance of list; write"):
        jaxmp.nnx.apply_policy(model, "mixed_float16", [nn.Dense(2)])


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


# --- operations that take no half operands ----------------------------------------------------------------------------


class Spectrum(nn.Module):
    operation: Any = staticmethod(lambda x: jnp.abs(jnp.fft.rfft(x)))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.operation(nn.Dense(14)(x))


class WithSpectrum(nn.Module):
    operation: Any = staticmethod(lambda x: jnp.abs(jnp.fft.rfft(x)))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, name="head")(Spectrum(self.operation, name="spectrum")(x))


def test_a_fourier_transform_of_a_layer_is_float32():
    policy, variables = "mixed_bfloat16", numbers(shapes(WithSpectrum(), X))
    models = (
        WithSpectrum(),
        apply_policy(WithSpectrum(), policy),
        jaxmp.linen.autocast(WithSpectrum(), policy),
    )
    want, *results = quick_jit(lambda variables: [model.apply(variables, X) for model in models])(variables)
    for got in results:
        np.testing.assert_allclose(got, want, rtol=0.03, atol=0.03)


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
