"""The tools on plain NNX models, static arguments and constant functions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import concrete
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import TraceContextError

import jaxmp
from jaxmp.inspect import audit, compare, first_nonfinite, memory, numerics, tune
from jaxmp.inspect.program.calls import argument_paths, require_arguments_not_deleted


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.exp(self.dense(x))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block, self.head = Block(rngs), nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.block(x))


def test_an_error_names_the_arguments_that_an_earlier_step_donated():
    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale())
    params, x = {"w": concrete.ones((2, 1))}, concrete.ones((4, 2))
    state = jaxmp.TrainState.create(params=params, tx=tx)
    jaxmp.make_train_step(lambda params, model_state, x, rng: (jnp.sum(x @ params["w"]), model_state))(state, x)
    for look in (numerics, first_nonfinite, lambda fun: compare(fun, "mixed_bfloat16")):
        with pytest.raises(RuntimeError, match=r"'params/w' was donated to an earlier step"):
            look(lambda params, x: jnp.sum(x @ params["w"]))(params, x)
    with pytest.raises(RuntimeError, match="'opt_state/loss_scale/loss_scale' was donated"):
        numerics(lambda params, x: jnp.sum(x @ params), tx=tx)(concrete.ones((2, 1)), x, opt_state=state.opt_state)

    def fun(params: Any, x: Any) -> Any: ...

    require_arguments_not_deleted(fun, ({"w": x}, x))
    assert argument_paths(fun, (params, x)) == ["params/w", "x"]  # does not check for donation
    with pytest.raises(RuntimeError, match="'params/w' was donated"):
        require_arguments_not_deleted(fun, (params, x))


def loss_fn(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


PATHS = ["block/dense", "block", "head"]


def test_modules_of_a_plain_nnx_model_are_paths_in_every_tool() -> None:
    model, x = Model(nnx.Rngs(0)), concrete.ones((2, 4))
    report = audit(loss_fn)(model, x)
    assert [product.path for product in report.products] == ["block/dense", "head"]
    assert [product.ran for product in report.products] == ["float32", "float32"]
    assert list(numerics(loss_fn)(model, x).activations) == PATHS
    comparison = compare(loss_fn, "mixed_bfloat16")(model, x)
    assert [row.path for row in comparison.rows if row.phase == "forward"] == [*PATHS, ""]
    assert [row.path for row in comparison.rows if row.phase == "backward"][:3] == PATHS[::-1]
    for grad in (True, False):
        blame = first_nonfinite(loss_fn, grad=grad)(model, x * 1e4)
        assert blame is not None and (blame.primitive, blame.path) == ("exp", "block")
    assert {array.path for array in memory(loss_fn)(model, x).at_peak if array.kind == "temporaries"} <= {*PATHS, ""}
    assert type(model) is Model and type(model.block) is Block  # the tools did not change the user's model


def test_static_arguments_of_a_jitted_function_are_left_to_it() -> None:
    def fun(params: Any, times: int, batch: Any) -> Any:
        for _ in range(times):
            batch = jnp.tanh(batch @ params)
        return batch.sum()

    args = shape(16, 16), 3, shape(8, 16)
    plain = memory(lambda params, batch: fun(params, 3, batch))(args[0], args[2])
    for jit in (jax.jit, nnx.jit):
        jitted = jit(fun, static_argnums=1)
        plan = memory(jitted)(*args)
        assert plan.peak == plain.peak
        assert (plan.batch, plan.by_kind["params"], plan.by_kind["batch"]) == (8, 16 * 16 * 4, 8 * 16 * 4)
        report = audit(jitted)(*args)
        assert (len(report.products), report.memory.peak) == (3, plan.peak)
        assert [product.path for product in report.products] == [""] * 3
    size = plan.largest_batch(10_000)
    assert memory(jitted)(args[0], 3, shape(size, 16)).peak <= 10_000


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A layer with its activation function as a leaf, as Equinox has."""

    weight: Any
    activation: Any

    def __call__(self, x: Any) -> Any:
        with jax.named_scope("layer"):
            return self.activation(x @ self.weight)


