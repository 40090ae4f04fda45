"""NNX objects as arguments of a function under autocast, which may write to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import HALVES, cosine, half, in_turn, products
from flax import nnx
from flax.errors import TraceContextError
from linen_zoo import data, dtypes_of, same_bits
from nnx_zoo import rngs, values

import jaxmp

BATCHES = data(2, 16, 8)
X = BATCHES[0]


class Net(nnx.Module):
    """A module that stores statistics, a dropout mask, and a count of calls."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.mask = nnx.Variable(jnp.zeros((16, 8), bool))
        self.calls = nnx.Variable(jnp.zeros((), int))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        x = self.drop(nnx.sigmoid(self.norm(self.first(x))))
        self.mask[...] = x != 0
        return self.head(x)


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def by_optimizer(loss: Any) -> Callable[..., Any]:
    @nnx.jit
    def step(model: Any, x: jax.Array) -> Any:
        optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.StaticLossScale(2.0**8))
        return jaxmp.nnx.value_and_grad(loss, optimizer)(model, x)[1]

    return step


def in_a_scan(loss: Any) -> Callable[..., Any]:
    def turn(model: Any, x: jax.Array) -> Any:
        return model, loss(model, x)

    scan = nnx.scan(turn, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    return nnx.jit(lambda model, x: scan(model, jnp.stack([x, x + 1]))[1])


# The transforms to apply to a loss function of a model and a batch.
TRANSFORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "nnx.remat": lambda loss: nnx.jit(nnx.remat(loss)),
    "value_and_grad": by_optimizer,
    "nnx.scan": in_a_scan,
}


def arrays(model: Any, *filters: Any) -> Any:
    """Return the values of the Variables, with random keys as integers."""

    def data_of(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(data_of, nnx.as_pure(nnx.state(model, *filters)))


def state_of(model: Any) -> Any:
    """Return the statistics, and all Variables that do not depend on rounding."""
    return arrays(model, nnx.BatchStat), arrays(model, nnx.Not(nnx.BatchStat))


@pytest.mark.parametrize(("name", "policy"), in_turn(TRANSFORMS))
def test_statistics_rng_counts_and_masks_are_the_same_as_without_autocast(name, policy):
    model, bare = Net(rngs()), Net(rngs())
    run, run_bare = TRANSFORMS[name](half(loss_fn, policy)), nnx.jit(TRANSFORMS[name](loss_fn))
    masks = []
    for x in BATCHES:
        result, wanted = run(model, x), run_bare(bare, x)
        (statistics, exact), (wanted_statistics, wanted_exact) = state_of(model), state_of(bare)
        for got, want in zip(jax.tree.leaves(statistics), jax.tree.leaves(wanted_statistics), strict=True):
            np.testing.assert_allclose(got, want, rtol=0.02, atol=2e-3)
        same_bits(exact, wanted_exact)  # params, keys, counts, the mask
        assert cosine(nnx.as_pure(result), nnx.as_pure(wanted)) > 0.99
        assert dtypes_of((statistics, arrays(model, nnx.Param), nnx.as_pure(result))) == {"float32"}
        masks.append(model.mask[...])
    assert not np.array_equal(masks[0], masks[1])
    assert np.any(model.norm.mean[...] != 0)
    graphdef, state = nnx.split(model)
    assert set(products(lambda state: nnx.as_pure(run(nnx.merge(graphdef, state), X)), state)) == {HALVES[policy]}


@pytest.mark.once
def test_an_ensemble_in_vmap_has_the_same_statistics_and_masks_as_without_autocast():
    @nnx.jit
    def make() -> Any:
        return nnx.vmap(lambda key: Net(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))

    @nnx.jit
    def turn(model: Any, bare: Any, x: jax.Array) -> None:
        nnx.vmap(half(loss_fn), in_axes=(0, None))(model, x)
        nnx.vmap(loss_fn, in_axes=(0, None))(bare, x)

    model, bare = make(), make()
    for x in BATCHES:
        turn(model, bare, x)
    (statistics, exact), (wanted_statistics, wanted_exact) = state_of(model), state_of(bare)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.02, atol=2e-3), statistics, wanted_statistics)
    same_bits(exact, wanted_exact)


def test_an_object_that_is_passed_several_times_stays_one_object():
    model, other = Net(rngs()), nnx.Variable(concrete.zeros(()))

    @half
    def twice(first: Any, *, named: dict[str, Any]) -> Any:
        assert first[0] is named["again"] and first[0].head is named["head"] and first[1] is named["other"]
        first[1][...] += 1.0
        return first[0](X) + named["again"](X), named["text"], named["head"]

    result, text, head = twice([model, other], named={"again": model, "head": model.head, "other": other, "text": "a"})
    assert int(model.drop.rngs.count[...]) == int(model.calls[...]) == 2 and float(other[...]) == 1.0
    assert result.shape == (16, 8) and text == "a" and head is model.head


def test_changes_of_attributes_are_made_to_the_callers_objects():
    @half
    def change(model: Any, x: jax.Array) -> Any:
        model.extra = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        model.old = model.head.kernel
        model.head.kernel = nnx.Param(model.old * 2)
        del model.drop
        model.note = "changed"
        return model.extra, model.extra(x), model

    model = Net(rngs())
    head, kernel = model.head, model.head.kernel
    extra, out, same = change(model, X)
    assert same is model and extra is model.extra and not hasattr(model, "drop")
    assert model.note == "changed"
    assert model.head is head and model.old is kernel
    same_bits(model.head.kernel[...], kernel[...] * 2)
    np.testing.assert_allclose(out, extra(X), rtol=0.02, atol=0.02)
    model.extra.kernel[...] = concrete.zeros((8, 2))  # raises if the new module still has tracers


