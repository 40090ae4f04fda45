"""NNX's transforms, split, merge, copies and pickles keep the policy."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from linen_zoo import data, dtypes_of, products, quick_jit, same_bits
from nnx_zoo import (
    Net,
    Scale,
    compiled,
    model_products,
    outcome,
    outcomes,
    rngs,
    values,
)

import jaxmp
from jaxmp.nnx import apply_policy, autocast

IMAGE, VECTORS = data(2, 5, 5, 3), data(4, 8)


pytestmark = pytest.mark.usefixtures("standard_promotion")  # NNX's norms add half and float32 arrays


def model_and_twin(make: Any = Net) -> tuple[Any, Any]:
    return apply_policy(make(rngs()), "mixed_float16"), apply_policy(make(rngs()), "mixed_float16")


@pytest.mark.parametrize("under", [apply_policy, autocast])
def test_a_model_computes_the_same_as_jaxmp_autocast_of_its_function_and_updates_variables(under):
    policy = "mixed_float16"
    bare, model = Net(rngs()), under(Net(rngs()), policy)
    graphdef, state = nnx.split(bare)

    def pure(state: Any, x: jax.Array) -> Any:
        copy = nnx.merge(graphdef, state)
        return copy(x), nnx.state(copy, nnx.Not(nnx.RngState))

    want, after = quick_jit(jaxmp.autocast(pure, policy))(state, IMAGE)
    same_bits(compiled(lambda model: model(IMAGE), model), want)
    same_bits(values(model), nnx.as_pure(after))
    assert dtypes_of(values(model)) == {"float32"}
    assert not np.array_equal(model.norm.mean[...], np.zeros(8))


def test_jit_compiles_once_for_models_under_equal_policies():
    traces = []

    @nnx.jit
    def step(model: Any, x: jax.Array) -> jax.Array:
        traces.append(x)
        return model(x)

    for _ in range(2):
        model = apply_policy(Net(rngs()), "mixed_float16", {"norm": "float32"})
        step(model, IMAGE)
        step(model, IMAGE)
    assert len(traces) == 1


def through_split(model: Any) -> Any:
    return nnx.merge(*nnx.split(model, nnx.Param, ...))


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, nnx.clone, through_split, through_pickle])
def test_copies_keep_the_policy_the_modes_and_the_sharing_of_the_model(how):
    model, twin = model_and_twin()
    copied = how(model)
    same_bits(copied(IMAGE), twin(IMAGE))
    assert copied.again is copied.layers[0]
    model, twin = model_and_twin()  # with the initial statistics
    model.eval()
    quiet = nnx.view(twin, deterministic=True, use_running_average=True)
    same_bits(how(model)(IMAGE), quiet(IMAGE))


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0, None), out_axes=0)
def stacked(rngs: nnx.Rngs, kind: Any) -> Any:
    return kind(8, rngs)


class Stack(nnx.Module):
    """Three layers of one class with stacked params, in an ``nnx.scan``."""

    def __init__(self, rngs: nnx.Rngs, kind: Any) -> None:
        self.layers = stacked(rngs, kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: Any) -> jax.Array:
            return jnp.tanh(layer(x))

        return forward(x, self.layers)


def test_in_a_scan_over_layers_products_are_half_and_the_carry_keeps_its_dtype():
    model = apply_policy(Stack(rngs(), Scale), "mixed_float16")

    def casts_by_hand(x: jax.Array, layers: Any) -> jax.Array:
        for i in range(3):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i].astype("float16"), layers)
            y = x.astype("float16") @ layer["kernel"] + layer["biases"][0] + layer["biases"][1]
            x = jnp.tanh(y.astype("float32"))
        return x

    layers = values(model.layers)
    got, want = compiled(lambda model: (model(VECTORS), casts_by_hand(VECTORS, layers)), model)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    grads = nnx.eval_shape(lambda model: outcome(model, VECTORS)[1], model)
    assert dtypes_of(grads) == {"float32"}
    for under in (apply_policy, autocast):
        bare = nnx.Sequential(Stack(rngs(), Scale), nnx.Linear(8, 8, rngs=rngs()))
        for overrides, dtype in ((None, "float16"), ({"layers/0/layers": "float32"}, "float32")):
            assert model_products(under(bare, "mixed_float16", overrides), VECTORS) == [dtype, "float16"]


def test_vmap_over_stacked_modules_gives_the_same_results_as_single_modules():
    model = apply_policy(Stack(rngs(), Scale), "mixed_float16")
    out = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(model.layers, VECTORS)
    graphdef, state = nnx.split(apply_policy(Stack(rngs(), Scale), "mixed_float16").layers)
    for i in range(3):
        same_bits(out[i], nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state))(VECTORS))
    assert out.dtype == jnp.float32 and model.layers.mean[...].shape == (3, 8)
    assert model.layers.mean[...].dtype == jnp.float32


class Mixin:
    def forward(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


class Methods(nnx.Module, Mixin):
    """A module without ``__call__``, whose methods come from transforms, a mixin and a partial."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))
        self.calls, self.steps = nnx.Variable(jnp.zeros((), jnp.int32)), 0

    @nnx.jit
    def counted(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.product(x)

    @nnx.remat
    def product(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel

    def scaled(self, x: jax.Array, by: int) -> jax.Array:
        self.steps += 1
        return x @ self.kernel * by

    doubled = functools.partialmethod(scaled, by=2)


METHODS = [
    lambda model: model.counted(VECTORS),
    lambda model: model.product(VECTORS),
    lambda model: model.forward(VECTORS),
    lambda model: model.doubled(VECTORS) / 2,
]


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_any_kind_run_under_the_policy(method):
    model = apply_policy(Methods(rngs()), "mixed_float16")
    want = (VECTORS.astype("float16") @ model.kernel[...].astype("float16")).astype("float32")
    same_bits(method(model), want)
    assert int(model.calls[...]) + model.steps == int(method in (METHODS[0], METHODS[3]))
    assert model.kernel[...].dtype == outcome(model, call=method)[1]["kernel"].dtype == jnp.float32
    overridden = apply_policy(Methods(rngs()), "mixed_float16", {Methods: "mixed_bfloat16"})
    nested = apply_policy(nnx.Dict(part=apply_policy(Methods(rngs()), "mixed_bfloat16")), "mixed_float16")
    for part in (overridden, nested["part"]):
        assert model_products(part, call=method) == ["bfloat16"]


def test_a_policy_can_be_applied_to_an_abstract_model():
    for policy, dtype in (("mixed_float16", jnp.float32), ("float16", jnp.float16)):
        model = apply_policy(nnx.eval_shape(lambda: Net(rngs())), policy)
        assert model.conv.kernel.get_raw_value().dtype == dtype


class Shared(nnx.Module):
    """A shared layer, a shared Variable, and an attribute that is a number."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.layers, self.tied = nnx.List([self.first, self.norm, self.first]), nnx.Linear(8, 8, rngs=rngs)
        self.tied.kernel, self.calls = self.first.kernel, 0

    def __call__(self, x: jax.Array, counts: bool = False) -> jax.Array:
        self.calls += counts
        for layer in (*self.layers, self.tied):
            x = layer(x)
        return x


@pytest.mark.parametrize(("under", "counts"), [(apply_policy, True), (autocast, False)])
def test_shared_modules_and_variables_stay_shared_in_a_trace(under, counts):
    model, twin = (under(Shared(rngs()), "mixed_bfloat16") for _ in range(2))
    traced = nnx.jit(lambda model, x: model(x, counts))
    for _ in range(2):  # a compiled program rounds less often than a call outside of jit
        np.testing.assert_allclose(traced(model, VECTORS), twin(VECTORS, counts), atol=0.1)
    assert model.calls == twin.calls == 2 * counts
    assert model.layers[0] is model.layers[2] is model.first
    assert model.tied.kernel is model.first.kernel
    np.testing.assert_allclose(model.norm.mean[...], twin.norm.mean[...], atol=0.01)
    assert np.any(model.norm.mean[...])


def test_a_model_and_its_original_have_separate_modes():
    for adapter in (apply_policy, autocast):
        net = Net(rngs())
        model = adapter(net, "mixed_float16")
        net.eval()
        assert net.drop.deterministic and not model.drop.deterministic
        model.eval()
        net.train()
        assert model.drop.deterministic and not net.drop.deterministic


def test_captured_values_have_the_dtypes_in_which_they_were_computed():
    class Sower(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.last = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow(nnx.Intermediate, "hidden", hidden := self.first(x))
            self.sow(nnx.Intermediate, "out", out := self.last(hidden))
            return out

    _, captured = nnx.capture(apply_policy(Sower(rngs()), "mixed_float16"), nnx.Intermediate)(VECTORS)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, nnx.to_pure_dict(captured))
    assert dtypes == {"hidden": ("float16",), "out": ("float32",)}  # only the result, which is float32, reads `out`


@pytest.mark.once
def test_an_exception_in_a_model_leaves_no_state_behind():
    class Fails(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.gain, self.linear = nnx.Param(jnp.ones(8)), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            self.called = True
            raise RuntimeError("stop")

    model = apply_policy(Fails(rngs()), "float32", {"linear": "mixed_float16"})
    with pytest.raises(RuntimeError, match="stop"):
        model(VECTORS)
    assert not hasattr(model, "called")  # the method's changes are undone
    assert jax.config.jax_default_matmul_precision is None
    assert products(jax.lax.dot, VECTORS, jnp.ones((8, 8), "float16")) == ["float32*float16"]
    assert outcomes((apply_policy(Net(rngs()), "mixed_float16"),), IMAGE)[0][0].dtype == jnp.float32


class Owner(nnx.Module):
    """A module whose methods swap, alias, replace and train its Params."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel, self.other = nnx.Param(jnp.ones((8, 8)) / 3), nnx.Param(jnp.ones((8, 8)) / 7)
        self.table = nnx.data({"a": nnx.Param(jnp.ones(8) / 3)})
        self.training = True

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel + self.table["a"] + (100.0 if self.training else 0.0)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.training = False
        try:
            yield
        finally:
            self.training = True

    def swap(self) -> None:
        self.kernel, self.other = self.other, self.kernel

    def alias(self) -> Any:
        self.tied = self.kernel
        return self, {"kernel": self.kernel}

    def reset(self) -> None:
        self.kernel = nnx.Param(self.kernel[...] * 2)

    def train_step(self, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda self: jnp.mean(self(x) ** 2))(self)
        nnx.update(self, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(self, nnx.Param), grads))
        return loss


def test_methods_store_and_return_the_params_and_not_casts_of_them():
    bare = Owner(rngs())
    model = apply_policy(bare, "mixed_float16")
    returned, params = model.alias()
    assert returned is model and params["kernel"] is model.tied is model.kernel is bare.kernel
    model.swap()
    assert model.kernel is bare.other and model.other is bare.kernel
    model.reset()
    assert model.kernel.dtype == jnp.float32 and model.other.dtype == jnp.float32

    model = apply_policy(Owner(rngs()), "mixed_float16")
    with model.evaluating():
        assert float(model(VECTORS).max()) < 50 and not model.training
    assert model.training


def test_a_train_step_that_is_a_method_trains_the_params():
    model = apply_policy(Owner(rngs()), "mixed_float16")
    before = values(model, nnx.Param)
    assert float(model.train_step(VECTORS)) > float(model.train_step(VECTORS))
    after = values(model, nnx.Param)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"float32"}
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(before)[:1], jax.tree.leaves(after)[:1], strict=True))


def test_a_weight_norm_stores_the_kernel_in_float32():
    model = apply_policy(nnx.WeightNorm(nnx.Linear(8, 4, rngs=rngs()), rngs=rngs()), "mixed_float16")
    assert model(VECTORS).dtype == model.layer_instance.kernel.dtype == jnp.float32
    assert model_products(model, VECTORS) == ["float16"]


def test_a_policy_covers_params_and_layers_in_a_registered_dataclass():
    @struct.dataclass
    class Parts:
        layer: Any
        bias: Any

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.parts = nnx.data(Parts(nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.ones(8) / 3)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.parts.layer(x) + self.parts.bias[...]

    model = apply_policy(Net(rngs()), "mixed_float16")
    assert model_products(model, VECTORS) == ["float16"]
    product = VECTORS.astype("float16") @ model.parts.layer.kernel[...].astype("float16")
    same_bits(compiled(lambda model: model(VECTORS), model), product.astype("float32") + model.parts.bias[...])
    assert apply_policy(Net(rngs()), "float16").parts.bias.dtype == jnp.float16