@pytest.mark.once
def test_functions_among_the_leaves_of_a_model_are_left_to_it() -> None:
    layer, x = Layer(concrete.eye(8), jnp.tanh), concrete.ones((2, 8))
    args = {"layer": layer}, x

    def loss_of_layer(model: Any, x: Any) -> Any:
        return jnp.mean(model["layer"](x) ** 2)

    rows = compare(loss_of_layer, "mixed_bfloat16")(*args).rows
    assert [row.path for row in rows] == ["layer", "", "layer", "model/layer/weight"]
    counted = numerics(loss_of_layer, tx=optax.sgd(0.1))
    of_tanh = counted(*args)
    assert list(of_tanh.updates) == ["layer/weight"]
    identity = Layer(concrete.eye(8), lambda x: x)
    assert counted({"layer": identity}, x).loss == 1.0 > of_tanh.loss  # the function is not the first one
    bad = Layer(concrete.eye(8) * jnp.inf, jnp.tanh)
    assert first_nonfinite(loss_of_layer)({"layer": bad}, x).path == "model/layer/weight"
    assert tune(loss_of_layer, "mixed_bfloat16")(*args, batches=[(2 * x,)]).half_flops == 1.0


def test_a_constant_loss_has_zero_gradients() -> None:
    w, x = concrete.ones((4, 4)), concrete.ones((2, 4))
    for loss in (lambda w, x: 3.0, lambda w, x: jnp.float32(3)):
        assert first_nonfinite(loss)(w, x) is None
        comparison = compare(loss, "mixed_bfloat16")(w, x)
        assert (comparison.entered, comparison.total.relative_error) == (None, 0.0)
        assert comparison.rows[-1].path == "w" and comparison.rows[-1].phase == "backward"
        step_numerics = numerics(loss)(w, x)
        (gradients,) = step_numerics.gradients.values()
        assert (step_numerics.loss, gradients.zeros, gradients.count) == (3.0, 16, 16)


@pytest.mark.once
def test_a_batch_is_a_multiple_of_the_microbatches() -> None:
    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return jnp.mean(batch @ params["w"]), model_state

    state = jaxmp.TrainState.create(params={"w": concrete.ones((4, 64))}, tx=optax.sgd(0.1))
    step = jaxmp.make_train_step(loss_fn, accumulate_steps=4)
    size = memory(step)(state, concrete.ones((32, 4))).largest_batch(12_000)
    assert size > 4 and size % 4 == 0


@pytest.mark.once
def test_the_error_for_a_cached_model_says_what_to_pass():
    jitted, model, x = nnx.jit(loss_fn), Model(nnx.Rngs(0)), concrete.ones((2, 4))
    assert len(audit(jitted)(model, x).products) == 2
    for tool in (audit, functools.partial(compare, grad=False)):
        with pytest.raises(TraceContextError) as error:
            tool(nnx.cached_partial(jitted, model))(x)
        assert any("audit(step)(model, ...), without nnx.cached_partial" in note for note in error.value.__notes__)


@pytest.mark.parametrize("name", ["audit", "numerics", "first_nonfinite", "compare", "memory", "roofline", "profile"])
def test_a_tool_that_is_called_in_the_wrong_way_says_how_to_call_it(name):
    tool = getattr(jaxmp.inspect, name)

    def loss_fn(w, x):
        return jnp.mean(x @ w)

    inspection = tool(loss_fn)
    assert repr(inspection) == f"<{name} of loss_fn: call it with the arguments of loss_fn, {name}(loss_fn)(...)>"
    with pytest.raises(AttributeError, match=rf"has no 'findings'; write {name}\(loss_fn\)\(...\).findings"):
        inspection.findings  # noqa: B018
    w, x = concrete.ones((2, 2)), concrete.ones((3, 2))
    with pytest.raises(TypeError, match=rf"{name} takes a function, got .*; write {name}\(fun\)\(arguments of fun\)"):
        tool(loss_fn(w, x))
    with pytest.raises(TypeError, match=rf"{name} takes a function without its arguments, got 3 more"):
        tool(loss_fn, w, x, x)
    for model, remedy in ((nn.Dense(1), r"an instance of Dense; write .*\(model.apply\)"), (nn.Dense, "calls Dense")):
        with pytest.raises(TypeError, match=rf"{name} takes a function, got .*{remedy}"):
            tool(model)
    partial = rf"got the keyword argument 'x'; write {name}\(functools.partial\(loss_fn, x=...\)\)\(...\)"
    with pytest.raises(TypeError, match=partial):
        inspection(w, x=x)