class Changeable(nnx.Module):
    """A model with parts that can change while each attribute keeps its object."""

    def __init__(self) -> None:
        self.net, self.layers = Net(rngs()), nnx.List([nnx.Linear(8, 8, rngs=rngs())])
        self.pair = ("a", 1)
        self.tree = nnx.data([{"x": nnx.Variable(jnp.zeros(()))}])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "a value": lambda model: model.net.calls.set_value(model.net.calls.get_value() + 1),
    "a static attribute": lambda model: setattr(model, "pair", ("b", 2)),
    "an attribute less": lambda model: delattr(model.net, "mask"),
    "one Variable twice": lambda model: setattr(model, "again", model.net.calls),
    "modules exchanged": lambda model: vars(model.net).update(first=model.net.head, head=model.net.first),
    "a longer list": lambda model: model.layers.append(nnx.Linear(8, 8, rngs=nnx.Rngs(1))),
    "a plain container": lambda model: model.tree[0].update(y=model.tree[0].pop("x")),
    "metadata": lambda model: model.net.calls.set_metadata(note="changed"),
}


def test_an_object_changes_in_the_same_way_as_under_nnx_jit():
    unchanged = Changeable()
    for name, change in CHANGES.items():

        def run(model: Any, x: jax.Array, change: Any = change) -> jax.Array:
            change(model)
            return x @ x.T

        model, wanted = nnx.clone(unchanged), nnx.clone(unchanged)
        half(run)(model, X), nnx.jit(run)(wanted, X)
        assert nnx.graphdef(model) == nnx.graphdef(wanted), name
        assert model.net.calls.get_metadata() == wanted.net.calls.get_metadata()
        same_bits(values(model), values(wanted))


@pytest.mark.once
def test_a_pure_half_policy_casts_results_and_not_the_variables_of_an_argument():
    policy = "float16"
    model = Net(rngs())
    out, new = half(lambda model: (model(X), nnx.Param(model.head.kernel * 2)), policy)(model)
    assert out.dtype == new.dtype == policy
    assert dtypes_of(arrays(model, (nnx.Param, nnx.BatchStat))) == {"float32"}


def test_half_variables_unchanged_variables_and_variables_that_are_not_arrays_are_kept():
    model = Net(rngs())
    model.half, kernel = nnx.Variable(concrete.zeros(8, "bfloat16")), model.head.kernel[...]

    @half
    def run(model: Any) -> jax.Array:
        model.half[...] = model(X).sum().astype("bfloat16") + model.half
        return loss_fn(model, X)

    run(model)
    assert model.half.dtype == jnp.bfloat16 and np.any(model.half[...] != 0)
    assert model.head.kernel[...] is kernel

    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()))
    model.steps, model.tree = nnx.Variable(1), nnx.Variable({"a": concrete.zeros(()), "b": None})

    @half
    def run(model: Any) -> jax.Array:
        model.steps.set_value(model.steps.get_value() + 1)
        model.tree.set_value({"a": model.tree.get_value()["a"] + 1.0, "b": None})
        return model(X)

    run(model)
    run(model)
    assert model.steps.get_value() == 3 and model.tree.get_value() == {"a": 2.0, "b": None}


def test_a_model_that_the_function_closes_over_raises_only_if_it_writes_to_variables():
    model = Net(rngs())
    for run in (half(lambda x: model(x)), half(model), nnx.jit(half(half(lambda x: model(x))))):
        with pytest.raises(TraceContextError, match="different trace level"):
            run(X)
    layers = nnx.Sequential(model.first, nnx.BatchNorm(8, use_running_average=True, rngs=rngs()), model.head)
    for run in (half(lambda x: layers(x)), half(layers)):
        np.testing.assert_allclose(run(X), layers(X), rtol=0.02, atol=0.02)
        assert products(run, X) == ["bfloat16"] * 2


def test_a_model_from_outside_of_a_jit_can_be_read_and_not_changed():
    model = Net(rngs())

    def run(call: Any) -> jax.Array:
        return jax.jit(lambda x: half(call)(model, x))(X)

    np.testing.assert_allclose(run(lambda model, x: model.first(x)), model.first(X), rtol=0.02, atol=0.02)
    with pytest.raises(TraceContextError):
        run(loss_fn)
    with pytest.raises(TraceContextError):
        run(lambda model, x: setattr(model, "note", 1))
    model.note, model.first.bias[...] = 3, concrete.ones(8)  # the caller may still change the model


def test_no_tracer_outlives_the_trace():
    model = Net(rngs())
    with jax.checking_leaks():
        nnx.eval_shape(half(loss_fn), model, X)
        nnx.eval_shape(nnx.value_and_grad(half(loss_fn)), model, X)


def test_a_plan_accepts_models_of_arrays_or_shapes_and_changes_nothing():
    model = Net(rngs())
    before = arrays(model)
    plan = jaxmp.cast_plan(loss_fn, "mixed_bfloat16")(model, x=X)
    assert [row.operands[0] for row in plan.rows if row.primitive == "dot_general"] == ["bfloat16"] * 2
    same_bits(arrays(model), before)
    abstract = nnx.eval_shape(lambda: Net(rngs()))
    assert str(jaxmp.cast_plan(loss_fn, "mixed_bfloat16")(abstract, x=X)) == str(plan)


def test_a_model_of_shapes_raises():
    model = nnx.eval_shape(lambda: Net(rngs()))
    with pytest.raises(TypeError, match=r"takes arrays, got ShapeDtypeStruct.*use jaxmp\.cast_plan"):
        half(lambda model: loss_fn(model, X))(model)
