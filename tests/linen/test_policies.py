"""Policies of Linen modules: overrides, presets, and precision of products."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import pytest
from linen_zoo import (
    HALVES,
    MLP,
    Linear,
    ResNet,
    data,
    dtypes_of,
    float32,
    model_products,
    products,
    rngs,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
    written,
)

import jaxmp
from jaxmp.linen import apply_policy, autocast
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations

pytestmark = pytest.mark.once

IMAGE, X = data(2, 8, 8, 3), data(2, 8)


@pytest.fixture(autouse=True)
def promotion():
    """Allow dtype promotion, because Linen's BatchNorm adds half and float32 arrays."""
    with standard_promotion():
        yield


def trained(model: nn.Module) -> Any:
    """Return a function from variables to training and evaluation outputs.

    It also returns the new statistics.
    """

    def apply(variables: Any) -> Any:
        out, state = model.apply(variables, IMAGE, mutable=["batch_stats"])
        return float32(out), state, float32(model.apply(variables, IMAGE, train=False))

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


OVERRIDES: list[Any] = [
    {"**/BatchNorm_*": "float32", "**/bn_init": "float32", "**/norm_proj": "float32"},
    {nn.BatchNorm: "float32"},
]


def test_norms_are_float32_and_products_half_by_pattern_or_class(resnet):
    for overrides in OVERRIDES:
        model = apply_policy(ResNet(), "mixed_bfloat16", overrides)
        assert dtypes_in(model, resnet) == (["bfloat16"] * 10, {"float32"})


def test_O2_makes_norms_float32_and_products_float16_and_accepts_overrides(resnet):
    assert dtypes_in(apply_policy(ResNet(), "O2"), resnet) == (["float16"] * 10, {"float32"})
    assert model_products(apply_policy(MLP(), "O2", {"Dense_1": "float32"}), X) == ["float16", "float32"]


def test_the_first_pattern_that_matches_wins():
    rules: dict[Any, str] = {"Dense_0": "mixed_bfloat16", nn.Dense: "float32", "Dense_1": "mixed_float16"}
    assert model_products(apply_policy(MLP((8, 8, 8)), "mixed_float16", rules), X) == ["bfloat16", "float32", "float32"]


def test_an_override_covers_everything_below(resnet):
    model = apply_policy(ResNet(), "mixed_float16", {"Bottleneck_1": "float32"})
    assert dtypes_in(model, resnet)[0] == ["float16"] * 5 + ["float32"] * 4 + ["float16"]


def test_a_pattern_on_a_class_covers_subclasses_transformed_classes_and_all_modules_below():
    class Special(MLP):
        pass

    model = apply_policy(nn.Sequential([MLP(), Special(), nn.Dense(8)]), "mixed_float16", {Special: "float32"})
    assert model_products(model, X) == ["float16", "float16", "float32", "float32", "float16"]
    model = apply_policy(nn.Sequential([MLP(), Special(), nn.Dense(8)]), "mixed_float16", {MLP: "float32"})
    assert model_products(model, X) == ["float32"] * 4 + ["float16"]

    bare = nn.Sequential([nn.remat(MLP)(), nn.Dense(8)])
    assert model_products(apply_policy(bare, "mixed_float16", {MLP: "float32"}), X) == ["float32", "float32", "float16"]


def test_a_float32_submodule_of_a_half_model_returns_float32_to_a_parent_with_params():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(8, name="precise")(x)
            scale = self.param("scale", nn.initializers.ones, ())
            return nn.Dense(8, name="also")(y), y * scale, nn.Dense(8)(y)

    model = apply_policy(Parent(), "mixed_float16", {"precise": "float32", "also": "float32"})
    assert model_products(model, X) == ["float32", "float32", "float16"]
    variables = model.init(rngs(), X)
    with jax.default_matmul_precision("highest"):
        y = nn.Dense(8).apply({"params": variables["params"]["precise"]}, X)
    same_bits(model.apply(variables, X)[1], y)


