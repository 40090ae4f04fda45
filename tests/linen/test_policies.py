"""Policies of Linen modules: a residual network, and modules that share a scope."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import pytest
from linen_zoo import (
    HALVES,
    MLP,
    ResNet,
    data,
    dtypes_of,
    float32,
    model_products,
    products,
    rngs,
    same_computation,
    shapes,
    standard_promotion,
    written,
)

import jaxmp
from jaxmp.linen import apply_policy, autocast

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("standard_promotion"),  # Linen's BatchNorm adds half and float32 arrays
]

IMAGE, X = data(2, 8, 8, 3), data(2, 8)


def trained(model: nn.Module) -> Any:
    """Return a function from variables to outputs in training and new statistics."""

    def apply(variables: Any) -> Any:
        out, state = model.apply(variables, IMAGE, mutable=["batch_stats"])
        return float32(out), state

    return apply


@pytest.fixture(scope="module")
def resnet() -> Any:
    """Return the shapes of the variables of a residual network."""
    with standard_promotion():
        return shapes(ResNet(), IMAGE)


def dtypes_in(model: nn.Module, variables: Any) -> tuple[list[str], set[str]]:
    """Return the dtypes of product operands and of BatchNorm results."""

    def norms(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.BatchNorm)

    returned = {}

    def apply(variables: Any) -> Any:
        out, state = model.apply(variables, IMAGE, capture_intermediates=norms, mutable=True)
        returned.update(state["intermediates"])
        return out

    return products(apply, variables), dtypes_of(returned)


def test_every_product_of_the_residual_network_is_half_though_its_dtype_defaults_to_float32(resnet):
    policy = "mixed_float16"
    model, by_hand = apply_policy(ResNet(), policy), ResNet(dtype=HALVES[policy])
    assert dtypes_in(model, resnet)[0] == [HALVES[policy]] * 10
    assert shapes(model, IMAGE) == resnet
    same_computation(trained(written(ResNet(), policy)), trained(by_hand), resnet)


def test_norms_are_float32_and_products_half_by_pattern_or_O2(resnet):
    norms = {"**/BatchNorm_*": "float32", "**/bn_init": "float32", "**/norm_proj": "float32"}
    assert dtypes_in(apply_policy(ResNet(), "mixed_bfloat16", norms), resnet) == (["bfloat16"] * 10, {"float32"})
    assert dtypes_in(apply_policy(ResNet(), "O2"), resnet) == (["float16"] * 10, {"float32"})


def test_a_pattern_on_a_class_covers_the_transformed_class():
    bare = nn.Sequential([nn.remat(MLP)(), nn.Dense(8)])
    assert model_products(apply_policy(bare, "mixed_float16", {MLP: "float32"}), X) == ["float32", "float32", "float16"]


def test_a_float32_region_in_a_module_with_a_dtype_field_is_float32():
    class Careful(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            x = x.astype(self.dtype)
            with jaxmp.precision("float32"):
                return x @ self.param("kernel", nn.initializers.ones, (8, 8)).astype(self.dtype)

    bare = nn.Sequential([nn.Dense(8), Careful()])
    assert model_products(apply_policy(bare, "mixed_float16"), X) == ["float16", "float32"]


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


HALF, WIDE = "bfloat16", "float32"


def test_an_override_by_class_covers_modules_below_a_module_with_a_shared_scope():
    for put_under in (apply_policy, autocast):
        for bare, pattern, expected in (
            (SharesInSetup(), "type:Inn*", [WIDE, WIDE, HALF]),
            (SharesInSetup(), nn.Dense, [WIDE, HALF, WIDE]),
            (SharesInCompact(), Inner, [WIDE, WIDE, HALF]),
            (Holds(), Inner, [WIDE, WIDE, HALF, HALF]),
            (Holds(), SharesInSetup, [WIDE, WIDE, WIDE, HALF]),
        ):
            model = put_under(bare, "mixed_bfloat16", {pattern: "float32"})
            assert products(model.apply, jax.eval_shape(bare.init, rngs(), X), X) == expected, pattern
