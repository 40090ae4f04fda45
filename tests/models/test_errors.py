"""Errors of policies and of autocast on Linen and NNX models."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from both_apis import NNX, Linen, X, dtypes_of_products, each_api, mixed
from error_tools import refused
from flax import nnx
from linen_zoo import data

import jaxmp

pytestmark = pytest.mark.once


def two_layers(api: Any, **dtypes: Any) -> Any:
    return api.named(body=api.dense, head=functools.partial(api.dense, **dtypes))


@each_api
def test_float16_raises_on_a_tpu(api, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for adapter in api.adapters:
        for policy, overrides in (
            ("mixed_float16", {}),
            ("mixed_bfloat16", {"head": "mixed_float16"}),
        ):
            with pytest.raises(ValueError, match="got float16 on a TPU, which only has bfloat16 products"):
                dtypes_of_products(adapter(two_layers(api), policy, overrides), X)
        assert dtypes_of_products(adapter(two_layers(api), "mixed_bfloat16"), X) == ["bfloat16"] * 2


# --- patterns ---------------------------------------------------------------------------------------------------------


@each_api
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_paths_or_classes(api):
    dense, other = api.Dense.__name__, NNX if api is Linen else Linen
    package, other_package = ("flax.linen", "flax.nnx") if api is Linen else ("flax.nnx", "flax.linen")
    for pattern, text in {
        "heda": "'heda' matched none; nearest paths: 'head'",
        "body/kernel": "'body/kernel' matched none; nearest paths: 'body'",
        "type:*Norm": "'type:*Norm' matched none",
        api.Conv: "'type:Conv' matched none; nearest classes: ",
        dense: f"; write 'type:{dense}'",
        other.Dense: f"a class of {other_package}, but the model is of {package}: write a class of {package}",
        "primitive:dto_general": "'primitive:dto_general' names a primitive that does not exist",
        "primitive:tan": "'primitive:tan'",
    }.items():
        for under in api.adapters:
            with pytest.raises(ValueError) as error:
                dtypes_of_products(under(two_layers(api), "mixed_float16", {"body": "float32", pattern: "float32"}), X)
            assert text in str(error.value)


@each_api
def test_a_pattern_may_match_a_nested_model_with_its_own_policy_and_does_not_change_it(api):
    part = mixed(two_layers(api), "mixed_float16")
    bare = api.named(part=lambda: part, last=api.dense)
    for pattern, last in (("part", "bfloat16"), (api.Dense, "float32")):
        model = mixed(bare, "mixed_bfloat16", {pattern: "float32"})
        assert dtypes_of_products(model, X) == ["float16", "float16", last]
    with pytest.raises(jaxmp.UnmatchedOverrideError, match="'type:Conv' matched none"):
        dtypes_of_products(mixed(bare, "mixed_bfloat16", {api.Conv: "float32"}), X)
    with pytest.raises(jaxmp.UnmatchedOverrideError, match="'heda' matched none"):
        dtypes_of_products(api.named(part=lambda: mixed(two_layers(api), "mixed_float16", {"heda": "float32"})), X)


@each_api
def test_a_second_policy_is_refused_because_it_would_drop_the_overrides_of_the_first(api):
    model = mixed(two_layers(api), "mixed_float16", {"head": "float32"})
    others = (nnx.clone(model), nnx.merge(*nnx.split(model)), model.body) if api is NNX else (model.clone(),)
    for under, whole in itertools.product(api.adapters, (model, *others)):
        refused(
            lambda under=under, whole=whole: under(whole, "mixed_bfloat16"),
            ValueError,
            f"{under.__name__} takes a model without a policy, got a {type(whole).__name__} that has one",
            "use it as it is, or apply one policy, with all overrides, to the original model:",
        )


# --- a half policy that changes no product ----------------------------------------------------------------------------


def refusal(model: Any, x: jax.Array = X) -> str:
    """Return the error for a half policy that leaves all products in float32."""
    with pytest.raises(ValueError, match="every product stays as it was") as raised:
        dtypes_of_products(model, x)
    text, *_ = str(raised.value).split("\n----")  # JAX appends how to see the whole traceback
    return text


@each_api
def test_the_error_for_a_half_policy_without_half_products_names_the_modules_and_the_override(api):
    bare = api.named(
        body=functools.partial(api.dense, dtype="float32"),
        norm=api.norm,
        head=functools.partial(api.dense, dtype=jnp.float32),
    )
    for under in api.adapters:
        text = refusal(under(bare, "mixed_bfloat16"))
        assert "body (as it is written), " in text and "head (as it is written).\n" in text
        assert text.endswith("override it: overrides={'**': 'mixed_bfloat16'}.")
        overruled = under(bare, "mixed_bfloat16", {"**": "mixed_bfloat16"})
        assert dtypes_of_products(overruled, X) == ["bfloat16", "bfloat16"]


@each_api
def test_if_overrides_keep_every_product_in_float32_the_error_says_to_drop_or_narrow_them(api):
    bare = api.named(first=api.dense, second=api.dense, third=functools.partial(api.dense, dtype="float32"))
    text = refusal(mixed(bare, "mixed_float16", {"first": "float32", "*": "float32"}))
    assert "third (the policy of its module).\nDrop the override" in text
    text = refusal(mixed(bare, "mixed_float16", {"first": "float32", "second": "float32"}))
    assert "second (the policy of its module), " in text and "third (as it is written)." in text
    for key, level, reason in (
        (api.Dense, "float32", "the policy of its module"),
        ("**", "float32", "the policy of its module"),
        ("class:half", "float32", "override 'class:half'"),
        ("class:half", "tensorfloat32", "override 'class:half'"),
        ("class:*", "float32", "override 'class:*'"),
    ):
        text = refusal(api.autocast(two_layers(api), "mixed_float16", {key: level}))
        assert text.endswith(f"head ({reason}).\nDrop the override, or narrow its pattern.")
        some = api.autocast(two_layers(api), "mixed_float16", {"head": "half", key: level})
        assert dtypes_of_products(some, X) == ["float32", "float16"]


@each_api
def test_a_model_with_a_half_product_without_products_or_with_only_narrow_ones_is_not_an_error(api):
    without_dtype = functools.partial(api.WithParam, lambda w, x: x @ w)
    part = mixed(two_layers(api), "mixed_float16")
    for other in (api.dense, without_dtype, lambda: part):
        bare = api.named(wide=functools.partial(api.dense, dtype="float32"), other=other)
        assert "float32" not in dtypes_of_products(mixed(bare, "mixed_bfloat16"), X)[1:]
    assert dtypes_of_products(mixed(api.norm(), "mixed_float16", {"**": "float32"}), X) == []
    narrow = api.named(layer=api.dense, narrow=lambda: api.WithParam(lambda w, x: x @ w[:, :1]))
    model = mixed(narrow, "mixed_bfloat16", {"layer": "float32"})
    assert dtypes_of_products(model, X) == ["float32", "float32"]  # the second is float32 by the rules


@each_api
def test_half_products_are_searched_in_the_traced_program(api):
    def attend(model: Any, x: jax.Array) -> jax.Array:
        x = model.norm(model.layer(x))
        return jax.nn.softmax(x @ x.T) @ x

    attention = api.named(attend, layer=api.dense, norm=api.norm)
    # A param with two axes that is not in a product does not count, and neither does a lookup.
    scaled = api.named(scale=lambda: api.WithParam(lambda w, x: x * w), layer=api.dense)
    lookup = api.named(table=lambda: api.WithParam(lambda w, x: w[x[0].astype("int32")]), layer=api.dense)
    x = data(8, 8)
    for under in api.adapters:
        model = under(attention, "mixed_bfloat16", {"layer": "float32"})
        assert dtypes_of_products(model, x) == ["float32", "bfloat16", "bfloat16"]
        for bare in (scaled, lookup):
            text = refusal(under(bare, "mixed_bfloat16", {"layer": "float32"}), x)
            assert text.endswith("layer (the policy of its module).\nDrop the override, or narrow its pattern.")


@each_api
def test_a_model_without_a_half_product_is_allowed_inside_a_model_with_a_policy(api):
    part = mixed(two_layers(api), "mixed_float16", {"**": "float32"})
    around = api.named(part=lambda: part, last=api.dense)
    assert dtypes_of_products(mixed(around, "mixed_float16"), X) == ["float32", "float32", "float16"]
    assert "head (the policy of its module)" in refusal(around)


# --- arguments that are not modules, policies or patterns -------------------------------------------------------------

MODELS = (nn.Dense(2), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@each_api
def test_arguments_that_are_not_a_module_policy_or_override_raise_at_once(api):
    other_model = MODELS[0] if api is NNX else MODELS[1]
    module, other_module = ("linen", "nnx") if api is Linen else ("nnx", "linen")
    for under in api.adapters:
        for model, came in (
            (api.Dense, f"the class {api.Dense.__name__}; create an instance: {api.Dense.__name__}(...)"),
            ("model", "builtins.str; "),
            (other_model, f"{type(other_model).__module__}.{type(other_model).__name__}; "),
        ):
            with pytest.raises(TypeError) as error:
                under(model, "mixed_float16")
            call = f"jaxmp.{module}.{under.__name__} takes a flax.{module}.Module, got {came}"
            assert call in str(error.value)
        assert f"jaxmp.{other_module}.{under.__name__} takes modules of flax.{other_module}" in str(error.value)
        for policy, overrides, kind, text in (
            ("mixed_float17", None, ValueError, r"unknown policy 'mixed_float17'.*nearest first: 'mixed_float16'"),
            ("mixed_float16", {"body": "halfish"}, ValueError, "unknown policy 'halfish'"),
            ("mixed_float16", {"body": "O2"}, TypeError, "an override must be a single policy"),
            (
                "mixed_float16",
                {api.dense(): "float32"},
                TypeError,
                "a pattern must be a glob on the module path.*or a module class, got an instance of ",
            ),
        ):
            with pytest.raises(kind, match=text):
                under(two_layers(api), policy, overrides)


@each_api
def test_the_error_for_swapped_model_and_policy_does_not_print_the_arrays(api):
    for model, under in itertools.product(MODELS, api.adapters):
        with pytest.raises(TypeError) as error:
            under("O2", model)
        call = f"jaxmp.{api.__name__.lower()}.{under.__name__}(model, policy)"
        assert str(error.value).endswith(f"got ('O2', {type(model).__name__}), which are swapped; write {call}")


def test_a_module_in_place_of_a_policy_or_pattern_is_named_by_its_class_in_the_error():
    model = MODELS[1]
    calls = [
        jaxmp.get_policy,
        lambda module: jaxmp.nnx.apply_policy(model, "mixed_float16", {module: "float32"}),
        lambda module: jaxmp.autocast(jnp.sin, "mixed_float16", {"**": module}),
    ]
    for call, module in itertools.product(calls, MODELS):
        with pytest.raises((TypeError, ValueError), match=f", got an instance of {type(module).__name__}[;:]") as error:
            call(module)
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="got an instance of list; write"):
        jaxmp.nnx.apply_policy(model, "mixed_float16", [MODELS[0]])