def test_a_module_without_dtype_field_or_params_can_be_made_float32():
    class Times(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ x.T

    bare = nn.Sequential([nn.Dense(8), Times()])
    assert model_products(apply_policy(bare, "mixed_float16"), X) == ["float16", "float16"]
    assert model_products(apply_policy(bare, "mixed_float16", {Times: "float32"}), X) == ["float16", "float32"]


def test_every_dtype_of_an_override_is_used():
    rules = {"Dense_1": "params=bfloat16,compute=float16,output=float32"}
    params = shapes(apply_policy(MLP(), "mixed_float16", rules), X)["params"]
    assert [dtypes_of(params[name]) for name in ("Dense_0", "Dense_1")] == [{"float32"}, {"bfloat16"}]


def test_a_policy_may_be_a_policy_map():
    policies = jaxmp.PolicyMap("mixed_float16", {"Dense_0": "float32"})
    assert model_products(apply_policy(MLP(), policies), X) == ["float32", "float16"]
    assert model_products(apply_policy(MLP(), policies, {"Dense_0": "mixed_bfloat16"}), X) == ["bfloat16", "float16"]


# --- the precision of products ----------------------------------------------------------------------------------------


def precisions(model: nn.Module, *, gradients: bool = False) -> list[str]:
    """Return the precision of every product of ``model``; ``-`` for JAX's default."""

    def loss(variables: Any) -> jax.Array:
        return model.apply(variables, X).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss) if gradients else loss)(shapes(model, X))
    params = [eqn.params["precision"] for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]
    of_operands = [precision[0] if isinstance(precision, tuple) else precision for precision in params]
    return ["-" if precision is None else str(precision) for precision in of_operands]


def test_float32_products_are_true_float32_ones():
    for bare in (MLP((8,)), Linear(), nn.Sequential([nn.Conv(3, (1,))])):
        assert precisions(apply_policy(bare, "float32")) == ["HIGHEST"]
        assert set(precisions(apply_policy(bare, "float32"), gradients=True)) == {"HIGHEST"}


def test_the_precision_of_an_override_applies_only_to_the_modules_it_covers():
    model = apply_policy(MLP((8, 8, 8)), "mixed_float16", {"Dense_1": "float32"})
    assert precisions(model) == ["-", "HIGHEST", "-"]
    model = apply_policy(MLP((8, 8, 8)), "float32", {"Dense_1": "mixed_float16"})
    assert precisions(model) == ["HIGHEST", "-", "HIGHEST"]

    model = apply_policy(MLP((8, 8)), "mixed_float16", {"Dense_1": "matmul_precision=BF16_BF16_F32_X3"})
    assert precisions(model) == ["-", "BF16_BF16_F32_X3"]
    assert precisions(model, gradients=True).count("BF16_BF16_F32_X3") == 3

    with jax.default_matmul_precision("high"):
        model = apply_policy(MLP((8, 8)), "mixed_float16", {"Dense_1": "float32"})
        assert precisions(model) == ["-", "HIGHEST"]  # half products need no precision


def test_a_precision_that_a_module_sets_around_a_submodule_stays():
    class Careful(nn.Module):
        @nn.compact
        def __call__(self, x):
            with jax.default_matmul_precision("highest"):
                x = nn.Dense(8)(x)
            return nn.Dense(8)(x)

    assert precisions(apply_policy(Careful(), "mixed_float16")) == ["HIGHEST", "-"]


def test_the_precision_of_a_region_wins_over_the_policy_of_its_module():
    class Careful(nn.Module):
        level: Any

        @nn.compact
        def __call__(self, x):
            with jaxmp.precision(self.level):
                x = nn.Dense(8)(x) @ self.param("kernel", nn.initializers.ones, (8, 8))
            return x

    algorithm = jaxmp.Policy("float32", "float32", "float32", matmul_precision="BF16_BF16_F32_X3")
    for policy in ("float32", "mixed_float16", "matmul_precision=high"):
        assert precisions(apply_policy(Careful(algorithm), policy))[1] == "BF16_BF16_F32_X3"
        assert precisions(apply_policy(Careful("tensorfloat32"), policy))[1] == "-"
        assert precisions(apply_policy(Careful("float32"), policy))[1] == "HIGHEST"


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


def test_the_precision_is_restored_after_the_call_and_after_an_exception():
    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise RuntimeError("inside")

    model = apply_policy(nn.Sequential([nn.Dense(8), Fails()]), "float32")
    variables = {"params": {"layers_0": nn.Dense(8).init(rngs(), X)["params"]}}
    with pytest.raises(RuntimeError, match="inside"):
        model.apply(variables, X)
    assert jax.config.jax_default_matmul_precision is None
    assert precisions(MLP((8,))) == ["-"]


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
