"""Tests of jaxmp.nnx.autocast: results, Variables, transforms and nesting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from linen_zoo import data, dtypes_of, quick_jit, same_bits
from nnx_zoo import Net, compiled, outcomes, products_of, rngs, values

import jaxmp
from jaxmp.nnx import apply_policy, autocast
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations, product_dtypes

pytestmark = pytest.mark.once  # test_dtypes.py and test_transforms.py run on the newest JAX

X = data(2, 6, 6, 3)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def encode(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.encode(x))


class Outer(nnx.Module):
    def __init__(self, inner: Any, rngs: nnx.Rngs) -> None:
        self.first, self.inner = nnx.Linear(8, 8, rngs=rngs), inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(self.first(x))


def test_the_products_of_every_module_are_half_and_have_its_path_as_scope():
    for name in (" Mixed_BFloat16 ", "float16", "p=f32, c=bf16, o=f32"):
        model, half = autocast(Mlp(rngs()), name), jaxmp.get_policy(name).compute_dtype.name
        assert products_of(model, data(2, 8)) == [("layers/0", half), ("layers/1", half), ("head", half)]
        assert nnx.eval_shape(model, data(2, 8)).dtype == jnp.float32  # the policy's output dtype is not used
        assert dtypes_of(values(model)) == {"float32"}

    nested = autocast(Outer(Outer(nnx.Linear(8, 8, rngs=rngs()), rngs()), rngs()), "mixed_bfloat16")
    assert [scope for scope, _ in products_of(nested, data(2, 8))] == ["first", "inner/first", "inner/inner"]


@pytest.mark.parametrize("under", [apply_policy, autocast])
def test_it_computes_the_same_as_jaxmp_autocast_and_updates_variables(under):
    policy = "mixed_float16"
    bare, model = Net(rngs()), under(Net(rngs()), policy)
    graphdef, state = nnx.split(bare)

    def pure(state: Any, x: jax.Array) -> Any:
        copy = nnx.merge(graphdef, state)
        return copy(x), nnx.state(copy, nnx.Not(nnx.RngState))

    want, after = quick_jit(jaxmp.autocast(pure, policy))(state, X)
    same_bits(compiled(lambda model: model(X), model), want)
    same_bits(values(model), nnx.as_pure(after))
    assert dtypes_of(values(model)) == {"float32"}
    assert not np.array_equal(model.norm.mean[...], np.zeros(8))


def test_dropout_and_gradients_are_those_of_the_bare_model():
    bare, model = Net(rngs()), autocast(Net(rngs()), "mixed_float16")
    (out, got, _), (wanted, want, _) = outcomes((model, bare), X)
    np.testing.assert_allclose(out, wanted, atol=0.05)
    assert dtypes_of(got) == {"float32"}
    a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    assert a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) > 0.99


def test_it_trains_with_loss_scaling_and_a_skipped_step_changes_nothing():
    model = autocast(Net(rngs()), "mixed_float16")
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.01), loss_scale=jaxmp.DynamicLossScale(2.0**8))
    traces = 0

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        loss, grads = jaxmp.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2), optimizer)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(4)]
    assert losses[-1] < losses[0] and int(optimizer.skipped_steps) == 0
    before = values(model)
    step(model, optimizer, X.at[0, 0, 0, 0].set(jnp.inf))
    same_bits(values(model), before)
    assert int(optimizer.skipped_steps) == 1 and float(optimizer.loss_scale) == 2.0**7
    assert traces == 1 and dtypes_of(values(model)) == {"float32"}


class Stacked(nnx.Module):
    """Layers in a scan inside of a rematerialised method, and a jitted head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        keys = jax.random.split(rngs.params(), 3)
        self.layers = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(keys)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    @nnx.remat
    def body(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)

    @nnx.jit
    def top(self, x: jax.Array) -> jax.Array:
        return self.head(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.top(self.body(x))


def test_overrides_apply_inside_transforms_of_nnx():
    for pattern in ("layers", "head"):
        model = autocast(Stacked(rngs()), "mixed_float16", {pattern: "float32"})
        assert [dtype for _, dtype in products_of(model, data(2, 8))] == [
            "float32" if name == pattern else "float16" for name in ("layers", "head")
        ]
    grads = nnx.grad(lambda model: model(data(2, 8)).sum())(model)
    assert dtypes_of(nnx.as_pure(grads)) == {"float32"}


def test_the_original_model_does_not_change():
    bare = Mlp(rngs())
    model = autocast(bare, "mixed_float16")
    assert type(bare) is Mlp and isinstance(model, Mlp) and model.head.kernel is bare.head.kernel
    assert [dtype for _, dtype in products_of(bare, data(2, 8))] == ["float32"] * 3


def test_a_model_nested_in_a_bare_model_or_another_autocast_keeps_its_half_dtype():
    model = Outer(autocast(Mlp(rngs()), "mixed_float16"), rngs())
    assert [dtype for _, dtype in products_of(model, data(2, 8))] == ["float32", "float16", "float16", "float16"]
    jaxpr = jax.make_jaxpr(lambda x: model.inner.encode(x))(data(2, 8))
    assert product_dtypes(jaxpr) == {"float16"}

    model = Outer(autocast(Mlp(rngs()), "mixed_float16", {"head": "float32"}), rngs())
    graphdef, state = nnx.split(model)
    run = jaxmp.autocast(lambda model: model(data(2, 8)), "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(lambda state: run(nnx.merge(graphdef, state)))(state)
    assert [eqn.invars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS] == [
        "bfloat16", "float16", "float16", "float32",
    ]  # fmt: skip


def test_a_model_that_a_transform_closes_over_can_be_read_and_not_changed():
    model, x = autocast(Mlp(rngs()), "mixed_float16"), data(2, 8)
    np.testing.assert_allclose(jax.jit(lambda x: model(x))(x), model(x), rtol=0.02, atol=1e-3)
    with_statistics = autocast(Net(rngs()), "mixed_float16")
    with pytest.raises(TraceContextError):
        jax.jit(lambda x: with_statistics(x))(X)


def test_a_submodule_that_is_called_directly_runs_under_autocast():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.fc, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    model = autocast(Two(nnx.Rngs(0)), "mixed_float16", {"head": "float32"})
    x = jnp.ones((2, 8))
    program = jax.make_jaxpr(lambda x: model.head(jax.nn.relu(model.fc(x))))(x)
    assert [eqn.invars[0].aval.dtype.name for eqn in equations(program) if eqn.primitive.name == "dot_general"] == [
        "float16",
        "float32",
    ]
    assert model.head(model.fc(x)).dtype == jnp.float32
