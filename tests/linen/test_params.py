"""Params and variables: their creation, their dtypes, and modules that have params without a dtype field."""

from __future__ import annotations

import functools
import gc
import weakref

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import in_turn
from linen_zoo import (
    HALVES,
    Linear,
    Tied,
    data,
    dtypes_of,
    model_products,
    quick_jit,
    rngs,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
)

import jaxmp
from jaxmp.linen import apply_policy

X = data(2, 8)
normal = nn.initializers.normal(1.0)


class PytreeParams(nn.Module):
    """A module with a param that is a dict, beside a param that is an array.

    Only the array shows that the dict is not the params of a submodule.
    """

    @nn.compact
    def __call__(self, x):
        def init(key, shape):
            return {"w": normal(key, shape), "steps": jnp.zeros((), jnp.int32), "rest": [jnp.ones(8), None]}

        tree, b = self.param("tree", init, (8, 8)), self.param("b", normal, (8,))
        return x @ tree["w"] + tree["rest"][0] + b + tree["steps"].astype(b.dtype)


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.dot(x, self.param("w", nn.with_partitioning(normal, (None, "model")), (8, 8)))


def test_a_module_without_a_dtype_field_computes_as_under_autocast():
    for make, policy in in_turn((Linear, PytreeParams, Partitioned)):
        model, by_autocast = apply_policy(make(), policy), jaxmp.autocast(make().apply, policy)
        same_computation(model.apply, by_autocast, shapes(model, X), X)
        assert set(model_products(model, X)) == {HALVES[policy]}


def test_init_creates_the_variables_of_the_bare_module():
    for make, args, policy in (
        (lambda: nn.Sequential([Linear(), nn.BatchNorm(use_running_average=False)]), (X,), "O2"),
        (lambda: nn.Sequential([PytreeParams(), Partitioned()]), (X,), "mixed_bfloat16"),
        (lambda: Tied(), (concrete.array([1, 2]),), "float32"),
        (lambda: nn.WeightNorm(nn.Dense(8)), (X,), "mixed_float16"),
        (lambda: nn.RNN(nn.OptimizedLSTMCell(8)), (data(2, 3, 8),), "float32"),
    ):
        with standard_promotion():
            same_computation(apply_policy(make(), policy).init, make().init, rngs(), *args)


def test_a_pure_half_policy_rounds_the_params_of_the_bare_module_also_if_no_half_initializer_exists():
    orthogonal = nn.initializers.orthogonal()
    partitioned = nn.with_partitioning(orthogonal, ("rows", None))
    bare = nn.Sequential([PytreeParams(), *[nn.Dense(8, kernel_init=init) for init in (orthogonal, partitioned)]])
    model = apply_policy(bare, "bfloat16")
    got, want = quick_jit(lambda rngs: [nn.unbox(m.init(rngs, X)) for m in (model, bare)])(rngs())
    same_bits(got, jax.tree.map(lambda w: w if w.dtype == jnp.int32 else w.astype(jnp.bfloat16), want))
    cell, x = apply_policy(nn.RNN(nn.LSTMCell(8)), "float16"), data(2, 8, 8)
    assert dtypes_of(shapes(cell, x)) == {"float16"}
    assert jax.eval_shape(cell.apply, shapes(cell, x), x).dtype == "float16"


def test_params_from_a_half_checkpoint_are_used_without_a_cast():
    model = apply_policy(Linear(), "mixed_float16")
    variables = model.init(rngs(), X)
    rounded = jax.tree.map(lambda w: w.astype(jnp.float16), variables)
    want = X.astype(jnp.float16) @ rounded["params"]["kernel"] + rounded["params"]["bias"]
    np.testing.assert_allclose(model.apply(rounded, X), want, rtol=2e-3)  # the last sum of `want` is rounded


def test_inputs_may_be_numpy_arrays_of_any_width():
    for module, dtype in ((Linear(8), "float64"), (nn.Dense(8), "float16")):
        assert model_products(apply_policy(module, "mixed_bfloat16"), np.asarray(X, dtype)) == ["bfloat16"]


def test_a_value_that_a_module_passes_to_its_own_method_keeps_its_dtype():
    class Rounds(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.param("scale", normal, (8,)) * self.doubled(x.astype("float16")).astype("float32")

        def doubled(self, x):
            dtypes.append(x.dtype.name)
            return x + x

    dtypes: list[str] = []
    shapes(apply_policy(Rounds(), "mixed_bfloat16"), X)
    assert set(dtypes) == {"float16"}


class Counts(nn.Module):
    """A module with a variable whose value is a dict of arrays of two dtypes."""

    @nn.compact
    def __call__(self, x):
        means = self.variable(
            "means", "of", lambda: {"wide": jnp.zeros((), "float32"), "half": jnp.zeros((), "float16")}
        )
        y = nn.Dense(8)(x)
        if not self.is_initializing():
            means.value = {"wide": y.mean(), "half": y.astype("float32").mean()}
        return y


@pytest.mark.parametrize("mutable", [["means"], True])
def test_the_arrays_in_a_variable_keep_their_dtypes(mutable):
    model = apply_policy(Counts(), "mixed_float16")
    variables = shapes(model, X)
    apply = functools.partial(model.apply, mutable=mutable)
    assert jax.eval_shape(apply, variables, X)[1]["means"] == variables["means"] == shapes(Counts(), X)["means"]


def test_classes_of_modules_below_the_root_are_freed_after_the_call():
    def local_class():
        class Local(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(8)(x)

        model = apply_policy(nn.Sequential([Local()]), "mixed_bfloat16")
        variables = jax.eval_shape(lambda key: model.init(key, X), jax.random.key(0))
        jax.eval_shape(lambda variables: model.apply(variables, X), variables)
        return weakref.ref(Local)

    classes = [local_class() for _ in range(2)]
    gc.collect()
    assert [reference() for reference in classes] == [None] * 2
