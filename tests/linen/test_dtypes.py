"""Linen layers as written compute the same as with ``dtype=`` by hand; under a policy, products are half."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import in_turn
from linen_zoo import (
    HALVES,
    MLP,
    Tied,
    data,
    dtypes_of,
    float32,
    gives_the_same_bits,
    is_as_by_hand,
    model_products,
    numbers,
    of_dtype,
    products,
    quick_jit,
    rngs,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
    written,
)

from jaxmp.linen import apply_policy
from jaxmp.program.walk import equations

IMAGE, SEQUENCE, VECTOR = (2, 4, 4, 3), (2, 8, 8), (2, 8)

LAYERS: dict[str, tuple[Any, Any]] = {
    "Dense": (lambda **hand: nn.Dense(8, **hand), data(*VECTOR)),
    "Conv": (lambda **hand: nn.Conv(3, (3, 3), **hand), data(*IMAGE)),
    "Embed and attend": (lambda dtype=None: Tied(dtype), jnp.array([[0, 4, 2]])),
    "WeightNorm": (lambda **hand: nn.WeightNorm(nn.Dense(8, **hand), **hand), data(*VECTOR)),
    "Bidirectional": (
        lambda **hand: nn.Bidirectional(nn.RNN(nn.LSTMCell(8, **hand)), nn.RNN(nn.GRUCell(8, **hand))),
        data(*SEQUENCE),
    ),
}
SLOW = {"Bidirectional": pytest.mark.slow("two cells in loops; cells and loops also have tests of their own")}
CASES = [pytest.param(layer, policy, "float32", marks=SLOW.get(layer, ())) for layer, policy in in_turn(LAYERS)] + [
    ("Dense", "mixed_bfloat16", "int32"),
    ("Conv", "mixed_float16", "bfloat16"),
]


def test_the_comparison_with_dtype_set_by_hand_detects_a_cast_in_another_place():
    x = data(*VECTOR)
    for other in (
        MLP(),
        apply_policy(MLP(), "mixed_bfloat16"),
        apply_policy(MLP(), "mixed_float16", {"*_1": "float32"}),
    ):
        with pytest.raises(AssertionError):
            is_as_by_hand(written(MLP(), "mixed_float16"), other, shapes(MLP(), x), x)


@pytest.mark.parametrize(("layer", "policy", "inputs"), CASES)
def test_a_layer_is_the_same_computation_as_with_dtype_set_by_hand(layer, policy, inputs):
    make, x = LAYERS[layer]
    x = of_dtype(x, inputs)
    model = apply_policy(make(), policy)
    with standard_promotion():
        variables = shapes(make(), x)
        same_computation(model.init, make().init, rngs(), x)
        is_as_by_hand(written(make(), policy), make(dtype=HALVES[policy]), variables, x)
        assert set(model_products(model, x)) == {HALVES[policy]}


@pytest.mark.once
@pytest.mark.parametrize(
    ("layer", "policy"),
    [
        ("Conv", "mixed_bfloat16"),
        ("WeightNorm", "mixed_float16"),
    ],
)
def test_a_layer_gives_the_same_bits_as_with_dtype_set_by_hand(layer, policy):
    make, x = LAYERS[layer]
    with standard_promotion():
        variables = numbers(shapes(make(), x))
        gives_the_same_bits(written(make(), policy), make(dtype=HALVES[policy]), variables, x)


@pytest.mark.once
@pytest.mark.slow("compiles two networks of eight gates; the test of a simple cell below has the same casts")
def test_an_optimized_cell_gives_the_same_bits_as_with_dtype_set_by_hand():
    def make(**hand: Any) -> nn.Module:
        return nn.RNN(nn.OptimizedLSTMCell(8, **hand))

    x = data(*SEQUENCE)
    variables = numbers(shapes(make(), x))
    model = written(make(), "mixed_float16")
    with standard_promotion():
        gives_the_same_bits(model, make(dtype="float16"), variables, x)


def test_every_gate_of_an_optimized_cell_is_half():
    model = apply_policy(nn.RNN(nn.OptimizedLSTMCell(8)), "mixed_float16")
    with standard_promotion():
        assert set(model_products(model, data(*SEQUENCE))) == {"float16"}


NORMS = {
    "LayerNorm": nn.LayerNorm,
    "GroupNorm": functools.partial(nn.GroupNorm, num_groups=2),
    "BatchNorm": functools.partial(nn.BatchNorm, use_running_average=True),
}


def norm_is_as_by_hand(norm: Any) -> None:
    """Assert that a norm between layers computes the same as by hand."""

    def make(**hand: Any) -> nn.Module:
        return nn.Sequential([nn.Dense(8, **hand), norm(**hand), nn.Dense(8, **hand)])

    x = data(*SEQUENCE)
    with standard_promotion():
        variables = shapes(make(), x)
        is_as_by_hand(written(make(), "mixed_float16"), make(dtype=jnp.float16), variables, x)


def test_a_norm_between_layers_computes_the_same_as_with_dtype_set_by_hand():
    for norm in NORMS.values():
        norm_is_as_by_hand(norm)


def test_attention_has_half_products_and_a_float32_softmax():
    def half_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        scores = jnp.einsum("...qhd,...khd->...hqk", query / jnp.sqrt(query.shape[-1]).astype(query.dtype), key)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(query.dtype)
        return jnp.einsum("...hqk,...khd->...qhd", weights, value)

    make = functools.partial(nn.MultiHeadDotProductAttention, num_heads=2, normalize_qk=True)
    x = data(1, 8, 8)  # so small that the derivative of the scale needs no float32 sum
    with standard_promotion():
        variables = numbers(shapes(make(), x))
        model = apply_policy(make(), "mixed_bfloat16")
        by_hand = make(dtype=jnp.bfloat16, attention_fn=half_attention)
        np.testing.assert_allclose(model.apply(variables, x), by_hand.apply(variables, x), rtol=0.02, atol=0.005)
        gradient = jax.grad(lambda variables: model.apply(variables, x).sum())
        assert set(products(gradient, variables)) == {"bfloat16"}
        assert dtypes_of(jax.eval_shape(model.apply, variables, x)) == {"float32"}
        of_author = apply_policy(make(dtype=jnp.bfloat16), "mixed_float16")
        is_as_by_hand(of_author, make(dtype=jnp.bfloat16), variables, x)


def test_spectral_norm_computes_the_same_as_with_dtype_set_by_hand_and_its_statistics_stay_float32():
    def make(**hand: Any) -> nn.Module:
        return nn.SpectralNorm(nn.Dense(8, **hand), **hand)

    x = data(*VECTOR)
    variables = quick_jit(functools.partial(make().init, update_stats=False))(rngs(), x)
    model, by_hand = written(make(), "mixed_float16"), make(dtype=jnp.float16)
    apply = {"update_stats": True, "mutable": ["batch_stats"]}
    got, state = quick_jit(functools.partial(model.apply, **apply))(variables, x)
    want, state_by_hand = quick_jit(functools.partial(by_hand.apply, **apply))(variables, x)
    same_bits((got, state), (float32(want), state_by_hand))
    assert dtypes_of(state) == {"float32"}


def test_batch_norm_in_training_has_the_same_float32_statistics_as_with_dtype_set_by_hand():
    policy = "mixed_float16"

    def make(**hand: Any) -> nn.Module:
        return nn.Sequential([nn.Dense(8, **hand), nn.BatchNorm(use_running_average=False, **hand)])

    def apply(model: nn.Module) -> Any:
        return lambda variables: float32(model.apply(variables, x, mutable=["batch_stats"]))

    x = data(*VECTOR)
    with standard_promotion():
        variables = shapes(make(), x)
        same_computation(apply(written(make(), policy)), apply(make(dtype=HALVES[policy])), variables)
        after = jax.eval_shape(apply(apply_policy(make(), policy)), variables)[1]
        assert dtypes_of(after) == {"float32"}


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.SimpleCell])
def test_a_cell_that_is_called_directly_gives_the_same_carry_and_output_as_with_dtype_set_by_hand(cell):
    x = data(2, 4)
    carry = cell(4).initialize_carry(jax.random.key(0), x.shape)
    model, by_hand = written(cell(4), "mixed_float16"), cell(4, dtype="float16")
    with standard_promotion():
        variables = shapes(cell(4), carry, x)
        is_as_by_hand(model, by_hand, variables, carry, x)
        assert set(products(model.apply, variables, carry, x)) == {"float16"}


def test_an_rnn_of_simple_cells_keeps_its_carry_float32_although_dtype_set_by_hand_needs_a_half_carry():
    x = data(*SEQUENCE)
    model, by_hand = apply_policy(nn.RNN(nn.SimpleCell(8)), "mixed_float16"), nn.RNN(nn.SimpleCell(8, dtype="float16"))
    variables, carry = numbers(shapes(model, x)), jnp.zeros((2, 8), jnp.float16)
    with pytest.raises(TypeError, match="carry"):
        by_hand.apply(variables, x)

    def both(variables: Any) -> Any:
        return model.apply(variables, x), float32(by_hand.apply(variables, x, initial_carry=carry))

    got, want = quick_jit(both)(variables)
    np.testing.assert_allclose(got, want, rtol=0.01, atol=0.001)


def test_decoding_step_by_step_fills_a_half_cache_as_with_dtype_set_by_hand():
    policy = "mixed_bfloat16"

    def make(**hand: Any) -> nn.Module:
        return nn.MultiHeadDotProductAttention(num_heads=2, decode=True, **hand)

    x = data(*SEQUENCE)
    model, by_hand = apply_policy(make(), policy), make(dtype=HALVES[policy])
    variables = shapes(model, x)
    assert variables["cache"]["cached_key"].dtype == HALVES[policy]

    def step(model: nn.Module) -> Any:
        def apply(variables: Any, token: jax.Array) -> Any:
            out, cache = model.apply(variables, token, mutable=["cache"])
            return out.astype(jnp.float32), cache

        return apply

    assert jax.eval_shape(step(model), variables, x[:, :1])[1]["cache"] == variables["cache"]
    same_computation(step(written(make(), policy)), step(by_hand), variables, x[:, :1])
    initial = numbers(variables)
    (got, cache), (want, cache_by_hand) = (step(m)(initial, x[:, :1]) for m in (model, by_hand))
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.005)
    same_bits(cache, cache_by_hand)


def test_a_pure_half_preset_equals_dtype_and_param_dtype_set_by_hand():
    policy = "bfloat16"

    def make(**hand: Any) -> nn.Module:
        return nn.Sequential([nn.Dense(8, **hand), nn.Conv(3, (2,), **hand)])

    x = data(*SEQUENCE)
    model, by_hand = apply_policy(make(), policy), make(dtype=policy, param_dtype=policy)
    variables = shapes(model, x)
    assert variables == shapes(by_hand, x)
    assert dtypes_of(variables) == {policy}
    same_computation(written(make(), policy).apply, by_hand.apply, variables, x)
    assert jax.eval_shape(model.apply, variables, x) == jax.eval_shape(by_hand.apply, variables, x)


def test_an_initializer_that_cannot_run_in_half_precision_runs_in_float32_and_is_rounded():
    policy, x, orthogonal = "float16", data(*SEQUENCE), nn.initializers.orthogonal()
    for init in (orthogonal, nn.with_partitioning(orthogonal, ("rows", None))):
        module = nn.Dense(8, use_bias=False, kernel_init=init)
        model = apply_policy(module, policy)
        got, expected = jax.jit(lambda rngs, models=(model, module): [m.init(rngs, x) for m in models])(rngs())
        got, expected = (nn.unbox(variables["params"]["kernel"]) for variables in (got, expected))
        same_bits(got, np.asarray(expected).astype(policy))
    model = apply_policy(nn.RNN(nn.LSTMCell(8)), policy)
    variables = shapes(model, x)
    assert dtypes_of(variables) == {policy} and jax.eval_shape(model.apply, variables, x).dtype == policy


def test_the_preset_float32_is_the_bare_model_with_products_at_the_highest_precision():
    x = data(*VECTOR)
    model = apply_policy(MLP(), "float32")
    variables = shapes(model, x)
    with jax.default_matmul_precision("highest"):
        same_computation(model.apply, MLP().apply, variables, x)
    assert set(model_products(model, x.astype(jnp.bfloat16))) == {"float32"}


# --- dtypes that the author set, and overrides ------------------------------------------------------------------------


def test_a_dtype_that_the_author_set_stays():
    x = data(*VECTOR)
    model = apply_policy(nn.Sequential([nn.Dense(8), nn.Dense(8, dtype="float32")]), "mixed_bfloat16")
    assert model_products(model, x) == ["bfloat16", "float32"]


def test_a_value_that_only_a_module_in_the_authors_float32_reads_is_not_rounded():
    model = apply_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm(dtype="float32"), nn.Dense(8)]), "mixed_bfloat16")
    x = data(*VECTOR)
    program = jax.make_jaxpr(model.apply)(shapes(model, x), x)
    (bias, *_) = (eqn for eqn in equations(program) if eqn.primitive.name == "add")
    assert bias.outvars[0].aval.dtype == jnp.float32


def test_an_override_replaces_the_dtype_that_the_author_set():
    x = data(*VECTOR)
    bare = nn.Sequential([nn.Conv(8, (1,)), nn.Dense(8, dtype="float32")])
    for pattern in ("layers_1", "type:Dense", nn.Dense, "*"):
        model = apply_policy(bare, "mixed_bfloat16", {pattern: "mixed_float16"})
        assert model_products(model, x)[1] == "float16"


def test_a_param_dtype_that_the_author_set_stays_unless_an_override_matches():
    x = data(*VECTOR)
    bare = nn.Sequential([nn.Dense(8, param_dtype=jnp.bfloat16), nn.Dense(8)])
    params = shapes(apply_policy(bare, "mixed_float16"), x)["params"]
    assert [dtypes_of(params[name]) for name in ("layers_0", "layers_1")] == [{"bfloat16"}, {"float32"}]
    params = shapes(apply_policy(bare, "mixed_float16", {"layers_0": "mixed_float16"}), x)["params"]
    assert dtypes_of(params) == {"float32"}


def test_a_default_dtype_is_replaced_in_every_spelling_and_an_integer_dtype_is_not():
    class Model(nn.Module):
        dtype: Any = jnp.float32

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, dtype=self.dtype)(x)

    x = data(*VECTOR)
    for default in (jnp.float32, "float32", jnp.dtype("float32")):
        assert model_products(apply_policy(Model(default), "mixed_float16"), x) == ["float16"]

    class Tokens(nn.Module):
        dtype: Any = jnp.int32

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.one_hot(jnp.asarray(x, self.dtype), 8))

    model, ids = apply_policy(Tokens(), "mixed_float16"), jnp.array([0, 3])
    assert model_products(model, ids) == ["float16"]


def test_modules_below_a_container_without_a_dtype_follow_their_own_paths():
    class Block(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            x = x if self.dtype is None else x.astype(self.dtype)
            return nn.Dense(8, dtype=self.dtype, name="fine")(x), nn.Dense(8, dtype=self.dtype, name="rough")(x)

    x = data(*VECTOR)
    model = apply_policy(Block(), "mixed_bfloat16", {"fine": "float32"})
    assert model_products(model, x) == ["float32", "bfloat16"]

    def fine(variables: Any) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return nn.Dense(8).apply({"params": variables["params"]["fine"]}, x)

    same_computation(lambda variables: model.apply(variables, x)[0], fine, shapes(model, x))


def test_a_parent_can_read_the_dtype_in_which_its_submodule_computes():
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(8)

        def __call__(self, x):
            return self.dense(x) + jnp.ones((), self.dense.dtype)

    x = data(*VECTOR)
    model = apply_policy(Model(), "mixed_float16")
    assert jax.eval_shape(model.apply, shapes(model, x), x).dtype == jnp.float32

    class Holder(nn.Module):
        dense: nn.Module

        def __call__(self, x):
            return self.dense(jnp.ones((), self.dense.dtype) * x)

    model = apply_policy(Holder(nn.Dense(8)), "mixed_float16")
    called = jax.eval_shape(lambda variables: model.bind(variables)(x), shapes(model, x))
    assert called.dtype == jnp.float32


def test_only_the_outputs_of_the_root_are_cast_and_code_sees_float32():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(8)(x)
            inside.append(y.dtype)
            return {"logits": y, "top": jnp.argmax(y, -1)}

    x, inside = data(*VECTOR), []
    model = apply_policy(Model(), "params=float32,compute=float16,output=bfloat16")
    out = jax.eval_shape(model.apply, shapes(model, x), x)
    assert (out["logits"].dtype, out["top"].dtype, inside[-1]) == (jnp.bfloat16, jnp.int32, jnp.float32)
