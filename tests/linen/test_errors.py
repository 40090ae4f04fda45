"""What a wrong use of policies on Linen modules says, and that it leaves nothing behind."""

from __future__ import annotations

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from linen_zoo import MLP, Linear, Tied, data, model_products, products, rngs, shapes, zeros

import jaxmp
from jaxmp.linen import apply_policy
from jaxmp.linen import run as linen_run

pytestmark = pytest.mark.once

X = data(2, 4)


def message(model: nn.Module, *args: Any, error: type[Exception] = ValueError) -> str:
    """What tracing ``model`` says, which is the same from ``init`` as from ``apply``."""
    args = args or (X,)
    bare = shapes(MLP(), X) if isinstance(model, MLP) else None
    with pytest.raises(error) as raised:
        shapes(model, *args)
    text, *_ = str(raised.value).split("\n----")  # below it JAX says how to see more of the traceback
    if bare is not None:
        with pytest.raises(error, match=re.escape(text)):
            jax.eval_shape(model.apply, bare, *args)
    return text


# --- a pattern that matches nothing -----------------------------------------------------------------------------------


def test_a_path_that_matches_nothing_is_named_with_the_nearest_paths():
    text = message(apply_policy(MLP(), "mixed_float16", {"Dence_1": "float32"}))
    assert text == (
        "every pattern of a policy must match a module, but 'Dence_1' matched none; nearest paths: 'Dense_1', 'Dense_0'"
    )


def test_a_class_that_matches_nothing_is_named_with_the_nearest_classes():
    text = message(apply_policy(MLP(), "mixed_float16", {nn.DenseGeneral: "float32"}))
    assert text == (
        "every pattern of a policy must match a module, but 'type:DenseGeneral' matched none; "
        "nearest classes: 'Dense', 'MLP'"
    )


def test_a_class_by_name_that_matches_nothing_is_named_with_the_nearest_classes():
    assert "'type:*Norm' matched none" in message(apply_policy(MLP(), "mixed_float16", {"type:*Norm": "float32"}))


def test_one_pattern_that_matches_nothing_among_others_raises():
    rules = {"Dense_0": "float32", "Dense_2": "float32"}
    assert "'Dense_2' matched none" in message(apply_policy(MLP(), "mixed_float16", rules))


@pytest.mark.parametrize("pattern", ["Dense_0/Dense_1", "", "/", "mlp/Dense_0", "dense_0"])
def test_a_path_that_is_not_the_model_s_raises(pattern):
    model = apply_policy(MLP(), "mixed_float16", {pattern: "mixed_bfloat16"})
    if pattern in ("", "/"):  # the root
        assert set(model_products(model, X)) == {"bfloat16"}
    else:
        assert f"{pattern!r} matched none" in message(model)


def test_a_pattern_on_a_variable_is_refused_for_it_has_the_policy_of_its_module():
    for pattern in ("Dense_0/kernel", "**/kernel"):
        text = message(apply_policy(MLP(), "mixed_float16", {pattern: "float32"}))
        assert text.startswith(f"every pattern of a policy must match a module, but {pattern!r} matched the variable ")
        assert text.endswith("'Dense_0/kernel', which has the policy of its module; write 'Dense_0'")


@pytest.mark.parametrize("rules", [{nn.Dense: "float32"}, {"encoder": "float32"}, {"type:Emb*": "float32"}])
def test_a_pattern_on_a_module_that_this_method_does_not_call_is_let_pass(rules):
    class Two(nn.Module):
        def setup(self):
            self.embed, self.encoder, self.head = nn.Embed(5, 4), nn.Dense(4), Linear()

        def __call__(self, ids):
            return self.head(self.encoder(self.embed(ids)))

        def decode(self, x):
            return self.head(x)

    ids = jnp.array([1, 2])
    model = apply_policy(Two(), "mixed_float16", rules)
    apply = functools.partial(model.apply, method="decode")
    assert products(apply, shapes(Two(), ids), X) == ["float16"]


