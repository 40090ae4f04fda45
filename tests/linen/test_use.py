"""A module under a policy works wherever the bare module does."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import CallCompactUnboundModuleError
from linen_zoo import (
    MLP,
    data,
    float32,
    products,
    rngs,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
    written,
)

from jaxmp.linen import apply_policy

pytestmark = pytest.mark.once

X = data(2, 8)


class Coder(nn.Module):
    """A module with several methods, which call different submodules."""

    hand: Any = None

    def setup(self):
        self.encoder = nn.Dense(8, dtype=self.hand)
        self.heads = [nn.Dense(8, dtype=self.hand), nn.Dense(8, dtype=self.hand)]
        self.table = {"a": nn.Dense(8, dtype=self.hand)}

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return nn.tanh(self.encoder(x))

    def decode(self, z):
        return self.table["a"](sum(head(z) for head in self.heads))


def both() -> tuple[nn.Module, nn.Module, Any]:
    """Return a model as written in float16, the same by hand, and their variables."""
    model = written(Coder(), "mixed_float16")
    return model, Coder("float16"), model.init(rngs(), X)


METHODS: dict[str, Any] = {
    "its name": "encode",
    "a function that calls methods": lambda mdl, x: mdl.decode(mdl.encode(x)),
    "a function that calls submodules": lambda mdl, x: mdl.table["a"](mdl.heads[0](mdl.encoder(x))),
}


def test_every_way_to_choose_a_method_runs_it_under_the_policy():
    model, by_hand, variables = both()
    for method in (*METHODS.values(), model.encode):
        apply = functools.partial(model.apply, method=method)
        method = "encode" if method == model.encode else method
        by_method = functools.partial(by_hand.apply, method=method)
        same_computation(apply, lambda v, x, by_method=by_method: float32(by_method(v, x)), variables, X)
        assert set(products(apply, variables, X)) == {"float16"}


def test_init_with_a_method_creates_the_variables_of_the_bare_module_and_overrides_reach_its_submodules():
    overrides = {"heads_0": "float32", "table_a": "mixed_bfloat16"}
    for method in METHODS.values():
        model = apply_policy(Coder(), "mixed_float16", overrides)  # "encode" calls no module of the overrides
        assert shapes(model, X, method=method) == shapes(Coder(), X, method=method)
    apply = functools.partial(model.apply, method=METHODS["a function that calls submodules"])
    assert products(apply, shapes(Coder(), X), X) == ["float16", "float32", "bfloat16"]


def test_other_ways_to_initialise_and_apply_give_the_same():
    model, by_hand, variables = both()
    out, new_variables = model.init_with_output(rngs(), X)
    same_bits(new_variables, variables)
    np.testing.assert_allclose(out, model.apply(variables, X), rtol=0.01, atol=0.01)  # init computes in float32
    same_bits(model.lazy_init(rngs(), jax.ShapeDtypeStruct(X.shape, X.dtype)), variables)

    def encode(mdl: Coder, x: jax.Array) -> jax.Array:
        return mdl.encode(x)

    assert jax.eval_shape(nn.init(encode, model), rngs(), X)["params"].keys() == {"encoder"}
    same_computation(nn.apply(encode, model), lambda v, x: float32(nn.apply(encode, by_hand)(v, x)), variables, X)


# --- collections ------------------------------------------------------------------------------------------------------


def test_captured_intermediates_have_the_tree_of_the_bare_module_and_the_dtypes_of_the_policy():
    model, by_hand, variables = both()
    _, got = model.apply(variables, X, capture_intermediates=True)
    _, want = by_hand.apply(variables, X, capture_intermediates=True)
    same_bits(got, want)
    assert got["intermediates"]["encoder"]["__call__"][0].dtype == jnp.float16


def test_sown_values_and_perturbations_have_the_dtypes_of_the_computation_and_are_strongly_typed():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(8)(x * self.param("scale", nn.initializers.ones, ()))
            self.sow("intermediates", "hidden", y)
            self.sow("intermediates", "mean", y.mean())
            self.sow("losses", "norm", jnp.sum(x**2), reduce_fn=lambda a, b: a + b, init_fn=lambda: jnp.zeros(()))
            return self.perturb("delta", nn.Dense(8)(y))

    model = apply_policy(Sows(), "mixed_float16")
    with standard_promotion():
        variables = model.init(rngs(), X)
        out, state = model.apply(variables, X, mutable=["intermediates", "losses"])
    assert jax.tree.map(lambda leaf: leaf.dtype.name, dict(state)) == {
        "intermediates": {"hidden": ("float16",), "mean": ("float32",)},  # a product reads `hidden`
        "losses": {"norm": "float32"},
    }
    assert variables["perturbations"]["delta"].dtype == out.dtype == jnp.float32
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves((variables, out, state)))


def test_apply_with_mutable_returns_the_same_as_for_the_bare_module():
    layer, with_statistics = nn.Dense(8), nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False)])
    updated = ["batch_stats"], "batch_stats", np.array(["batch_stats", "cache"]), True, nn.DenyList("params")
    for bare, mutable in ((layer, False), (layer, []), *((with_statistics, mutable) for mutable in updated)):
        with standard_promotion():
            got, want = (
                jax.eval_shape(functools.partial(m.apply, mutable=mutable), shapes(bare, X), X)
                for m in (apply_policy(bare, "mixed_float16"), bare)
            )
        assert got == want


def test_tabulate_and_paths_list_the_rows_of_the_bare_module():
    def rows(table: str) -> list[list[str]]:
        cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in table.splitlines() if "│" in line]
        return [cell for cell in cells if any(cell)]

    options: dict[str, Any] = {"console_kwargs": {"width": 200}}
    model = apply_policy(Coder(), "mixed_float16")
    got = model.tabulate(jax.random.key(0), X, **options)
    want = Coder().tabulate(jax.random.key(0), X, **options)
    assert rows(got) == rows(want)
    assert "policy: params=float32,compute=float16" in got
    key = jax.random.key(0)
    assert model.module_paths(key, X).keys() == Coder().module_paths(key, X).keys()


# --- bound modules ----------------------------------------------------------------------------------------------------


def test_a_bound_model_keeps_the_policy_also_after_unbind_but_its_submodules_have_none():
    model, by_hand, variables = both()
    bound, hand = model.bind(variables), by_hand.bind(variables)
    same_bits(bound.encode(X), float32(hand.encode(X)))
    assert bound(X).dtype == jnp.float32

    model = apply_policy(Coder(), "mixed_float16")
    again, same = model.bind(variables).unbind()
    assert again == model
    same_bits(same, variables)
    encoder, encoder_variables = model.bind(variables).encoder.unbind()
    same_bits(encoder_variables["params"], variables["params"]["encoder"])
    assert products(encoder.apply, encoder_variables, X) == ["float32"]
    assert products(lambda x: model.bind(variables).encoder(x), X) == ["float32"]


# --- signatures and errors --------------------------------------------------------------------------------------------


def test_methods_have_the_signatures_of_the_bare_module_and_raise_its_errors_outside_of_apply():
    model = apply_policy(Coder(), "mixed_float16")
    for name in ("apply", "init", "init_with_output", "__call__", "encode"):
        assert inspect.signature(getattr(model, name)) == inspect.signature(getattr(Coder(), name))
    with pytest.raises(CallCompactUnboundModuleError):
        apply_policy(MLP(), "mixed_float16")(X)


def test_a_model_inside_of_another_may_not_override_operations():
    inner = apply_policy(nn.Dense(8), "mixed_float16", {"primitive:dot_general": "float32"})
    outer = apply_policy(nn.Sequential([inner, nn.Dense(8)]), "mixed_float16")
    with pytest.raises(ValueError, match="overrides of operations hold for a whole call, got 'primitive:dot_general'"):
        outer.init(rngs(), X)


def test_modules_that_share_a_scope_keep_their_own_param_dtypes():
    class Shares(nn.Module):
        def setup(self):
            self.inner = nn.Dense(8, param_dtype=jnp.float16)
            nn.share_scope(self, self.inner)

        @nn.compact
        def __call__(self, x):
            return self.inner(x) @ self.param("w", nn.initializers.ones, (8, 8))

    params = shapes(apply_policy(Shares(), "bfloat16"), X)["params"]
    assert {name: leaf.dtype.name for name, leaf in params.items()} == {
        "kernel": "float16", "bias": "float16", "w": "bfloat16",
    }  # fmt: skip
