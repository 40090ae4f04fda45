"""Lifted transforms under a policy compute the same as casts by hand."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from autocast_tools import in_turn
from linen_zoo import (
    HALVES,
    MLP,
    Linear,
    data,
    dtypes_of,
    float32,
    is_as_by_hand,
    model_products,
    numbers,
    products,
    quick_jit,
    rngs,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
    written,
    zeros,
)

import jaxmp
from jaxmp.linen import apply_policy

X = data(2, 8)


class Block(nn.Module):
    """A module that keeps its input's shape; ``hand`` is a dtype set by hand."""

    hand: Any = None
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(8, dtype=self.hand)(nn.tanh(nn.Dense(8, dtype=self.hand)(x)))
        return nn.Dropout(self.rate, deterministic=False)(y)


class Step(nn.Module):
    """A loop body. With a dtype set by hand, it must cast the carry back."""

    hand: Any = None
    rate: float = 0.0
    block: Any = Block

    @nn.compact
    def __call__(self, carry: jax.Array, x: Any = None) -> tuple[jax.Array, jax.Array]:
        y = self.block(self.hand, self.rate)(carry if x is None else carry * x)
        return (y if self.hand is None else y.astype(carry.dtype)), y


def scanned(hand: Any = None, step: Any = Step, **kwargs: Any) -> nn.Module:
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}, "length": 3}
    return nn.scan(step, **{**options, **kwargs})(hand, 0.5)


class Calls(nn.Module):
    """A module that calls a transformed function or class in its compact method."""

    call: Any
    hand: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return self.call(self, x, self.hand)


class DecoratedMethod(nn.Module):
    hand: Any = None

    @nn.remat
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nn.Dense(8, dtype=self.hand)(x))

    @functools.partial(nn.remat, prevent_cse=False)
    @nn.compact
    def head(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, dtype=self.hand, name="head")(x)


def functional_while(mdl: nn.Module, x: jax.Array, hand: Any) -> jax.Array:
    block = Block(hand)
    block(x)  # creates the params, because a while loop cannot

    def body(block: nn.Module, carry: Any) -> Any:
        y = block(carry[1])
        return carry[0] + 1, y.astype(x.dtype) if hand else y

    return nn.while_loop(lambda _, carry: carry[0] < 3, body, block, (0, x))[1]


class Branches(nn.Module):
    hand: Any = None

    def setup(self) -> None:
        self.block, self.dense = Block(self.hand), nn.Dense(8, dtype=self.hand)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.is_initializing():
            self.dense(x), self.block(x)
        x = nn.switch(jnp.int32(1), [lambda mdl, x: mdl.block(x), lambda mdl, x: mdl.dense(x)], self, x)
        return nn.cond(x[0, 0] > 0, lambda mdl, x: mdl.block(x), lambda mdl, x: mdl.dense(x), self, x)


def functional_remat_scan(mdl: nn.Module, x: jax.Array, hand: Any) -> jax.Array:
    def body(block: nn.Module, x: jax.Array) -> jax.Array:
        return block(x).astype(x.dtype) if hand else block(x)

    return nn.remat_scan(body, lengths=(2, 2))(Block(hand), x)


def functional_vjp(mdl: nn.Module, x: jax.Array, hand: Any) -> Any:
    y, pullback = nn.vjp(lambda block, x: block(x), Block(hand), x)
    return y, pullback(jnp.ones_like(y))[1]


def mapped_variables(mdl: nn.Module, x: jax.Array, hand: Any) -> jax.Array:
    halve = functools.partial(jax.tree.map, lambda w: w / 2)
    return nn.map_variables(nn.Dense, "params", trans_in_fn=halve, init=mdl.is_initializing())(8, dtype=hand)(x)


