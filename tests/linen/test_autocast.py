"""Tests of jaxmp.linen.autocast: variables, paths and copies."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_zoo import (
    MLP,
    Tied,
    data,
    model_products,
    numbers,
    products,
    quick_jit,
    rngs,
    same_bits,
    same_computation,
    shapes,
)

import jaxmp
from jaxmp.linen import autocast

pytestmark = pytest.mark.once  # test_dtypes.py runs on the newest JAX

IMAGES = data(2, 4, 4, 3)
IDS = jnp.array([1, 3])


class Noisy(nn.Module):
    """Dropout between two layers."""

    inner: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
        return nn.Dense(8)(x) if self.inner is None else self.inner(x)


class Helped(nn.Module):
    """A module that calls a submodule in a method other than ``__call__``."""

    def setup(self) -> None:
        self.body, self.head = nn.Dense(8), nn.Dense(8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.encode(x))

    def encode(self, x: jax.Array) -> jax.Array:
        return nn.relu(self.body(x))


class Small(nn.Module):
    """A convolution, a norm that keeps statistics, and a layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
        return nn.Dense(8)(jnp.mean(x, axis=(1, 2)))


def test_variables_are_those_of_the_bare_module_and_results_those_of_jaxmp_autocast():
    bare = Small()
    model = autocast(bare, " Mixed_Float16 ")
    same_computation(model.init, bare.init, rngs(), IMAGES)
    by_hand = jaxmp.autocast(functools.partial(bare.apply, mutable=["batch_stats"]), "mixed_float16")
    same_computation(functools.partial(model.apply, mutable=["batch_stats"]), by_hand, shapes(bare, IMAGES), IMAGES)
    assert set(model_products(model, IMAGES)) == {"float16"}


def test_paths_do_not_contain_the_methods_that_lead_to_a_module():
    model = autocast(Helped(), "mixed_float16", {"body": "float32"})
    assert model_products(model, data(2, 8)) == ["float32", "float16"]
    variables = model.init(rngs(), data(2, 8))
    assert products(lambda x: model.apply(variables, x, method="encode"), data(2, 8)) == ["float32"]
    assert products(lambda x: model.apply(variables, x, method=lambda m, x: m.head(m.body(x))), data(2, 8)) == [
        "float32",
        "float16",
    ]


def test_modules_of_one_lifted_class_follow_their_own_paths():
    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layer = nn.jit(nn.Dense)
            return layer(8, name="b")(layer(8, name="a")(x))

    assert model_products(autocast(Lifted(), "mixed_float16", {"b": "float32"}), data(2, 8)) == ["float16", "float32"]


def test_layers_in_a_scan_follow_the_path_of_the_stack():
    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            class Step(nn.Module):
                @nn.compact
                def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                    return jnp.tanh(nn.Dense(8)(x)), None

            scanned = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return nn.Dense(8)(scanned(name="layers")(x, None)[0])

    x = data(2, 8)
    assert model_products(autocast(Stacked(), "mixed_float16"), x) == ["float16", "float16"]
    assert model_products(autocast(Stacked(), "mixed_float16", {"layers/**": "float32"}), x) == ["float32", "float16"]


def test_dropout_masks_are_those_of_the_bare_module():
    bare, model = Noisy(Noisy()), Noisy(autocast(Noisy(), "mixed_float16"))

    @quick_jit
    def both(variables):
        return [m.apply(variables, data(3, 8), rngs=rngs(1), capture_intermediates=True) for m in (bare, model)]

    (want, mutated), (got, also) = both(numbers(shapes(bare, data(3, 8))))
    masks = jax.tree.map(lambda x: np.asarray(x) == 0, (mutated, also))
    same_bits(masks[0], masks[1])
    np.testing.assert_allclose(got, want, atol=0.02)
    assert not np.array_equal(got, want)
    assert model_products(model, data(3, 8)) == ["float32", "float16", "float16"]


def test_bound_modules_run_under_autocast():
    model = autocast(Tied(), "mixed_float16", {"embed": "float32"})
    bound = model.bind(model.init(rngs(), IDS))
    same_bits(bound(IDS), bound(IDS))
    assert products(bound, IDS) == ["float16", "float32"]


def test_a_module_under_autocast_can_be_cloned_copied_and_tabulated():
    model = autocast(MLP(), "mixed_float16", {"Dense_1": "float32"})
    for copy in (model.clone(), pickle.loads(pickle.dumps(model))):
        assert model_products(copy, data(2, 8)) == ["float16", "float32"]
    console = {"force_terminal": False, "width": 120}
    bare = MLP().tabulate(rngs(), data(2, 8), console_kwargs=console)
    assert model.tabulate(rngs(), data(2, 8), console_kwargs=console).startswith(bare)