class BodyAndHead(nn.Module):
    def setup(self):
        self.body, self.head = nn.Dense(4), nn.Dense(3, dtype="float32")

    def __call__(self, x):
        return self.head(self.body(x))

    def logits(self, x):
        return self.head(x)


def test_init_by_a_method_that_makes_a_part_of_the_variables_raises_for_nothing_about_the_rest():
    model = apply_policy(BodyAndHead(), "mixed_float16", {"body": "mixed_bfloat16"})
    assert shapes(model, X, method="logits")["params"].keys() == {"head"}


def test_a_pattern_is_held_against_the_whole_model_and_not_against_a_part_that_is_bound():
    model = apply_policy(Tied(), "mixed_float16", {"hidden": "float32"})
    bound = model.bind(zeros(shapes(Tied(), jnp.array([1]))))
    assert jax.eval_shape(bound.embed.attend, X).dtype == jnp.float16


def test_patterns_of_a_part_are_checked_inside_a_bare_parent():
    parent = nn.Sequential([nn.Dense(4), apply_policy(MLP(), "mixed_float16", {"Dence_0": "float32"})])
    assert "'Dence_0' matched none; nearest paths: 'Dense_0'" in message(parent)


def test_an_outer_pattern_that_only_a_part_with_its_own_policy_could_match_is_let_pass():
    part = apply_policy(MLP(), "mixed_float16")
    model = apply_policy(nn.Sequential([part, nn.Dense(3)]), "mixed_bfloat16", {"layers_0/Dense_0": "float32"})
    assert model_products(model, X) == ["float16", "float16", "bfloat16"]


# --- a half policy that changes no product ----------------------------------------------------------------------------


def test_a_half_policy_that_changes_no_product_names_the_modules_and_the_override():
    class Stubborn(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=jnp.float32, name="head")(nn.LayerNorm()(nn.Dense(4, dtype="float32")(x)))

    with jax.numpy_dtype_promotion("standard"):
        text = message(apply_policy(Stubborn(), "mixed_bfloat16"))
    assert text == (
        "the policy computes in bfloat16, but every product stays as it was: Dense_0 (its own dtype=float32), head "
        "(its own dtype=float32); to overrule a dtype that a module was given, name the module in overrides, e.g. "
        "overrides={'**': 'params=float32,compute=bfloat16,output=float32'}"
    )


def test_where_overrides_keep_every_product_they_are_what_to_drop_or_narrow():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype="float32", name="head")(nn.Dense(4)(nn.Dense(4)(x)))

    text = message(apply_policy(Mixed(), "mixed_float16", {"Dense_0": "float32", "Dense_*": "float32"}))
    assert text.endswith(
        "; drop or narrow the override 'Dense_*' and the override 'Dense_0'; or, to overrule a dtype that a module was "
        "given, name the module in overrides, e.g. overrides={'**': 'params=float32,compute=float16,output=float32'}"
    )
    text = message(apply_policy(nn.Sequential([nn.Dense(2)]), "mixed_float16", {nn.Dense: "float32"}))
    assert text.endswith("layers_0 (override 'type:Dense'); drop or narrow the override 'type:Dense'")


def test_the_override_that_it_names_makes_the_products_half():
    bare = nn.Sequential([nn.Dense(4, dtype="float32")])
    text = message(apply_policy(bare, "mixed_float16"))
    (override,) = re.findall(r"overrides=\{'\*\*': '(.*)'\}", text)
    assert model_products(apply_policy(bare, "mixed_float16", {"**": override}), X) == ["float16"]


def test_overrides_that_leave_no_product_half_are_named():
    text = message(apply_policy(MLP(), "mixed_float16", {nn.Dense: "float32"}))
    assert "Dense_0 (override 'type:Dense'), Dense_1 (override 'type:Dense')" in text


def test_a_single_layer_is_named_by_its_class():
    assert "Dense (its own dtype=float32)" in message(apply_policy(nn.Dense(3, dtype="float32"), "mixed_float16"))


