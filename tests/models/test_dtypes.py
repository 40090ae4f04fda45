"""Linen and NNX layers compute in the dtypes of the policy, as with ``dtype=`` set by hand."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import in_turn
from both_apis import NNX, Linen, X, dtypes_of_products, each_api, mixed, pure
from flax import nnx
from jax import lax
from linen_zoo import (
    HALVES,
    data,
    dtypes_of,
    float32,
    quick_jit,
    same_bits,
    same_computation,
)

from jaxmp.program.walk import equations, product_dtypes

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Flax's norms and cells add half and float32 arrays

SEQUENCE, IDS = data(2, 4, 8), jnp.array([[0, 4, 2]])


def written(model: Any, policy: str) -> Any:
    """Return a model whose code runs as it is written, in the compute dtype of a policy."""
    return mixed(model, policy, {"**": "written"})


def same_float32_computation(model: Any, other: Any, *args: Any) -> None:
    """Assert that two models have the same computation up to the last cast to float32.

    The first model must also have gradients.
    """
    (apply, params), (apply_other, _) = pure(model, *args), pure(other, *args)
    same_computation(
        lambda params: float32(apply(params, *args)), lambda params: float32(apply_other(params, *args)), params
    )
    jax.eval_shape(jax.grad(pure(model, *args).loss(*args)), params)


# --- layers -----------------------------------------------------------------------------------------------------------


def library(api: Any) -> Any:
    return nn if api is Linen else nnx


def embedding(api: Any, **hand: Any) -> Any:
    def run(model: Any, ids: jax.Array) -> jax.Array:
        return model.embed.attend(model.dense(model.embed(ids)))

    options = hand if api is Linen else {"rngs": nnx.Rngs(0), **hand}
    return api.named(run, embed=lambda: library(api).Embed(8, 8, **options), dense=lambda: api.dense(**hand))


def norms(api: Any, **hand: Any) -> Any:
    batch_norm = functools.partial(library(api).BatchNorm, use_running_average=True)
    return api.named(
        first=lambda: api.dense(**hand),
        layer_norm=lambda: api.norm(**hand),
        group_norm=lambda: api.norm(functools.partial(library(api).GroupNorm, num_groups=2), **hand),
        batch_norm=lambda: api.norm(batch_norm, **hand),
        last=lambda: api.dense(**hand),
    )


def linen_cell(cell: Any, **hand: Any) -> Any:
    def run(model: Any, x: jax.Array) -> Any:
        return model.cell(model.cell.initialize_carry(jax.random.key(0), x.shape), x)

    return Linen.named(run, cell=lambda: cell(8, **hand))


def nnx_cell(cell: Any, **hand: Any) -> Any:
    def run(model: Any, x: jax.Array) -> Any:
        return model.cell(model.cell.initialize_carry(x.shape, nnx.Rngs(carry=0)), x)

    init = nnx.initializers.normal()
    return NNX.named(run, cell=lambda: cell(8, 8, recurrent_kernel_init=init, rngs=nnx.Rngs(0), **hand))


def lora(**hand: Any) -> nnx.LoRA:
    base = NNX.dense(**hand)
    return nnx.LoRA(8, 2, 8, base_module=base, b_initializer=nnx.initializers.normal(), rngs=nnx.Rngs(0), **hand)


# For each layer: the function that creates it, and its input.
LAYERS: dict[tuple[Any, str], tuple[Any, Any]] = {
    **{(api, "dense"): (api.dense, X) for api in (Linen, NNX)},
    **{(api, "embed and attend"): (functools.partial(embedding, api), IDS) for api in (Linen, NNX)},
    **{(api, "norms"): (functools.partial(norms, api), SEQUENCE) for api in (Linen, NNX)},
    (Linen, "convolution"): (lambda **hand: nn.Conv(8, (3,), **hand), SEQUENCE),
    (NNX, "convolution"): (lambda **hand: nnx.Conv(8, 8, (3,), rngs=nnx.Rngs(0), **hand), SEQUENCE),
    (Linen, "LSTM cell"): (functools.partial(linen_cell, nn.LSTMCell), X),
    (NNX, "GRU cell"): (functools.partial(nnx_cell, nnx.GRUCell), X),
    (Linen, "WeightNorm"): (lambda **hand: nn.WeightNorm(nn.Dense(8, **hand), **hand), X),
    (NNX, "LoRA"): (lora, SEQUENCE),
}


def test_the_comparison_with_dtype_set_by_hand_detects_a_cast_in_another_place():
    bare = Linen.named(first=Linen.dense, second=Linen.dense)
    others = [bare, mixed(bare, "mixed_bfloat16"), mixed(bare, "mixed_float16", {"second": "float32"})]
    for other in others:
        with pytest.raises(AssertionError):
            same_float32_computation(written(bare, "mixed_float16"), other, X)


@pytest.mark.parametrize(("api", "layer", "policy"), [(*key, policy) for key, policy in in_turn(LAYERS)])
def test_a_layer_is_the_same_computation_as_with_dtype_set_by_hand(api, layer, policy):
    make, x = LAYERS[api, layer]
    same_float32_computation(written(make(), policy), make(dtype=jnp.dtype(HALVES[policy])), x)
    assert set(dtypes_of_products(mixed(make(), policy), x)) == {HALVES[policy]}


@each_api
def test_a_layer_that_takes_integers_or_other_half_inputs_is_the_same_computation_as_by_hand(api):
    for policy, x in (("mixed_bfloat16", (3 * X).astype("int32")), ("mixed_float16", X.astype("bfloat16"))):
        same_float32_computation(written(api.dense(), policy), api.dense(dtype=jnp.dtype(HALVES[policy])), x)
        assert set(dtypes_of_products(mixed(api.dense(), policy), x)) == {HALVES[policy]}


@pytest.mark.once
@each_api
def test_a_layer_gives_the_same_bits_as_with_dtype_set_by_hand(api):
    make, x = LAYERS[api, "convolution"]
    model, by_hand = pure(written(make(), "mixed_bfloat16"), x), pure(make(dtype=jnp.bfloat16), x)

    @quick_jit
    def both(params: Any) -> Any:
        return [(float32(m.apply(params, x)), jax.grad(m.loss(x))(params)) for m in (model, by_hand)]

    (got, gradient), (want, gradient_by_hand) = both(model.params)
    same_bits(got, want)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient_by_hand))
    for leaf, leaf_by_hand in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_by_hand), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, leaf_by_hand, rtol=0.02, atol=0.01 * largest)


@pytest.mark.once
@each_api
def test_attention_has_half_products_also_in_its_gradient_and_a_float32_softmax(api):
    if api is Linen:
        attention = nn.MultiHeadDotProductAttention(2, normalize_qk=True)
    else:
        attention = nnx.MultiHeadAttention(2, 8, normalize_qk=True, decode=False, rngs=nnx.Rngs(0))
    x = data(1, 8, 8)
    apply, params = pure(mixed(attention, "mixed_bfloat16"), x)
    gradient = jax.make_jaxpr(jax.grad(lambda params: apply(params, x).sum()))(params)
    assert product_dtypes(gradient) == {"bfloat16"}
    assert {eqn.invars[0].aval.dtype.name for eqn in equations(gradient) if eqn.primitive.name == "exp"} == {"float32"}


@pytest.mark.once
@each_api
def test_a_pure_half_preset_equals_dtype_and_param_dtype_set_by_hand(api):
    def make(**hand: Any) -> Any:
        return api.named(dense=lambda: api.dense(**hand), conv=lambda: api.conv(**hand))

    model, by_hand = mixed(make(), "bfloat16"), make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    params = pure(model, SEQUENCE, abstract=True).params
    assert dtypes_of(params) == {"bfloat16"}
    same_float32_computation(written(make(), "bfloat16"), by_hand, SEQUENCE)
    assert jax.eval_shape(pure(model, SEQUENCE).apply, params, SEQUENCE).dtype == jnp.bfloat16


@pytest.mark.once
@each_api
def test_a_float32_preset_is_the_bare_model_with_products_at_its_precision(api):
    bare = api.named(first=api.dense, second=api.dense)
    for under, preset, precision in zip(api.adapters, ("tensorfloat32", "float32"), ("high", "highest"), strict=True):
        with jax.default_matmul_precision(precision):
            same_float32_computation(under(bare, preset), bare, X)
        assert set(dtypes_of_products(under(bare, "float32"), X.astype("bfloat16"))) == {"float32"}


@pytest.mark.once
@each_api
def test_a_float32_root_called_in_a_loop_on_half_inputs_gives_what_a_direct_call_gives(api):
    x = jnp.full((2,), 300, jnp.float16)  # 300² is infinite in float16
    apply, params = pure(mixed(api.WithParam(lambda w, x: x * x), "float32"), x)

    @quick_jit
    def results(params: Any) -> Any:
        in_fori = lax.fori_loop(0, 2, lambda _, total: total + apply(params, x), jnp.zeros((2,)))
        in_scan = lax.scan(lambda carry, _: (carry, jax.jit(apply)(params, x)), x, None, length=2)[1]
        return apply(params, x), in_fori / 2, *in_scan

    for result in results(params):
        assert result.tolist() == [90_000, 90_000]


@pytest.mark.once
@each_api
def test_only_the_outputs_of_the_root_are_cast_and_code_sees_float32(api):
    inside = []

    def run(model: Any, x: jax.Array) -> Any:
        y = model.dense(x)
        inside.append(y.dtype.name)
        return {"logits": y, "top": jnp.argmax(y, -1)}

    model = mixed(api.named(run, dense=api.dense), "params=float32,compute=float16,output=bfloat16")
    apply, params = pure(model, X)
    out = jax.eval_shape(apply, params, X)
    assert (out["logits"].dtype, out["top"].dtype, inside[-1]) == (jnp.bfloat16, jnp.int32, "float32")


# --- dtypes that the author set ---------------------------------------------------------------------------------------


@pytest.mark.once
@each_api
def test_a_dtype_that_the_author_set_stays_unless_an_override_matches(api):
    def model_with(dtype: str) -> Any:
        return api.named(conv=api.conv, dense=lambda: api.dense(dtype=jnp.dtype(dtype)))

    for under in api.adapters:
        assert dtypes_of_products(under(model_with("float32"), "mixed_float16"), X) == ["float16", "float32"]
        assert dtypes_of_products(under(model_with("bfloat16"), "mixed_float16"), X) == ["float16", "bfloat16"]
        for pattern in ("dense", f"type:{api.Dense.__name__}", api.Dense):
            model = under(model_with("float32"), "mixed_float16", {pattern: "mixed_float16"})
            assert dtypes_of_products(model, X) == ["float16", "float16"]


@pytest.mark.once
@each_api
def test_a_param_dtype_that_the_author_set_stays_unless_an_override_matches(api):
    bare = api.named(first=functools.partial(api.dense, param_dtype=jnp.bfloat16), second=api.dense)
    for overrides, dtypes in ((None, {"bfloat16", "float32"}), ({"first": "mixed_float16"}, {"float32"})):
        params = pure(mixed(bare, "mixed_float16", overrides), X, abstract=True).params
        assert dtypes_of(params) == dtypes
        assert dtypes_of(params["second"]) == {"float32"}


@pytest.mark.once
@each_api
def test_layers_whose_author_set_a_half_dtype_are_the_computation_of_flax(api):
    for make in (api.dense, api.norm):
        layer = make(dtype=jnp.bfloat16)
        same_float32_computation(mixed(layer, "mixed_float16"), layer, X)
