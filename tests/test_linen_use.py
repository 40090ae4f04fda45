"""A module under a policy is used wherever the bare one was: methods, collections, binding, copies, nests, threads."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from typing import Any

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from linen_zoo import (
    MLP,
    Linear,
    ResNet,
    Tied,
    data,
    dtypes_of,
    float32,
    model_products,
    products,
    quick_jit,
    rngs,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
)

from jaxmp.linen import apply_policy

X = data(2, 4)


class Coder(nn.Module):
    """An encoder and a decoder with methods of their own."""

    hand: Any = None

    def setup(self):
        self.encoder = nn.Dense(3, dtype=self.hand)
        self.heads = [nn.Dense(2, dtype=self.hand), nn.Dense(2, dtype=self.hand)]
        self.table = {"a": nn.Dense(4, dtype=self.hand)}

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return nn.tanh(self.encoder(x))

    def decode(self, z):
        return self.table["a"](sum(head(z) for head in self.heads))


def both(policy: Any = "mixed_float16", overrides: Any = None) -> tuple[nn.Module, nn.Module, Any]:
    model = apply_policy(Coder(), policy, overrides)
    return model, Coder("float16"), model.init(rngs(), X)


METHODS: dict[str, Any] = {
    "its name": "encode",
    "a function of the class": Coder.encode,
    "a function that calls methods": lambda mdl, x: mdl.decode(mdl.encode(x)),
    "a function that calls a submodule": lambda mdl, x: mdl.encoder(x),
    "a function that calls submodules in a list": lambda mdl, x: mdl.heads[1](mdl.encoder(x)),
    "a function that calls a submodule in a dict": lambda mdl, x: mdl.table["a"](mdl.heads[0](mdl.encoder(x))),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_under_the_policy_when_it_is_chosen_by(method):
    model, by_hand, variables = both()
    apply = functools.partial(model.apply, method=METHODS[method])
    same_computation(apply, lambda v, x: float32(by_hand.apply(v, x, method=METHODS[method])), variables, X)
    assert set(products(apply, variables, X)) == {"float16"}


def test_a_bound_method_of_the_model_itself_can_be_handed_to_apply():
    model, by_hand, variables = both()
    same_computation(
        functools.partial(model.apply, method=model.encode),
        lambda v, x: float32(by_hand.apply(v, x, method="encode")),
        variables,
        X,
    )


@pytest.mark.parametrize("method", METHODS)
def test_init_by_way_of_a_method_makes_the_variables_of_the_bare_module(method):
    make = functools.partial(jax.eval_shape, functools.partial(Coder().init, method=METHODS[method]))
    mine = functools.partial(apply_policy(Coder(), "mixed_float16").init, method=METHODS[method])
    assert jax.eval_shape(mine, rngs(), X) == make(rngs(), X)


def test_an_override_reaches_a_submodule_that_only_a_function_calls():
    model = apply_policy(Coder(), "mixed_float16", {"heads_1": "float32", "table_a": "mixed_bfloat16"})
    apply = functools.partial(model.apply, method=METHODS["a function that calls submodules in a list"])
    assert products(apply, shapes(Coder(), X), X) == ["float16", "float32"]


def test_attend_as_the_method_of_an_embedding_is_half():
    model = apply_policy(nn.Embed(5, 4), "mixed_bfloat16")
    variables = model.init(rngs(), jnp.array([1]))
    assert products(functools.partial(model.apply, method="attend"), variables, X) == ["bfloat16"]


def test_init_with_output_returns_what_apply_does():
    model, _, variables = both()
    out, made = model.init_with_output(rngs(), X)
    same_bits((out, made), (model.apply(variables, X), variables))
    out, _ = model.init_with_output(rngs(), X, method=lambda mdl, x: mdl.encoder(x))
    assert out.dtype == jnp.float32


def test_variables_can_be_made_without_numbers_and_under_jit():
    model, _, variables = both()
    same_bits(model.lazy_init(rngs(), jax.ShapeDtypeStruct(X.shape, X.dtype)), variables)
    assert shapes(model, X) == jax.eval_shape(lambda: variables)
    assert jax.tree.structure(jax.jit(model.init)(rngs(), X)) == jax.tree.structure(variables)


def test_functional_init_and_apply_take_the_model():
    model, by_hand, variables = both()

    def encode(mdl: Coder, x: jax.Array) -> jax.Array:
        return mdl.encode(x)

    assert jax.eval_shape(nn.init(encode, model), rngs(), X)["params"].keys() == {"encoder"}
    same_computation(nn.apply(encode, model), lambda v, x: float32(nn.apply(encode, by_hand)(v, x)), variables, X)


# --- collections ------------------------------------------------------------------------------------------------------


def test_captured_intermediates_have_the_tree_of_the_bare_module_and_the_dtypes_of_the_policy():
    model, by_hand, variables = both()
    _, got = model.apply(variables, X, capture_intermediates=True)
    _, want = by_hand.apply(variables, X, capture_intermediates=True)
    (root,) = want["intermediates"]["__call__"]
    want["intermediates"]["__call__"] = (float32(root),)
    same_bits(got, want)
    assert got["intermediates"]["encoder"]["__call__"][0].dtype == jnp.float16


def test_a_filter_of_intermediates_sees_the_modules_it_asks_for():
    model, by_hand, variables = both()
    options: dict[str, Any] = {"capture_intermediates": lambda mdl, name: isinstance(mdl, Coder), "mutable": True}
    got, want = (m.apply(variables, X, **options)[1]["intermediates"] for m in (model, by_hand))
    assert got.keys() == want.keys()
    assert {"encode", "decode"} < got.keys()


class Sows(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        y = nn.Dense(4)(x) * scale
        self.sow("intermediates", "y", y)
        self.sow("losses", "norm", jnp.sum(x**2), reduce_fn=lambda a, b: a + b, init_fn=lambda: jnp.zeros(()))
        return self.perturb("delta", y)


def test_sown_values_and_perturbations_are_those_of_the_computation_and_strongly_typed():
    model = apply_policy(Sows(), "mixed_float16")
    with standard_promotion():
        variables = model.init(rngs(), X)
        out, state = model.apply(variables, X, mutable=["intermediates", "losses"])
    assert variables["perturbations"]["delta"].dtype == jnp.float16
    assert (out.dtype, state["intermediates"]["y"][0].dtype, state["losses"]["norm"].dtype) == (
        *("float32", "float16", "float32"),
    )
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves((variables, out, state)))


@pytest.mark.parametrize("mutable", [False, [], "batch_stats", ["batch_stats"], True, nn.DenyList("params")])
def test_mutable_returns_what_it_returns_for_the_bare_module(mutable):
    bare = nn.Sequential([nn.Dense(3), nn.BatchNorm(use_running_average=False)])
    with standard_promotion():
        variables = bare.init(rngs(), X)
        if mutable in (False, []):
            variables["batch_stats"] = {}
            bare = nn.Dense(3)
            variables = bare.init(rngs(), X)
        got = jax.eval_shape(
            functools.partial(apply_policy(bare, "mixed_float16").apply, mutable=mutable), variables, X
        )
        assert got == jax.eval_shape(functools.partial(bare.apply, mutable=mutable), variables, X)


def test_tabulate_lists_the_rows_of_the_bare_module():
    def rows(table: str) -> list[list[str]]:
        cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in table.splitlines() if "│" in line]
        return [cell for cell in cells if any(cell)]

    options: dict[str, Any] = {"console_kwargs": {"width": 200}}
    got = apply_policy(Coder(), "mixed_float16").tabulate(jax.random.key(0), X, **options)
    want = Coder().tabulate(jax.random.key(0), X, **options)
    assert rows(got) == rows(want)
    assert "float16" in got


# --- bound modules ----------------------------------------------------------------------------------------------------


def test_a_bound_model_and_its_submodules_are_under_the_policy():
    model, by_hand, variables = both(overrides={"table_a": "float32"})
    bound, hand = model.bind(variables), by_hand.bind(variables)
    same_bits(bound.encode(X), float32(hand.encode(X)))
    same_bits(bound.encoder(X), hand.encoder(X))
    same_bits(bound.heads[1](bound.encoder(X)), hand.heads[1](hand.encoder(X)))
    assert bound.table["a"](data(1, 2)).dtype == jnp.float32
    assert bound(X).dtype == jnp.float32


def test_a_model_is_unbound_again_and_a_submodule_taken_out_keeps_its_policy():
    model, _, variables = both()
    again, same = model.bind(variables).unbind()
    assert again == model
    same_bits(same, variables)
    encoder, encoder_variables = model.bind(variables).encoder.unbind()
    same_bits(encoder_variables["params"], variables["params"]["encoder"])
    assert products(encoder.apply, encoder_variables, X) == ["float16"]


# --- the object -------------------------------------------------------------------------------------------------------

COPIES = {
    "clone": lambda model: model.clone(),
    "copy": lambda model: model.copy(name=None),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "cloudpickle": lambda model: pickle.loads(cloudpickle.dumps(model)),
    "apply_policy again": lambda model: apply_policy(model, "mixed_float16", {nn.Dense: "mixed_bfloat16"}),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_equal_hashes_equal_and_is_under_the_same_policy(how):
    model = apply_policy(Tied(), "mixed_float16", {nn.Dense: "mixed_bfloat16"})
    other = COPIES[how](model)
    assert other == model
    assert hash(other) == hash(model)
    assert model_products(other, jnp.array([1])) == ["bfloat16", "float16"]


def test_a_copy_keeps_the_name_and_updated_fields_keep_the_policy():
    model = apply_policy(nn.Dense(3, name="head"), "mixed_float16")
    assert {COPIES[how](model).name for how in ("deepcopy", "cloudpickle", "clone")} == {"head"}
    assert model_products(model.clone(features=7), X) == ["float16"]


def test_models_under_different_policies_are_different():
    models = [apply_policy(MLP(), policy) for policy in ("mixed_float16", "mixed_bfloat16", "float32")]
    assert len({MLP(), *models}) == 4
    assert apply_policy(MLP(), "mixed_float16") == apply_policy(MLP(), "p=f32,c=f16,o=f32")


def test_a_model_looks_like_the_bare_one():
    model = apply_policy(MLP(), "mixed_float16")
    assert isinstance(model, MLP)
    assert (repr(model), type(model).__name__, type(model).__doc__) == (repr(MLP()), "MLP", MLP.__doc__)
    assert (type(model).__module__, model.features) == (MLP.__module__, MLP().features)


def test_the_bare_module_stays_as_it_was():
    inner = nn.Dense(3)
    bare = nn.Sequential([inner])
    model = apply_policy(bare, "mixed_float16")
    model_products(model, X)
    assert (inner.dtype, bare.layers[0].dtype, model_products(bare, X)) == (None, None, ["float32"])


def test_an_equal_model_as_a_static_argument_compiles_once():
    traces = []

    @functools.partial(quick_jit, static_argnums=0)
    def step(model, variables, x):
        traces.append(model)
        return model.apply(variables, x)

    variables = MLP().init(rngs(), X)
    for policy in ("mixed_float16", "mixed_float16", "mixed_bfloat16", "mixed_float16"):
        step(apply_policy(MLP(), policy), variables, X)
    assert len(traces) == 2


# --- nested -----------------------------------------------------------------------------------------------------------


class Parent(nn.Module):
    """Not under a policy; its part is."""

    part: Any
    style: str

    def setup(self):
        if self.style == "setup":
            self.inner = apply_policy(MLP(), "mixed_float16")

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="outer")(x)
        if self.style == "compact":
            return apply_policy(MLP(), "mixed_float16")(x)
        return (self.inner if self.style == "setup" else self.part)(x)


@pytest.mark.parametrize("style", ["field", "setup", "compact"])
def test_a_part_of_a_bare_model_is_under_its_policy_and_the_rest_is_not(style):
    parent = Parent(apply_policy(MLP(), "mixed_float16") if style == "field" else None, style)
    assert model_products(parent, X) == ["float32", "float16", "float16"]
    assert jax.eval_shape(parent.apply, shapes(parent, X), X).dtype == jnp.float32
    bare = Parent(MLP(), "field")
    if style == "field":
        same_computation(parent.init, bare.init, rngs(), X)


def test_parts_in_a_sequential_are_under_their_own_policies():
    parts = [apply_policy(nn.Dense(4), "mixed_float16"), nn.Dense(4), apply_policy(nn.Dense(4), "mixed_bfloat16")]
    assert model_products(nn.Sequential(parts), X) == ["float16", "float32", "bfloat16"]


@pytest.mark.parametrize("mixed", [False, True])
def test_the_inner_policy_wins_inside_and_the_outer_one_around_it(mixed):
    class Outer(nn.Module):
        part: Any

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            if mixed:
                x = x * self.param("scale", nn.initializers.ones, ())
            y = self.part(x)
            return nn.Dense(2)(y), y

    model = apply_policy(Outer(apply_policy(MLP(), "mixed_bfloat16", {"Dense_1": "float32"})), "mixed_float16")
    assert model_products(model, X) == ["float16", "bfloat16", "float32", "float16"]


def test_a_pattern_of_the_outer_policy_does_not_reach_into_a_part_with_its_own():
    model = apply_policy(
        nn.Sequential([apply_policy(MLP(), "mixed_bfloat16"), nn.Dense(2)]), "mixed_float16", {nn.Dense: "float32"}
    )
    assert model_products(model, X) == ["bfloat16", "bfloat16", "float32"]


def test_a_second_policy_replaces_the_first():
    model = apply_policy(apply_policy(MLP(), "mixed_float16"), "mixed_bfloat16")
    assert set(model_products(model, X)) == {"bfloat16"}
    assert model == apply_policy(MLP(), "mixed_bfloat16")


def test_a_module_shared_by_two_places_is_one_module_under_one_policy():
    class Shared(nn.Module):
        embed: Any
        again: Any

        @nn.compact
        def __call__(self, ids):
            return self.again.attend(nn.Dense(4)(self.embed(ids)))

    embed, ids = nn.Embed(5, 4), jnp.array([0, 3])
    model = apply_policy(Shared(embed, embed), "mixed_float16")
    assert set(shapes(model, ids)["params"]) == {"embed", "Dense_0"}
    assert model_products(model, ids) == ["float16", "float16"]


def test_modules_in_lists_and_dicts_as_fields_are_under_the_policy():
    class Holder(nn.Module):
        parts: Any

        def __call__(self, x):
            return self.parts["b"](self.parts["a"][1](self.parts["a"][0](x)))

    parts = {"a": [nn.Dense(4), Linear(4)], "b": nn.Dense(2)}
    assert model_products(apply_policy(Holder(parts), "mixed_float16"), X) == ["float16"] * 3


def test_a_model_applied_on_its_own_inside_a_model_is_not_its_submodule():
    teacher, embed = MLP(), Tied()
    knowledge = teacher.init(rngs(), X)

    class Student(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x), teacher.apply(knowledge, x), embed.init_with_output(rngs(), jnp.array([1]))[0]

    model = apply_policy(Student(), "mixed_float16")
    assert products(model.apply, shapes(model, X), X)[0] == "float16"
    assert set(products(model.apply, shapes(model, X), X)[1:]) == {"float32"}


def test_a_model_inside_a_loss_with_batch_statistics_trains_in_a_bare_parent():
    class Head(nn.Module):
        part: Any

        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(2)(self.part(x, train))

    parent, image = Head(apply_policy(ResNet(), "mixed_bfloat16")), data(1, 8, 8, 3)
    with standard_promotion():
        variables = shapes(parent, image, train=True)
        apply = functools.partial(parent.apply, train=True, mutable=["batch_stats"])
        _, state = jax.eval_shape(apply, variables, image)
    assert dtypes_of(state) == {"float32"}


# --- threads ----------------------------------------------------------------------------------------------------------


def test_two_threads_trace_under_two_policies_at_once():
    barrier, seen = threading.Barrier(2), {}

    class Meets(nn.Module):
        @nn.compact
        def __call__(self, x):
            barrier.wait(timeout=30)
            return nn.Dense(3)(x)

    variables = {"params": {"Dense_0": nn.Dense(3).init(rngs(), X)["params"]}}

    def trace(policy):
        seen[policy] = products(apply_policy(Meets(), policy).apply, variables, X)

    threads = [threading.Thread(target=trace, args=(policy,)) for policy in ("mixed_float16", "mixed_bfloat16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"mixed_float16": ["float16"], "mixed_bfloat16": ["bfloat16"]}
