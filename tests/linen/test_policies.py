"""Paths and classes of Linen modules in overrides, and a residual network with dtypes by hand."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from linen_zoo import (
    HALVES,
    MLP,
    ResNet,
    data,
    float32,
    model_products,
    products,
    rngs,
    same_computation,
    shapes,
    standard_promotion,
    written,
)

from jaxmp.linen import apply_policy, autocast

pytestmark = pytest.mark.once

X = data(2, 8)
HALF, WIDE = "bfloat16", "float32"


def test_a_residual_network_and_its_statistics_are_as_by_hand_though_its_dtype_defaults_to_float32():
    policy, image = "mixed_float16", data(2, 8, 8, 3)

    def trained(model: nn.Module) -> Any:
        return lambda variables: float32(model.apply(variables, image, mutable=["batch_stats"]))

    with standard_promotion():  # BatchNorm adds half and float32 arrays
        variables, model = shapes(ResNet(), image), apply_policy(ResNet(), policy)
        assert products(trained(model), variables) == [HALVES[policy]] * 4
        assert shapes(model, image) == variables
        same_computation(trained(written(ResNet(), policy)), trained(ResNet(dtype=HALVES[policy])), variables)


def test_a_pattern_on_a_class_covers_the_transformed_class():
    bare = nn.Sequential([nn.remat(MLP)(), nn.Dense(8)])
    assert model_products(apply_policy(bare, "mixed_float16", {MLP: "float32"}), X) == ["float32", "float32", "float16"]


class Helped(nn.Module):
    """A module that calls a submodule in a method other than ``__call__``."""

    def setup(self) -> None:
        self.body, self.head = nn.Dense(8), nn.Dense(8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.encode(x))

    def encode(self, x: jax.Array) -> jax.Array:
        return nn.relu(self.body(x))


class Lifted(nn.Module):
    """A module that creates two submodules of one lifted class."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.jit(nn.Dense)
        return layer(8, name="head")(layer(8, name="body")(x))


class Stacked(nn.Module):
    """Layers in a scan, and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Step(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                return jnp.tanh(nn.Dense(8)(x)), None

        scanned = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(8)(scanned(name="body")(x, None)[0])


@pytest.mark.parametrize("under", [apply_policy, autocast])
def test_paths_are_those_of_the_params_whatever_methods_and_transforms_lead_to_a_module(under):
    for bare in (Helped(), Lifted(), Stacked()):
        for pattern in ("body", "body/**"):
            assert model_products(under(bare, "mixed_bfloat16", {pattern: "float32"}), X) == [WIDE, HALF]
    model = under(Helped(), "mixed_bfloat16", {"body": "float32"})
    encode = functools.partial(model.apply, method="encode")
    assert products(encode, shapes(Helped(), X), X) == [WIDE]


# --- modules that share a scope ---------------------------------------------------------------------------------------


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="below")(x) @ self.param("own", nn.initializers.ones, (8, 8))


class SharesInSetup(nn.Module):
    def setup(self):
        self.inner, self.beside = Inner(), nn.Dense(8)
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.beside(self.inner(x))


class SharesInCompact(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = Inner()
        nn.share_scope(self, inner)
        return nn.Dense(8, name="beside")(inner(x))


class Holds(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="beside")(SharesInSetup(name="within")(x))


@pytest.mark.parametrize("under", [apply_policy, autocast])
def test_an_override_by_class_covers_modules_below_a_module_with_a_shared_scope(under):
    for bare, pattern, expected in (
        (SharesInSetup(), "type:Inn*", [WIDE, WIDE, HALF]),
        (SharesInSetup(), nn.Dense, [WIDE, HALF, WIDE]),
        (SharesInCompact(), Inner, [WIDE, WIDE, HALF]),
        (Holds(), Inner, [WIDE, WIDE, HALF, HALF]),
        (Holds(), SharesInSetup, [WIDE, WIDE, WIDE, HALF]),
    ):
        model = under(bare, "mixed_bfloat16", {pattern: "float32"})
        assert products(model.apply, jax.eval_shape(bare.init, rngs(), X), X) == expected, pattern