ENSEMBLE = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
MODELS: dict[str, Any] = {
    "scan": scanned,
    "remat_scan": functools.partial(Calls, functional_remat_scan),
    "vmap over members": lambda hand=None: nn.vmap(Block, **ENSEMBLE, in_axes=None, axis_size=3)(hand, 0.5),
    "decorated methods": lambda hand=None: DecoratedMethod(hand),
    "while_loop": functools.partial(Calls, functional_while),
    "cond and switch": Branches,
    "vjp": functools.partial(Calls, functional_vjp),
    "map_variables": functools.partial(Calls, mapped_variables),
}
LOOPS = ("scan", "remat_scan", "while_loop")  # by hand, the body casts its carry


def transformed_model_is_as_by_hand(name: Any, policy: Any) -> None:
    """Assert that a model of the table computes the same as by hand."""
    make, half = MODELS[name], HALVES[policy]
    model, as_written, by_hand = apply_policy(make(), policy), written(make(), policy), make(hand=half)
    variables = same_computation(model.init, make().init, rngs(), X)
    assert set(products(functools.partial(model.apply, rngs=rngs(1)), variables, X)) == {half}
    if name in ("vjp", *LOOPS):
        got, want = quick_jit(lambda weights: [m.apply(weights, X, rngs=rngs(1)) for m in (model, by_hand)])(
            numbers(variables)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02), got, float32(want))
    else:
        is_as_by_hand(as_written, by_hand, variables, X)


def test_a_transformed_model_computes_the_same_as_with_dtype_set_by_hand():
    for name, policy in in_turn(MODELS):
        transformed_model_is_as_by_hand(name, policy)


def test_a_layer_without_a_dtype_field_follows_the_policy_through_a_transform():
    lifted = nn.vmap(Linear, **ENSEMBLE, in_axes=None, axis_size=2)
    model = apply_policy(lifted(), "mixed_float16")
    assert model_products(model, X) == ["float16"]
    same_computation(model.apply, jaxmp.autocast(lifted().apply, "mixed_float16"), shapes(model, X), X)