def test_a_lookup_is_no_product():
    class Lookup(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(3, dtype=jnp.float32)(nn.Embed(5, 4)(ids))

    assert "Dense_0 (its own" in message(apply_policy(Lookup(), "mixed_float16"), jnp.array([1]))


@pytest.mark.parametrize(
    "bare",
    [
        nn.LayerNorm(),
        nn.Dropout(0.5, deterministic=True),
        nn.Sequential([nn.Dense(4, dtype="float32"), nn.Dense(4)]),
        nn.Sequential([nn.Dense(4, dtype="float32"), Linear()]),
        nn.Sequential([nn.Dense(4, dtype="float32"), apply_policy(MLP(), "mixed_float16")]),
    ],
)
def test_a_model_with_a_half_product_or_without_any_is_let_pass(bare):
    with jax.numpy_dtype_promotion("standard"):
        shapes(apply_policy(bare, "mixed_bfloat16"), X)


class Attends(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(4, dtype=self.dtype, name="l")(x))
        return jax.nn.softmax(x @ x.T) @ x


class Scaled(nn.Module):
    """Has a param of two axes, and no product of it."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="l")(x * self.param("scale", nn.initializers.ones, x.shape))


@pytest.mark.parametrize("under", [apply_policy, jaxmp.linen.autocast])
def test_whether_a_half_policy_changes_a_product_is_seen_on_the_program(under):
    for bare in (Attends(), *([Attends("float32")] if under is apply_policy else ())):
        model = under(bare, "mixed_bfloat16", {"l": "float32"} if bare.dtype is None else None)
        with jax.numpy_dtype_promotion("standard"):
            assert products(model.apply, shapes(model, X), X) == ["float32", "bfloat16", "bfloat16"]
    model = under(Scaled(), "mixed_bfloat16", {"l": "float32"})
    variables = zeros(shapes(Scaled(), X))
    for call in (lambda: model.init(rngs(), X), lambda: model.apply(variables, X), lambda: model.bind(variables)(X)):
        with pytest.raises(ValueError, match=r"every product stays as it was: l \(override 'l'\); drop or narrow"):
            call()


def test_init_of_what_its_own_variables_are_not_taken_by_is_let_pass():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(2, decode=True, deterministic=True)(x)

    model = apply_policy(Decoder(), "mixed_bfloat16", {"**": "float32"})
    variables = model.init(rngs(), data(1, 3, 4))  # of three tokens; one at a time is decoded
    with pytest.raises(ValueError, match="every product stays as it was"):
        model.apply(variables, data(1, 1, 4), mutable=["cache"])


@pytest.mark.parametrize("under", [apply_policy, jaxmp.linen.autocast])
def test_a_model_without_a_half_product_is_let_pass_as_a_part_of_another(under):
    class Around(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(self.part(x))

    part = under(BodyAndHead(), "mixed_float16", {"**": "float32"})
    assert model_products(apply_policy(Around(part), "mixed_float16"), X) == ["float32", "float32", "float16"]
    message(Around(part))


def test_a_method_that_calls_only_the_float32_part_is_let_pass():
    model = apply_policy(BodyAndHead(), "mixed_float16")
    apply = functools.partial(model.apply, method="logits")
    assert products(apply, shapes(BodyAndHead(), X), X) == ["float32"]


# --- what is no Linen module, no policy, no pattern -------------------------------------------------------------------


@pytest.mark.parametrize("what", [nn.Dense, MLP, "model", None])
def test_what_is_no_instance_of_a_linen_module_is_named(what):
    with pytest.raises(TypeError, match=r"takes an instance of flax\.linen\.Module, got .*; make the instance first"):
        apply_policy(what, "mixed_float16")


def test_an_nnx_module_is_refused():
    with pytest.raises(TypeError, match=r"use jaxmp\.nnx\.apply_policy for NNX modules"):
        apply_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "mixed_float16")


@pytest.mark.once
@pytest.mark.parametrize("model", [nn.Dense(2), nnx.Linear(2, 2, rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
@pytest.mark.parametrize(("policy", "came"), [("O2", "'O2'"), (jaxmp.get_policy("mixed_float16"), "Policy")])
def test_a_model_and_a_policy_that_are_swapped_are_told_so_without_the_arrays_of_the_model(model, policy, came):
    for adapter in (jaxmp.linen, jaxmp.nnx):
        for name in ("apply_policy", "autocast"):
            call = f"{adapter.__name__}.{name}"
            with pytest.raises(TypeError) as error:
                getattr(adapter, name)(policy, model)
            got = f"got ({came}, {type(model).__name__}): the two are swapped; write {call}(model, policy)"
            assert str(error.value) == f"{call} takes (model, policy), {got}"


@pytest.mark.once
@pytest.mark.parametrize("module", [nn.Dense(2), nnx.Linear(2, 2, rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_a_module_where_a_policy_or_a_pattern_is_meant_is_named_by_its_class(module):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    calls = [
        lambda: jaxmp.get_policy(module),
        lambda: jaxmp.nnx.apply_policy(model, "mixed_float16", {module: "float32"}),
        lambda: jaxmp.nnx.autocast(model, "mixed_float16", {"**": module}),
        lambda: jaxmp.autocast(jnp.sin, "mixed_float16", {module: "float32"}),
        lambda: jaxmp.autocast(jnp.sin, "mixed_float16", {"**": module}),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=f", got an instance of {type(module).__name__}[;:]") as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="got an instance of list; write"):
        jaxmp.nnx.apply_policy(model, "mixed_float16", [module])


def test_an_unknown_policy_an_unknown_override_and_a_map_as_override_raise_at_once():
    with pytest.raises(ValueError, match=r"unknown policy 'mixed_float17'.*nearest first: 'mixed_float16'"):
        apply_policy(MLP(), "mixed_float17")
    with pytest.raises(ValueError, match="unknown policy 'halfish'"):
        apply_policy(MLP(), "mixed_float16", {"Dense_0": "halfish"})
    with pytest.raises(TypeError, match="an override names one policy"):
        apply_policy(MLP(), "mixed_float16", {"Dense_0": "O2"})
    with pytest.raises(
        TypeError, match=r"a pattern is a glob on the module path.*or a module class, got an instance of Dense; for"
    ):
        apply_policy(MLP(), "mixed_float16", {nn.Dense(3): "float32"})


# --- the user's own errors --------------------------------------------------------------------------------------------


class Fails(nn.Module):
    where: str

    def setup(self):
        self.dense = nn.Dense(4)
        if self.where == "setup":
            raise RuntimeError("the user's own")

    def __call__(self, x):
        x = self.dense(x)
        if self.where == "call":
            raise RuntimeError("the user's own")
        return x.reshape(7, 7) if self.where == "shape" else x


@pytest.mark.parametrize("where", ["setup", "call", "shape"])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_user_s_own_error_is_raised_as_it_is_and_leaves_nothing_behind(where, mixed):
    bare = nn.remat(Fails)(where) if mixed else Fails(where)
    model = apply_policy(nn.Sequential([Linear(4), bare]), "float32", {"layers_0": "mixed_float16"})
    variables = shapes(nn.Sequential([Linear(4), Fails("")]), X)
    for call in (lambda: shapes(model, X), lambda: jax.eval_shape(model.apply, variables, X)):
        with pytest.raises((RuntimeError, TypeError), match=r"the user's own|reshape"):
            call()
        running = linen_run._running
        assert (running.runs, running.frames) == ([], [])
        assert not nn.module._global_interceptor_stack
        assert jax.config.jax_default_matmul_precision is None
    assert model_products(MLP(), X) == ["float32", "float32"]
    assert model_products(apply_policy(MLP(), "mixed_bfloat16"), X) == ["bfloat16", "bfloat16"]


def test_a_part_whose_error_the_model_catches_does_not_disturb_the_rest():
    class Tries(nn.Module):
        @nn.compact
        def __call__(self, x):
            try:
                Fails("call")(x)
            except RuntimeError:
                x = nn.Dense(4)(x)
            return apply_policy(nn.Dense(4), "mixed_bfloat16")(x)

    assert model_products(apply_policy(Tries(), "mixed_float16"), X) == ["float16", "float16", "bfloat16"]


def test_a_missing_param_is_reported_as_for_the_bare_module():
    from flax.errors import ScopeParamNotFoundError

    model = apply_policy(MLP(), "mixed_float16")
    with pytest.raises(ScopeParamNotFoundError, match="Dense_1"):
        model.apply({"params": {"Dense_0": MLP().init(rngs(), X)["params"]["Dense_0"]}}, X)


def test_the_public_name_is_the_one_in_jaxmp():
    assert jaxmp.linen.apply_policy is apply_policy


# --- operations that take no half operands ----------------------------------------------------------------------------


class Spectrum(nn.Module):
    operation: Any = staticmethod(lambda x: jnp.abs(jnp.fft.rfft(x)))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.operation(nn.Dense(4)(x))


class WithSpectrum(nn.Module):
    operation: Any = staticmethod(lambda x: jnp.abs(jnp.fft.rfft(x)))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2, name="head")(Spectrum(self.operation, name="spectrum")(x))


def notes(error: BaseException) -> list[str]:
    """Those of jaxmp's; JAX has one of its own."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("jaxmp: ")]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_jaxs_error_for_a_half_fourier_transform_notes_the_module_the_policy_and_what_mends_it(half):
    policy, variables = f"mixed_{half}", WithSpectrum().init(jax.random.key(0), X)
    model = apply_policy(WithSpectrum(), policy)
    for run in (model.apply, jax.jit(model.apply), jax.grad(lambda variables, x: model.apply(variables, x).sum())):
        with pytest.raises(ValueError, match=f"RFFT input must be float32 or float64, got {half}") as raised:
            run(variables, X)
        (note,) = notes(raised.value)
        assert f"the module 'spectrum' (Spectrum) runs under the policy {jaxmp.get_policy(policy)}, where" in note
        assert "overrides={'spectrum': 'float32'}" in note and f"jaxmp.linen.autocast(model, '{policy}')" in note
    apply_policy(WithSpectrum(), policy, {"spectrum": "float32"}).apply(variables, X)
    jaxmp.linen.autocast(WithSpectrum(), policy).apply(variables, X)


def test_an_operation_that_is_refused_only_when_it_runs_has_the_note_too():
    class Roots(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.abs(jnp.linalg.eigvals(nn.Dense(4)(x)))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
    variables = Roots().init(jax.random.key(0), x)
    model = apply_policy(Roots(), "mixed_float16")
    for run in (lambda: model.apply(variables, x), lambda: model.bind(variables)(x)):
        with pytest.raises((NotImplementedError, TypeError), match="float16") as raised:
            run()
        (note,) = notes(raised.value)
        assert note.startswith("jaxmp: the root (Roots) runs under the policy params=float32,compute=float16")
        assert "jaxmp.linen.autocast(model, 'mixed_float16')" in note
    jaxmp.linen.autocast(Roots(), "mixed_float16").apply(variables, x)


def test_an_initializer_that_is_half_by_itself_has_the_note_too():
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", lambda key: nn.initializers.orthogonal()(key, (4, 4), jnp.bfloat16))

    with pytest.raises((NotImplementedError, TypeError), match="bfloat16") as raised:
        apply_policy(nn.Sequential([nn.Dense(4), Half()]), "bfloat16").init(rngs(), X)
    (note,) = notes(raised.value)
    assert note.startswith("jaxmp: the module 'layers_1' (Half) runs under the policy")


def test_making_variables_notes_it_too_and_a_root_is_told_without_an_override():
    with pytest.raises(ValueError, match="must be float32 or float64, got bfloat16") as raised:
        apply_policy(Spectrum(), "mixed_bfloat16").init(rngs(), X)
    (note,) = notes(raised.value)
    assert note.startswith("jaxmp: the root (Spectrum) runs under") and "overrides" not in note


def test_other_errors_and_float32_have_no_note():
    def fails(x: jax.Array) -> jax.Array:
        raise ValueError("no float16 in it" if x.dtype == jnp.float32 else "something else")

    for policy in ("mixed_bfloat16", "float32"):
        with pytest.raises(ValueError) as raised:
            apply_policy(Spectrum(fails), policy).init(rngs(), X)
        assert not notes(raised.value)
