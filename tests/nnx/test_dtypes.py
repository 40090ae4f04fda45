"""Dtypes of a whole NNX model, of modules without a ``dtype``, and of statistics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from linen_zoo import data, dtypes_of, same_bits
from nnx_zoo import Net, is_close, model_products, outcomes, rngs, values, written

from jaxmp.nnx import apply_policy

SEQUENCE, IMAGE = data(2, 8, 8), data(2, 5, 5, 3)


def run(model: Any, x: jax.Array) -> Any:
    return model(x)


def test_a_model_of_all_kinds_of_modules_computes_the_same_as_with_dtype_set_by_hand():
    as_written, model = written(Net(rngs()), "mixed_float16"), apply_policy(Net(rngs()), "mixed_float16")
    got, of_policy, want = outcomes((as_written, model, Net(rngs(), jnp.dtype("float16"))), IMAGE)
    same_bits(got[0], want[0])
    is_close(got, want)
    is_close(of_policy, want)

    model = apply_policy(Net(rngs()), "mixed_bfloat16")
    assert model_products(model, IMAGE) == ["bfloat16"] * 5  # conv, three linears, the kernel of Scale
    with jax.numpy_dtype_promotion("standard"):
        assert nnx.eval_shape(run, model, IMAGE).dtype == jnp.float32
    assert dtypes_of(values(model)) == {"float32"}


def test_a_pure_half_policy_casts_params_and_the_original_model_keeps_its_params():
    bare = Net(rngs())
    before = values(bare, nnx.Param)
    model = apply_policy(bare, "float16")
    same_bits(values(model, nnx.Param), jax.tree.map(lambda x: np.asarray(x, "float16"), before))
    assert dtypes_of(values(model, nnx.BatchStat)) == {"float32"}
    with jax.numpy_dtype_promotion("standard"):
        assert nnx.eval_shape(run, model, IMAGE).dtype == jnp.float16
    assert model.again.kernel is model.layers[0].kernel
    same_bits(values(bare, nnx.Param), before)


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