class Statistics(nn.Module):
    """A layer that stores means in the dtype of its activations."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        y = nn.Dense(8)(x)
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(8))
        newest = self.variable("batch_stats", "newest", lambda: jnp.mean(y, 0))
        if not self.is_initializing():
            mean.value = jnp.mean(y, 0)
            newest.value = {"a": jnp.mean(y, 0)}["a"]
        return y, None


def test_statistics_written_in_half_by_a_scanned_layer_stay_float32():
    for how in ({"variable_carry": "batch_stats"}, {"variable_axes": {"params": 0, "batch_stats": 0}}):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        model = apply_policy(nn.scan(Statistics, **{**options, **how})(), "mixed_float16")
        variables = zeros(shapes(Statistics(), X))
        for name in ["params"] if "variable_carry" in how else ["params", "batch_stats"]:
            variables[name] = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables[name])
        _, state = model.apply(variables, X, None, mutable="batch_stats")
        assert jax.tree.map(jax.typeof, state["batch_stats"]) == jax.tree.map(jax.typeof, variables["batch_stats"])
    assert dtypes_of(shapes(apply_policy(Statistics(), "mixed_float16"), X)) == {"float32"}


# --- nn.jit reuses a trace only under the same policy -----------------------------------------------------------------


class Counted(nn.Module):
    """A module that calls ``note`` when it is traced."""

    note: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.note(self.path)
        return nn.Dense(8)(x)


class Stack(nn.Module):
    block: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = self.block()(x)
        return x


def test_nn_jit_of_the_root_does_not_reuse_the_trace_of_another_policy():
    half = [
        set(model_products(apply_policy(nn.jit(Block)(), policy), X)) for policy in ("mixed_float16", "mixed_bfloat16")
    ]
    assert [set(model_products(nn.jit(Block)(), X)), *half] == [{"float32"}, {"float16"}, {"bfloat16"}]
    assert set(model_products(apply_policy(nn.jit(Block)(), "mixed_float16"), X)) == {"float16"}


def test_nn_jit_traces_once_for_each_policy_and_reuses_the_trace():
    traces: list[Any] = []
    bare = Stack(functools.partial(nn.jit(Counted), traces.append))
    variables = bare.init(rngs(), X)
    dtypes_by_policy = {}
    for policy in (None, "mixed_float16", "mixed_bfloat16", "float32", None, "mixed_float16"):
        model = apply_policy(bare, policy) if policy else bare
        before = len(traces)
        dtypes = products(model.apply, variables, X)
        assert dtypes_by_policy.setdefault(policy, dtypes) == dtypes
        model.apply(variables, X)
        assert len(traces) - before <= 2
    assert list(map(set, dtypes_by_policy.values())) == [{"float32"}, {"float16"}, {"bfloat16"}, {"float32"}]


def test_nn_jit_does_not_reuse_the_trace_of_a_sibling_under_another_policy():
    for pattern in ("JitCounted_1", "**/JitCounted_1/*"):
        model = apply_policy(Stack(functools.partial(nn.jit(Counted), print)), "mixed_float16", {pattern: "float32"})
        assert model_products(model, X) == ["float16", "float32"]


# --- JAX's transforms -------------------------------------------------------------------------------------------------


def test_vmap_and_loops_around_a_model_give_the_bits_of_calls():
    model, batches = apply_policy(MLP(), "mixed_float16"), data(3, 2, 8).astype("float16")

    @quick_jit
    def run(variables):
        def add(total, batch):
            out = model.apply(variables, batch)
            return total + out, out

        want = jnp.stack([model.apply(variables, batches[i]) for i in range(3)])
        mapped = jax.vmap(model.apply, in_axes=(None, 0))(variables, batches)
        total, outs = jax.lax.scan(add, jnp.zeros_like(want[0]), batches)
        total_of_loop = jax.lax.fori_loop(0, 3, lambda i, total: add(total, batches[i])[0], jnp.zeros_like(total))
        return (mapped, outs, total, total_of_loop), (want, want, *[want[0] + want[1] + want[2]] * 2)

    with standard_promotion():
        same_bits(*run(numbers(shapes(model, X))))


def test_no_tracer_is_leaked():
    class Reads(nn.Module):
        """A module whose initializer reads the module and the input."""

        width: int = 8

        @nn.compact
        def __call__(self, x):
            gain = self.param("gain", lambda key: jnp.ones(x.shape[-1:]) + 0 * self.width)
            return nn.Dense(self.width)(x * gain.astype(x.dtype))

    model = apply_policy(nn.Sequential([nn.remat(MLP)((8,)), Reads(), nn.jit(nn.Dense)(8)]), "mixed_float16")
    variables = shapes(model, X)
    with jax.checking_leaks():
        jax.eval_shape(jax.value_and_grad(lambda variables: model.apply(variables, X).sum()), variables)


def test_partitioned_params_keep_their_names_through_a_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return carry @ self.param("w", init, (8, 8)), None

    metadata = {nn.PARTITION_NAME: "layers"}
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3, "metadata_params": metadata}
    model = apply_policy(nn.scan(Layer, **options)(), "mixed_float16")
    assert shapes(model, X, None)["params"]["w"].names == ("layers", None, "model")
    assert model_products(model, X, None) == ["float16"]


def test_float8_operations_inside_a_layer_are_the_same_as_with_dtype_set_by_hand():
    def make(**hand):
        return nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp, **hand)

    x = data(4, 16)  # few elements, so that sums are computed in the same order as in the model with dtype=
    model = apply_policy(make(), "mixed_bfloat16")
    with standard_promotion():
        assert shapes(model, x) == shapes(make(), x)
        assert set(model_products(model, x)) == set(model_products(make(dtype="bfloat16"), x))
        is_as_by_hand(written(make(), "mixed_bfloat16"), make(dtype="bfloat16"), shapes(make(), x), x)
