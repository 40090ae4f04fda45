"""Overrides of Linen and NNX models by path, class and operation, under a policy and under autocast."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from both_apis import Linen, X, dtypes_of_products, each_api, mixed, pure
from flax import nnx
from linen_zoo import dtypes_of, products, same_computation

import jaxmp

pytestmark = pytest.mark.once


def three_layers(api: Any) -> Any:
    return api.named(first=api.dense, second=api.dense, third=api.dense)


@each_api
def test_the_first_override_that_matches_wins_and_half_means_the_compute_dtype(api):
    wide, half = "float32", "bfloat16"
    for pattern, expected in (
        ("**", [wide, half, wide]),
        ("fir*", [wide, half, half]),
        (api.Dense, [wide, half, wide]),
    ):
        model = mixed(three_layers(api), "mixed_bfloat16", {"second": "half", pattern: "float32"})
        assert dtypes_of_products(model, X) == expected
    for under, other_half in zip(api.adapters, ("float16", "mixed_float16"), strict=True):
        model = under(three_layers(api), "mixed_bfloat16", {"first": "float32", "*d": other_half})
        assert dtypes_of_products(model, X) == ["float32", "float16", "float16"]


@each_api
def test_an_override_covers_everything_below_its_path(api):
    bare = api.named(block=lambda: three_layers(api), head=api.dense)
    for under in api.adapters:
        model = under(bare, "mixed_float16", {"block/third": "mixed_bfloat16", "block": "float32"})
        assert dtypes_of_products(model, X) == ["float32", "float32", "bfloat16", "float16"]
        model = under(bare, "mixed_float16", {"**/first": "float32"})
        assert dtypes_of_products(model, X) == ["float32", "float16", "float16", "float16"]
    assert dtypes_of_products(mixed(bare, "mixed_bfloat16", {"": "mixed_float16"}), X) == ["float16"] * 4


@each_api
def test_an_override_by_class_covers_subclasses_and_everything_below(api):
    class Special(type(three_layers(api))):
        pass

    def run(model: Any, x: jax.Array) -> jax.Array:
        return model.head(model.layer(x))

    bare = api.named(
        special=lambda: Special(run, {"layer": api.conv, "head": api.dense}),
        block=lambda: api.named(dense=api.dense),
        last=api.dense,
    )
    for pattern, expected in (
        (Special, ["float32", "float32", "float16", "float16"]),
        ("type:Spe*", ["float32", "float32", "float16", "float16"]),
        (api.Conv, ["float32", "float16", "float16", "float16"]),
        (f"type:{api.Dense.__name__}", ["float16", "float32", "float32", "float32"]),
    ):
        assert dtypes_of_products(mixed(bare, "mixed_float16", {pattern: "float32"}), X) == expected, pattern
    in_autocast = api.autocast(bare, "mixed_float16", {Special: "float32"})
    assert dtypes_of_products(in_autocast, X) == ["float32", "float32", "float16", "float16"]


@each_api
def test_o2_computes_products_in_float16_and_norms_in_float32_and_takes_overrides(api):
    class ProductNorm(api.LayerNorm):
        """A norm with a product."""

        def __call__(self, x: Any) -> Any:
            return super().__call__(x @ jnp.ones((8, 8)))

    bare = api.named(first=api.dense, norm=lambda: api.norm(ProductNorm), second=api.dense)
    for policy, overrides, second in (
        ("O2", None, "float16"),
        ("O2", {"second": "float32"}, "float32"),
        ("mixed_float16", {api.LayerNorm: "float32"}, "float16"),
        ("mixed_float16", {"type:*Norm": "float32"}, "float16"),
        (jaxmp.PolicyMap("mixed_float16", {"type:ProductN*": "float32"}), None, "float16"),
    ):
        assert dtypes_of_products(mixed(bare, policy, overrides), X) == ["float16", "float32", second]
    assert dtypes_of_products(api.autocast(bare, "O2"), X) == ["float16", "float32", "float16"]


@each_api
def test_an_override_of_a_policy_map_comes_after_the_overrides_of_the_call(api):
    policies = jaxmp.PolicyMap("mixed_float16", {"first": "float32"})
    for under in api.adapters:
        assert dtypes_of_products(under(three_layers(api), policies), X) == ["float32", "float16", "float16"]
        model = under(three_layers(api), policies, {"first": "mixed_bfloat16"})
        assert dtypes_of_products(model, X) == ["bfloat16", "float16", "float16"]


@each_api
def test_an_override_reaches_modules_without_a_dtype_or_without_params(api):
    bare = api.named(
        layer=api.dense,
        without_dtype=lambda: api.WithParam(lambda w, x: x @ w),
        scores=lambda: api.named(lambda _, x: x @ x.T),
    )
    for overrides, expected in (
        (None, ["float16", "float16", "float16"]),
        ({"without_dtype": "mixed_bfloat16"}, ["float16", "bfloat16", "float16"]),
        ({"scores": "float32"}, ["float16", "float16", "float32"]),
    ):
        assert dtypes_of_products(mixed(bare, "mixed_float16", overrides), X) == expected


@each_api
def test_an_override_by_param_dtype_changes_the_params_of_its_modules(api):
    model = mixed(three_layers(api), "mixed_float16", {"second": "params=bfloat16,compute=float16,output=float32"})
    params = pure(model, X, abstract=True).params
    assert [dtypes_of(params[name]) for name in ("first", "second", "third")] == [
        {"float32"},
        {"bfloat16"},
        {"float32"},
    ]


def first_two(model: Any) -> Any:
    """Return a function from params to the first two results of ``model``."""
    apply = pure(model, X).apply
    return lambda params: apply(params, X)[:2]


@each_api
def test_a_float32_part_of_a_half_model_returns_unrounded_float32(api):
    def run(model: Any, x: jax.Array) -> Any:
        y = model.precise(x)
        return y, model.also(y), model.rough(y)

    bare = api.named(run, precise=api.dense, also=api.dense, rough=api.dense)
    for under in api.adapters:
        model = under(bare, "mixed_float16", {"precise": "float32", "also": "float32"})
        assert dtypes_of_products(model, X) == ["float32", "float32", "float16"]
        params = pure(model, X).params
        with jax.default_matmul_precision("highest"):
            same_computation(first_two(model), first_two(bare), params)


@each_api
def test_of_overrides_of_operations_and_of_modules_the_first_wins(api):
    """tune writes such overrides: a half module around an operation that needs float32."""
    bare = api.named(block=lambda: three_layers(api), head=api.dense)
    half, wide, second = "bfloat16", "float32", {"block/second:dot_general": "float32"}
    for under in api.adapters:
        for overrides, expected in (
            ({"primitive:dot_general": wide, "block/first": "half"}, [half, wide, wide, wide]),
            ({"class:half": wide, "head": "half"}, [wide, wide, wide, half]),
            ({**second, "block": "half"}, [half, wide, half, half]),
            ({"head": "mixed_bfloat16", **second, "block": "mixed_bfloat16"}, [half, wide, half, half]),
            ({"block": "half", **second}, [half] * 4),
        ):
            assert dtypes_of_products(under(bare, "mixed_bfloat16", overrides), X) == expected
        saved = jaxmp.PolicyMap("mixed_bfloat16", {**second, "block": "mixed_bfloat16"})
        assert dtypes_of_products(under(bare, saved), X) == [half, wide, half, half]
        model = under(bare, "mixed_bfloat16", {"primitive:dot_general": "float32"})
        with pytest.raises(ValueError, match="every product stays as it was"):
            dtypes_of_products(model, X)


def norms(api: Any) -> list[Any]:
    library = nn if api is Linen else nnx
    return [library.LayerNorm, functools.partial(library.GroupNorm, num_groups=2)]


def between_layers(api: Any, norm: Any) -> Any:
    """Return a model with a norm, which the model calls in a scope."""

    def run(model: Any, x: jax.Array) -> jax.Array:
        hidden = model.first(x)
        with jax.named_scope("scope"):
            hidden = model.norm(hidden)
        return model.last(hidden)

    return api.named(run, first=api.dense, norm=lambda: api.norm(norm), last=api.dense)


@each_api
@pytest.mark.parametrize("level", [" HALF ", "mixed_bfloat16", "float32"])
def test_a_level_of_a_norm_means_the_same_as_under_jaxmp_autocast(api, level):
    for norm in norms(api):
        bare = between_layers(api, norm)
        function, params = pure(bare, X)
        expected = jaxmp.autocast(function, "mixed_bfloat16", {"**/scope": level})
        for policy, overrides in (
            ("mixed_bfloat16", {"norm": level}),
            ("mixed_bfloat16", {f"type:{getattr(norm, 'func', norm).__name__}": level}),
            (f"mixed_bfloat16; norm -> {level}", None),
        ):
            model = mixed(bare, policy, overrides)
            same_computation(pure(model, X).apply, expected, params, X)
        as_text = jaxmp.autocast(function, f"mixed_bfloat16; **/scope -> {level}")
        same_computation(as_text, expected, params, X)


@each_api
def test_half_makes_every_operation_of_a_module_half_but_a_region_wins(api):
    def of_norm(model: Any) -> set[str]:
        apply, params = pure(model, X)
        rows = [row for row in jaxmp.cast_plan(apply)(params, X).rows if row.cls not in ("clear", "opaque")]
        return {row.result for row in rows if "norm" in row.path.split("/")}

    bare = between_layers(api, api.LayerNorm)
    for under in api.adapters:
        for key in ("norm", api.LayerNorm, "**"):
            model = under(bare, "mixed_bfloat16", {key: "half"})
            assert of_norm(model) == {"bfloat16"}
            with jaxmp.precision("float32"):
                assert of_norm(model) == {"float32"}
        for overrides in (None, {"norm": "mixed_bfloat16"}, {"norm": "float32", "**": "half"}):
            assert of_norm(under(bare, "mixed_bfloat16", overrides)) == {"float32"}


@each_api
def test_autocast_of_a_model_is_jaxmp_autocast_of_its_function_and_keeps_the_params(api):
    bare = api.named(conv=api.conv, norm=api.norm, dense=api.dense)
    model = pure(api.autocast(bare, "float16"), X)
    assert dtypes_of(model.params) == {"float32"}
    with jax.numpy_dtype_promotion("standard"):
        result = same_computation(model.apply, jaxmp.autocast(pure(bare, X).apply, "mixed_float16"), model.params, X)
    assert result.dtype == jnp.float32  # not the policy's output dtype
    for name in (" Mixed_BFloat16 ", "p=f32, c=bf16, o=f32"):
        assert set(dtypes_of_products(api.autocast(bare, name), X)) == {"bfloat16"}


def call_of_head(model: Any) -> Any:
    """Return a function from params to the result of the submodule ``head``, which is called alone."""
    if isinstance(model, nn.Module):
        params = pure(model, X).params
        return lambda x: model.apply({"params": params}, x, method=lambda model, x: model.head(x))
    return lambda x: model.head(x)


@each_api
def test_overrides_must_match_in_a_call_of_the_whole_model_and_not_of_a_part(api):
    bare = api.named(body=api.dense, head=lambda: api.WithParam(lambda w, x: x @ w))
    for under in api.adapters:
        overrides = {"primitive:sin": "float32", api.Dense: "mixed_bfloat16", "body": "float32", "head": "float32"}
        model = under(bare, "mixed_float16", overrides)
        assert products(call_of_head(model), X) == ["float32"]
        with pytest.raises(jaxmp.UnmatchedOverrideError, match="'primitive:sin' matched none"):
            dtypes_of_products(model, X)


@each_api
def test_the_path_of_an_operation_begins_below_the_model(api):
    bare = api.named(block=lambda: three_layers(api), head=api.dense)
    for under in api.adapters:
        for key, expected in (
            ("head:dot_general", ["float16", "float16", "float16", "float32"]),
            ("block/first:dot_general", ["float32", "float16", "float16", "float16"]),
            ("block:dot_general", ["float32", "float32", "float32", "float16"]),
        ):
            assert dtypes_of_products(under(bare, "mixed_float16", {key: "float32"}), X) == expected
        with pytest.raises(jaxmp.UnmatchedOverrideError, match="'first:dot_general' matched none; nearest paths: "):
            dtypes_of_products(under(bare, "mixed_float16", {"first:dot_general": "float32"}), X)
