"""Tests of jaxmp.linen.autocast: variables, overrides and errors."""

from __future__ import annotations

import functools
import pickle
import re
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
from jaxmp.linen import apply_policy, autocast

pytestmark = pytest.mark.once  # test_dtypes.py runs on the newest JAX

IMAGES = data(2, 16, 16, 3)
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


def test_an_override_by_path_changes_the_program_and_the_first_match_wins():
    for pattern, level in (("Dense_1", "float32"), ("**/Dense_1", "highest"), ("*_1", "half")):
        policy = (
            jaxmp.Policy("float32", "float32", "float32", matmul_precision="highest") if level == "highest" else level
        )
        model = autocast(MLP((8, 8, 8)), "mixed_float16", {pattern: policy})
        middle = "float16" if level == "half" else "float32"
        assert model_products(model, data(2, 8)) == ["float16", middle, "float16"]


def test_an_override_by_class_changes_the_program():
    dtypes = model_products(autocast(Small(), "mixed_float16", {nn.Conv: "float32"}), IMAGES)
    assert dtypes == ["float32", "float16"]

    model = autocast(MLP((8, 8, 8)), "mixed_float16", {"Dense_2": "half", "**": "float32"})
    assert model_products(model, data(2, 8)) == ["float32", "float32", "float16"]


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


def test_invalid_overrides_are_errors():
    for overrides, text in (
        ({"Dense1": "float32"}, r"'Dense1' matched none; nearest paths: 'Dense_1'"),
        ({nn.Conv: "float32"}, r"'type:Conv' matched none; nearest classes: "),
        ({"**": "float32"}, r"computes in float16, but every product stays .* Dense_0 \(override '\*\*'\)"),
    ):
        model = autocast(MLP(), "mixed_float16", overrides)
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(model.apply, shapes(MLP(), data(2, 8)), data(2, 8))


def test_overrides_of_operations_and_other_half_dtypes_work_under_autocast_and_under_a_policy():
    for under in (autocast, apply_policy):
        model = under(MLP(), "mixed_bfloat16", {"primitive:dot_general": "float32", "Dense_0": "half"})
        assert model_products(model, data(2, 8)) == ["bfloat16", "float32"]
        model = under(MLP(), "mixed_bfloat16", {"Dense_0": "mixed_float16"})
        assert model_products(model, data(2, 8)) == ["float16", "bfloat16"]


def test_a_model_under_autocast_whose_products_all_stay_float32_raises_and_names_them():
    model = jaxmp.linen.autocast(MLP(), "mixed_bfloat16", {nn.Dense: "float32"})
    text = r"every product stays as it was: Dense_0 \(override 'type:Dense'\), Dense_1 .*\.\nDrop the override"
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(model.apply, shapes(MLP(), data(2, 8)), data(2, 8))
    for key, level in (("class:half", "float32"), ("class:half", "tensorfloat32"), ("class:*", "float32")):
        model = jaxmp.linen.autocast(MLP(), "mixed_bfloat16", {key: level})
        with pytest.raises(ValueError, match=re.escape(f"Dense_1 (override {key!r}).\nDrop the override")):
            jax.eval_shape(model.apply, shapes(MLP(), data(2, 8)), data(2, 8))
        for half in ("Dense_0", "primitive:dot_general"):
            model = jaxmp.linen.autocast(MLP(), "mixed_bfloat16", {key: level, half: "half"})
            assert model_products(model, data(2, 8))[0] == "bfloat16"
    with pytest.raises(TypeError, match=r"jaxmp\.linen\.autocast takes a flax\.linen\.Module, got the class MLP"):
        jaxmp.linen.autocast(MLP, "mixed_bfloat16")
    assert model_products(autocast(MLP(), "float32"), data(2, 8)) == ["float32", "float32"]
