"""A module under a policy behaves like a module: equality, copies, threads."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_zoo import (
    MLP,
    Linear,
    Tied,
    data,
    dtypes_of,
    model_products,
    products,
    rngs,
    same_bits,
    same_computation,
    shapes,
)

import jaxmp
from jaxmp.linen import apply_policy

pytestmark = pytest.mark.once

X = data(2, 8)


# --- the object -------------------------------------------------------------------------------------------------------

COPIES = {
    "clone": lambda model: model.clone(),
    "copy": lambda model: model.copy(name=None),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "cloudpickle": lambda model: pickle.loads(cloudpickle.dumps(model)),
}


def test_a_copy_has_the_same_hash_name_and_policy_and_is_equal():
    model = apply_policy(Tied(), "mixed_float16", {nn.Dense: "mixed_bfloat16"})
    for copied in COPIES.values():
        other = copied(model)
        assert other == model
        assert hash(other) == hash(model)
        assert model_products(other, jnp.array([1])) == ["bfloat16", "float16"]
    model = apply_policy(nn.Dense(8, name="head"), "mixed_float16")
    assert {COPIES[how](model).name for how in ("deepcopy", "cloudpickle", "clone")} == {"head"}
    assert model_products(model.clone(features=7), X) == ["float16"]


def test_a_class_that_is_not_in_a_file_is_pickled_by_value_also_after_a_call():
    class Local(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    model = apply_policy(Local(), "mixed_float16")
    variables = model.init(rngs(), X)
    model.apply(variables, X)
    assert pickle.loads(cloudpickle.dumps(model)) == model
    for module in (model, Local()):
        assert pickle.loads(cloudpickle.dumps(module)).apply(variables, X).shape == (2, 8)


def test_a_model_has_the_class_of_the_bare_model_which_does_not_change_and_shows_its_policy():
    models = [apply_policy(MLP(), policy) for policy in ("mixed_float16", "mixed_bfloat16", "float32")]
    assert len({MLP(), *models}) == 4
    model = models[0]
    assert model == apply_policy(MLP(), "p=f32,c=f16,o=f32") and isinstance(model, MLP)
    assert repr(model) == f"{MLP()!r}  # policy: {jaxmp.get_policy('mixed_float16')}"
    assert (type(model).__name__, type(model).__doc__) == ("MLP", MLP.__doc__)
    assert (type(model).__module__, model.features) == (MLP.__module__, MLP().features)

    bare = nn.Sequential([nn.Dense(8)])
    model_products(apply_policy(bare, "mixed_float16"), X)
    assert (bare.layers[0].dtype, model_products(bare, X)) == (None, ["float32"])


# --- nested -----------------------------------------------------------------------------------------------------------


class Parent(nn.Module):
    """A module without a policy that has a submodule with a policy."""

    part: Any
    style: str

    def setup(self):
        if self.style == "setup":
            self.inner = apply_policy(MLP(), "mixed_float16")

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="outer")(x)
        if self.style == "compact":
            return apply_policy(MLP(), "mixed_float16")(x)
        return (self.inner if self.style == "setup" else self.part)(x)


def test_a_policy_on_a_submodule_of_a_bare_model_covers_only_the_submodule():
    for style in ("setup", "compact", "field"):
        parent = Parent(apply_policy(MLP(), "mixed_float16") if style == "field" else None, style)
        assert model_products(parent, X) == ["float32", "float16", "float16"]
        assert jax.eval_shape(parent.apply, shapes(parent, X), X).dtype == jnp.float32
    same_computation(parent.init, Parent(MLP(), "field").init, rngs(), X)


def test_a_nested_model_keeps_its_policy_if_its_modules_are_arguments():
    inner = apply_policy(nn.Sequential([nn.Dense(8), nn.Dense(8)]), "mixed_bfloat16")
    middle = apply_policy(nn.Sequential([nn.Dense(8), inner]), "float32")
    model = apply_policy(nn.Sequential([nn.Dense(8), middle]), "mixed_float16")
    assert model_products(model, X) == ["float16", "float32", "bfloat16", "bfloat16"]


def test_a_model_whose_apply_is_called_inside_another_model_is_part_of_the_call_and_not_a_submodule():
    teacher, embed = MLP(), Tied()
    knowledge = teacher.init(rngs(), X)

    class Student(nn.Module):
        @nn.compact
        def __call__(self, x):
            logits, _ = embed.init_with_output(rngs(), x, method=lambda tied, x: tied.embed.attend(tied.hidden(x)))
            return nn.Dense(8)(x), teacher.apply(knowledge, x), logits

    model = apply_policy(Student(), "mixed_float16")
    assert set(shapes(model, X)["params"]) == {"Dense_0"}
    assert set(products(model.apply, shapes(model, X), X)) == {"float16"}


# --- threads ----------------------------------------------------------------------------------------------------------


def test_two_threads_trace_under_two_policies_at_once():
    barrier, dtypes = threading.Barrier(2), {}

    class Meets(nn.Module):
        @nn.compact
        def __call__(self, x):
            barrier.wait(timeout=300)
            return nn.Dense(8)(x)

    variables = {"params": {"Dense_0": nn.Dense(8).init(rngs(), X)["params"]}}

    def trace(policy):
        dtypes[policy] = products(apply_policy(Meets(), policy).apply, variables, X)

    threads = [threading.Thread(target=trace, args=(policy,)) for policy in ("mixed_float16", "mixed_bfloat16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == {"mixed_float16": ["float16"], "mixed_bfloat16": ["bfloat16"]}


# --- classes of any kind ----------------------------------------------------------------------------------------------


class KeywordOnly(nn.Module, kw_only=True):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class HashedByHand(nn.Module):
    table: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)

    def __hash__(self):
        return 7


class NamesScopesAfterMethods(nn.Module):
    @nn.compact_name_scope
    def up(self, x):
        return nn.Dense(8)(x)

    def __call__(self, x):
        return self.up(x)


class Derived(MLP):
    @nn.compact
    def __call__(self, x):
        return Linear(8)(super().__call__(x))


class SetsFieldsAfterwards(nn.Module):
    width: int
    twice: int = 0

    def __post_init__(self):
        self.twice = 2 * self.width
        super().__post_init__()

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.twice)(x)


CLASSES = [KeywordOnly(width=8), NamesScopesAfterMethods(), Derived(), SetsFieldsAfterwards(4)]


def test_a_module_of_any_kind_keeps_its_variables_and_its_hash_and_has_half_products():
    for bare in CLASSES:
        model = apply_policy(bare, "mixed_float16")
        same_computation(model.init, bare.init, rngs(), X)
        assert set(model_products(model, X)) == {"float16"}
    assert hash(apply_policy(HashedByHand(np.ones(3)), "mixed_float16")) == 7


def test_a_policy_can_be_applied_to_a_bound_model():
    variables = Tied().init(rngs(), jnp.array([1]))
    bound = Tied().bind(variables)
    assert bound.hidden(X).dtype == jnp.float32
    same_bits(
        apply_policy(bound, "mixed_float16")(jnp.array([1])),
        apply_policy(Tied(), "mixed_float16").apply(variables, jnp.array([1])),
    )
    assert apply_policy(bound.hidden, "float16")(X).dtype == jnp.float16


def test_params_that_apply_creates_are_stored_in_the_param_dtype():
    out, variables = apply_policy(Linear(), "mixed_float16").apply({}, X, rngs=rngs(), mutable=True)
    assert (out.dtype, dtypes_of(variables)) == (jnp.float32, {"float32"})
    same_bits(variables, Linear().apply({}, X, rngs=rngs(), mutable=True)[1])
