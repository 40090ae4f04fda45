"""NNX modules as written compute as with ``dtype=``; under a policy, products are half."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import in_turn
from flax import nnx
from jax import lax
from linen_zoo import HALVES, data, of_dtype, products, same_bits, standard_promotion
from nnx_zoo import Net, Scale, ScaleByHand, is_as_by_hand, is_close, model_products, outcomes, rngs, values, written

from jaxmp._internals.jax.sources import names_of
from jaxmp.engine.marks import path_of
from jaxmp.nnx import apply_policy
from jaxmp.program.walk import equations

SEQUENCE, IMAGE = data(2, 8, 8), data(2, 5, 5, 3)


def attended(model: Any, x: jax.Array) -> jax.Array:
    return model.attend(x)


def carried(model: Any, x: jax.Array) -> Any:
    return model(model.initialize_carry((2, 8), rngs(3)), x[:, 0])


def lora(dtype: Any = None) -> nnx.LoRA:
    base = nnx.Linear(8, 8, rngs=rngs(), dtype=dtype)
    return nnx.LoRA(8, 2, 8, base_module=base, b_initializer=nnx.initializers.normal(), rngs=rngs(), dtype=dtype)


def run(model: Any, x: jax.Array) -> Any:
    return model(x)


LAYERS: dict[str, tuple[Any, Any]] = {
    "Linear": (lambda **hand: nnx.Linear(8, 4, rngs=rngs(), **hand), run),
    "Embed.attend": (lambda **hand: nnx.Embed(5, 8, rngs=rngs(), **hand), attended),
    "BatchNorm": (lambda **hand: nnx.BatchNorm(8, rngs=rngs(), **hand), run),
    "LoRA": (lora, run),
    "SimpleCell": (lambda **hand: nnx.SimpleCell(8, 8, rngs=rngs(), **hand), carried),
    "RNN of GRUCell": (lambda **hand: nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs(), **hand), rngs=rngs()), run),
}


SLOW = {"RNN of GRUCell": pytest.mark.slow("compiles a loop and its gradients; cells have tests of their own")}
CASES = [pytest.param(name, policy, "float32", marks=SLOW.get(name, ())) for name, policy in in_turn(LAYERS)] + [
    ("Linear", "mixed_bfloat16", "int32"),
    ("Embed.attend", "mixed_bfloat16", "float16"),
]


@pytest.mark.parametrize(("name", "policy", "inputs"), CASES)
def test_a_layer_gives_the_same_outputs_gradients_and_statistics_as_with_dtype_set_by_hand(name, policy, inputs):
    make, call = LAYERS[name]
    model, by_hand = written(make(), policy), make(dtype=jnp.dtype(HALVES[policy]))
    is_as_by_hand(model, by_hand, of_dtype(SEQUENCE, inputs), call=call)
    same_bits(values(model, nnx.BatchStat), values(by_hand, nnx.BatchStat))


@pytest.mark.parametrize(("name", "policy", "inputs"), CASES)
def test_under_a_policy_a_layer_has_half_products_and_is_close_to_dtype_set_by_hand(name, policy, inputs):
    make, call = LAYERS[name]
    model, by_hand, x = apply_policy(make(), policy), make(dtype=jnp.dtype(HALVES[policy])), of_dtype(SEQUENCE, inputs)
    assert set(model_products(model, x, call=call)) == ({HALVES[policy]} if name != "BatchNorm" else set())
    is_close(*outcomes((model, by_hand), x, call=call))


@pytest.mark.once
def test_attention_has_half_products_and_a_float32_softmax():
    def half_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
        scores = jnp.einsum("...qhd,...khd->...hqk", query / jnp.sqrt(query.shape[-1]).astype(query.dtype), key)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(query.dtype)
        return jnp.einsum("...hqk,...khd->...qhd", weights, value)

    def make(**hand: Any) -> nnx.Module:
        return nnx.MultiHeadAttention(2, 8, qkv_features=16, decode=False, rngs=rngs(), **hand)

    model = apply_policy(make(), "mixed_bfloat16")
    by_hand = make(dtype=jnp.bfloat16, attention_fn=half_attention)
    got, want = outcomes((model, by_hand), SEQUENCE, call=run)
    is_close(got, want)
    graphdef, params = nnx.split(model)

    def loss(params: Any) -> jax.Array:
        return nnx.merge(graphdef, params)(SEQUENCE).sum()

    assert set(products(jax.grad(loss), params)) == {"bfloat16"}


def test_a_model_of_all_kinds_of_modules_computes_the_same_as_with_dtype_set_by_hand():
    is_as_by_hand(written(Net(rngs()), "mixed_float16"), Net(rngs(), jnp.dtype("float16")), IMAGE)
    is_close(*outcomes((apply_policy(Net(rngs()), "mixed_float16"), Net(rngs(), jnp.dtype("float16"))), IMAGE))

    model = apply_policy(Net(rngs()), "mixed_bfloat16")
    assert model_products(model, IMAGE) == ["bfloat16"] * 5  # conv, three linears, the kernel of Scale
    with jax.numpy_dtype_promotion("standard"):
        assert nnx.jit(run)(model, IMAGE).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(values(model))} == {jnp.dtype("float32")}


def loop_gives_what_a_call_gives(how: Any) -> None:
    """Assert that values above float16's range stay finite in a float32 loop."""

    class Square(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * x * self.scale

    model, x = apply_policy(Square(), "float32"), jnp.full((2,), 300, jnp.float16)  # 300² is infinite in float16
    call = jax.jit(lambda x: model(x)) if how == "jit in scan" else model
    if how == "fori_loop":
        out = lax.fori_loop(0, 2, lambda _, total: total + call(x), jnp.zeros((2,)))
    else:
        out = lax.scan(lambda c, _: (c, call(x)), x, None, length=2)[1].sum(0)
    assert out.tolist() == [180_000, 180_000]
    assert call(x).tolist() == [90_000, 90_000]


def test_a_float32_root_called_in_a_loop_on_half_inputs_gives_what_a_direct_call_gives():
    for how in ("fori_loop", "jit in scan"):
        loop_gives_what_a_call_gives(how)


@pytest.mark.once
def test_under_a_float32_policy_a_model_computes_the_same_as_the_bare_model():
    got, want = outcomes((apply_policy(Net(rngs()), "tensorfloat32"), Net(rngs())), IMAGE)
    same_bits(got[0], want[0])
    # The gradient of a bias before a norm is a sum that cancels, and XLA may add it in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got[1:], want[1:])


def test_a_pure_half_policy_casts_params_and_the_original_model_keeps_its_params():
    bare = Net(rngs())
    before = values(bare)
    model = apply_policy(bare, "float16")
    same_bits(values(model, nnx.Param), jax.tree.map(lambda x: np.asarray(x, "float16"), values(bare, nnx.Param)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(values(model, nnx.BatchStat))} == {"float32"}
    with jax.numpy_dtype_promotion("standard"):
        assert nnx.eval_shape(run, model, IMAGE).dtype == jnp.float16
    assert model.again.kernel is model.layers[0].kernel
    same_bits(values(bare, nnx.Param), nnx.filter_state(before, lambda path, _: path[-1] not in ("mean", "var")))


class Mixer(nnx.Module):
    """A module with a Param and submodules; autocast's rules cast its inputs."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gain = nnx.Param(jax.random.normal(rngs.params(), (8,)))
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.exact = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        return self.linear(x * self.gain) @ jnp.diag(self.gain[...]), self.exact(x)


def test_in_a_module_with_params_and_submodules_inputs_are_rounded_only_for_half_products():
    bare = Mixer(rngs())
    model = apply_policy(bare, "mixed_bfloat16", {"exact": "float32"})
    mixed, exact = model(SEQUENCE)
    kernel, bias = bare.linear.kernel[...].astype("bfloat16"), bare.linear.bias[...].astype("bfloat16")
    scaled = (SEQUENCE * bare.gain[...]).astype("bfloat16")  # no product before it, so it is computed in float32
    hidden = jax.lax.dot_general(scaled, kernel, (((2,), (0,)), ((), ()))) + bias
    same_bits(mixed, (hidden @ jnp.diag(bare.gain[...].astype("bfloat16"))).astype("float32"))
    with jax.default_matmul_precision("highest"):
        same_bits(exact, bare.exact(SEQUENCE))


class Block(nnx.Module):
    """A residual connection and a norm, without params of its own."""

    def __init__(self) -> None:
        self.layer, self.norm = nnx.Linear(8, 8, rngs=rngs()), nnx.LayerNorm(8, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x + self.layer(x))


class Owner(nnx.Module):
    """A block in a module with params."""

    def __init__(self) -> None:
        self.first, self.last = (nnx.Linear(8, 8, rngs=rngs()) for _ in range(2))
        self.block, self.scale = Block(), nnx.Param(jnp.ones(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.block(self.first(x)) * self.scale)


def test_a_residual_between_half_layers_stays_half():
    model = apply_policy(Owner(), "mixed_bfloat16")
    with standard_promotion():  # LayerNorm adds half and float32 arrays
        program = jax.make_jaxpr(model)(SEQUENCE)
    sums = [eqn for eqn in equations(program) if eqn.primitive.name == "add"]
    residuals = [eqn for eqn in sums if path_of(names_of(eqn))[-1] == "block"]
    assert [eqn.outvars[0].aval.dtype.name for eqn in residuals] == ["bfloat16"]


def test_the_preset_float32_has_true_float32_products_also_as_an_override():
    def precisions(model: Any) -> list[Any]:
        graphdef, state = nnx.split(model)
        jaxpr = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(SEQUENCE))(state)
        return [eqn.params["precision"] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]

    highest = (jax.lax.Precision.HIGHEST,) * 2
    model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=rngs()) for _ in range(2)))
    assert precisions(apply_policy(model, "float32")) == [highest, highest]
    assert precisions(apply_policy(model, "mixed_bfloat16", {"layers/1": "float32"})) == [None, highest]
    assert precisions(apply_policy(model, "float32", {"layers/1": "mixed_bfloat16"})) == [highest, None]


def test_an_rngs_object_or_a_module_can_be_an_argument_of_a_method():
    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.kernel = nnx.Param(jnp.ones((8, 8)))

        def __call__(self, x: jax.Array, rngs: nnx.Rngs, other: nnx.Module) -> jax.Array:
            return x @ self.kernel + jax.random.normal(rngs.noise(), (8,), x.dtype) + other(x).astype(x.dtype)

    other, generators = apply_policy(nnx.Linear(8, 8, rngs=rngs()), "mixed_float16"), nnx.Rngs(noise=0)
    out = apply_policy(Noisy(rngs()), "mixed_float16")(SEQUENCE, generators, other)
    assert out.dtype == jnp.float32
    assert int(generators.noise.count[...]) == 1


def test_a_module_without_a_dtype_is_close_to_casts_by_hand_with_its_last_sums_in_float32():
    model, bare = apply_policy(Scale(8, rngs()), "mixed_float16"), Scale(8, rngs())
    product = (SEQUENCE.astype("float16") @ bare.kernel[...].astype("float16")).astype("float32")
    got, by_hand = outcomes((model, ScaleByHand(8, jnp.float16, rngs())), SEQUENCE)
    same_bits(got[0], product + bare.biases[0] + bare.biases[1])
    is_close(got, by_hand)


def test_a_statistic_that_is_written_in_half_precision_is_stored_in_float32():
    class Counts(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.kernel, self.last = nnx.Param(jnp.ones((8, 8))), nnx.BatchStat(jnp.zeros((8,)))

        def __call__(self, x: jax.Array) -> jax.Array:
            y = x @ self.kernel
            self.last.set_value(y[0, 0])
            return y

    model = apply_policy(Counts(rngs()), "mixed_float16")
    out = model(SEQUENCE)
    assert model.last[...].dtype == jnp.float32
    np.testing.assert_array_equal(model.last[...], out[0, 0])
