"""jaxmp.jmp has jmp's names and numbers, and mends jmp's defects."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import concrete
import flax.serialization
import jax
import jax.numpy as jnp
import jmp as real
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jmp._src import policy as jmp_policy

import jaxmp
from jaxmp import jmp
from jaxmp.optim.loss_scale import as_loss_scale

pytestmark = pytest.mark.once

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
TINY = float(np.finfo(np.float32).tiny)
TRUE, FALSE = jnp.bool_(True), jnp.bool_(False)


@pytest.fixture
def jmps_promotion():
    """Allow dtype promotion, because jmp multiplies arrays of different dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def dtypes(policy: Any) -> tuple[np.dtype, ...]:
    return tuple(np.dtype(x) for x in (policy.param_dtype, policy.compute_dtype, policy.output_dtype))


# --- the surface ------------------------------------------------------------------------------------------------------


def test_every_public_name_of_jmp_is_there_and_its_classes_are_jaxmps():
    public = {name for name in dir(real) if not name.startswith("_")}
    assert public == set(real.__all__)
    assert set(jmp.__all__) == public | {"dtype_to_names"}
    assert all(hasattr(jmp, name) for name in jmp.__all__)
    assert jmp.__version__ == real.__version__

    assert issubclass(jmp.Policy, jaxmp.Policy)
    for name in ("NoOpLossScale", "StaticLossScale", "DynamicLossScale"):
        assert issubclass(getattr(jmp, name), getattr(jaxmp, name))
    for scale in (jmp.NoOpLossScale(), jmp.StaticLossScale(2), jmp.DynamicLossScale(2.0)):
        assert isinstance(scale, jmp.LossScale)
        assert as_loss_scale(scale) is scale


# --- policies ---------------------------------------------------------------------------------------------------------

TEXTS = [
    *("half", "full", "f16", "bf16", "f32", "f64", "float16", "float32", "bfloat16", "float64"),
    *("c=f16", "p=f16,c=f32", "p=bf16,o=full", "c=half,o=full", "o=f64,c=bf16"),
    "params=float32,compute=float16,output=float32",
]


def test_a_string_means_what_it_means_to_jmp_and_is_written_as_jmp_writes_it():
    for text in TEXTS:
        ours, theirs = jmp.get_policy(text), real.get_policy(text)
        assert str(ours) == str(theirs) and type(ours) is jmp.Policy
        assert ours.matmul_precision is None  # jaxmp.get_policy sets a precision for float32, jmp does not
        reads = (
            jmp.get_policy(str(ours)),
            jaxmp.get_policy(str(ours)),
            real.get_policy(str(ours)),
            jaxmp.get_policy(ours),
        )
        for policy in (ours, *reads):
            assert dtypes(policy) == dtypes(theirs)


def test_text_that_jmp_cannot_read_is_refused_with_the_forms_that_can_be_read():
    for text, phrase in (
        ("mixed_float16", "Unknown dtype 'mixed_float16'"),
        ("", "Unknown dtype ''"),
        ("c=f17", "Unknown dtype 'f17'"),
        ("z=f16", "Unknown key 'z'"),
    ):
        with pytest.raises(ValueError, match=phrase):
            real.get_policy(text)
        with pytest.raises(ValueError, match=f"{phrase}.*known (names|keys), nearest first: "):
            jmp.get_policy(text)
    with pytest.raises(ValueError, match=r"A policy of jmp has no rules, got 'c=f16; a -> f32'; use jaxmp\.get_policy"):
        jmp.get_policy("c=f16; a -> f32")


def test_a_policy_equals_any_with_the_same_dtypes_and_keeps_its_type():
    ours, theirs = jmp.get_policy("c=f16,o=full"), jaxmp.get_policy("mixed_float16")
    assert ours == theirs and theirs == ours and hash(ours) == hash(theirs)
    assert ours != jmp.get_policy("c=f16") and ours != "c=f16,o=full"
    assert ours != dataclasses.replace(ours, matmul_precision="highest")
    assert str(dataclasses.replace(ours, matmul_precision="high")) == "p=full,c=f16,o=full,m=high"
    for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), dataclasses.replace(ours)):
        assert other == ours and type(other) is jmp.Policy
    assert str(ours.with_output_dtype(jnp.bfloat16)) == "p=full,c=f16,o=bf16"
    assert ours.compute_dtype == jnp.float16 == ours.compute_dtype


def test_names_of_dtypes_are_found_by_a_policys_dtype_and_by_what_people_write():
    for dtype, names in jmp_policy.dtype_to_names.items():
        assert jmp.dtype_to_names[dtype] == jmp.dtype_to_names[np.dtype(dtype)] == names


# --- loss scales: what they share with jmp's --------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    flags=st.lists(st.booleans(), min_size=48, max_size=48),
    rule=st.sampled_from([(1, 2), (3, 2), (5, 4)]),
    start=st.sampled_from([1.0, 2.0**15, 2.0**125]),
)
def test_scales_and_counters_are_those_of_jmp(flags, rule, start):
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = (
            follow(module.DynamicLossScale(jnp.float32(start), jnp.int32(0), *rule), jnp.array(flags))
            for module in (jmp, real)
        )
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])


@jax.jit
def follow(scale: Any, flags: jax.Array) -> Any:
    def body(scale, finite):
        scale = scale.adjust(finite)
        return scale, (scale.loss_scale, scale.counter)

    return jax.lax.scan(body, scale, flags)[1]


def training(module: Any, policy: str, scale: Any, steps: int = 12) -> Any:
    """Train as jmp's users do; every fifth input overflows float16."""
    policy = module.get_policy(policy)

    @jax.jit
    def step(params, scale, x):
        def loss_fn(params):
            half, inputs = policy.cast_to_compute((params, x))
            out = policy.cast_to_output(jnp.tanh(inputs @ half["w"]) @ half["v"])
            return scale.scale(jnp.mean(out**2))

        grads = scale.unscale(jax.grad(loss_fn)(policy.cast_to_param(params)))
        finite = module.all_finite(grads)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return module.select_tree(finite, new, params), scale.adjust(finite)

    rng = np.random.default_rng(0)
    params = {"w": jnp.float32(rng.normal(size=(4, 8))), "v": jnp.float32(rng.normal(size=(8, 1)))}
    params = policy.cast_to_param(params)
    for i in range(steps):
        x = jnp.float32(rng.normal(size=(16, 4)) * (1e6 if i % 5 == 4 else 1))
        params, scale = step(params, scale, x)
    return params, scale


@pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])
def test_a_step_written_for_jmp_gives_the_same_bits(kind, jmps_promotion):
    arguments = {"StaticLossScale": (2.0**10,), "DynamicLossScale": (jnp.float32(2.0**16), 0, 3)}
    (ours, scale), (theirs, their_scale) = (
        training(module, "c=f16,o=f32", getattr(module, kind)(*arguments[kind])) for module in (jmp, real)
    )
    for name, param in theirs.items():
        assert ours[name].dtype == param.dtype == F32
        np.testing.assert_array_equal(ours[name], param)
    assert scale.loss_scale == their_scale.loss_scale
    assert kind != "DynamicLossScale" or scale.loss_scale != 2.0**16


def test_loss_scales_are_kept_whole():
    for scale in (jmp.StaticLossScale(3), jmp.DynamicLossScale(2.0**70, 3, 7, 4, 0.5)):
        for copied in (
            pickle.loads(pickle.dumps(scale)),
            copy.deepcopy(scale),
            dataclasses.replace(scale),
            flax.serialization.from_state_dict(scale, flax.serialization.to_state_dict(scale)),
            jax.jit(lambda scale: scale)(scale),
        ):
            assert copied == scale and type(copied) is type(scale)
            assert jax.tree.structure(copied) == jax.tree.structure(scale)


def test_selection_asks_for_a_boolean_scalar_and_says_what_came():
    for pred, got in ((concrete.ones(1, bool), r"bool of shape \(1,\)"), (jnp.float32(1), r"float32 of shape \(\)")):
        with pytest.raises(AssertionError, match=f"expected boolean scalar, got {got}: pass the result of all_finite"):
            jmp.select_tree(pred, None, None)


# --- jmp's defects ----------------------------------------------------------------------------------------------------


def through_jit(scale: Any) -> Any:
    return jax.jit(lambda scale: scale)(scale)


def test_the_minimum_scale_survives_jit_where_jmp_drops_it():
    theirs, ours = (
        through_jit(module.DynamicLossScale(jnp.float32(8), min_loss_scale=np.float32(4))) for module in (real, jmp)
    )
    assert theirs.min_loss_scale == 1
    assert ours.min_loss_scale == 4
    flags = concrete.zeros(5, bool)
    assert follow(ours, flags)[0].tolist() == [4] * 5


def test_a_scale_made_as_in_jmps_readme_can_be_adjusted_where_jmp_raises(jmps_promotion):
    theirs, ours = (
        module.DynamicLossScale(jnp.asarray(2.0**15, dtype=module.half_dtype()), period=1) for module in (real, jmp)
    )
    with pytest.raises(TypeError, match="same dtypes"):
        theirs.adjust(TRUE)
    assert ours.adjust(FALSE).loss_scale == 2.0**14
    assert ours.adjust(TRUE).loss_scale == 2.0**16  # more than float16 holds
    assert ours.adjust(TRUE).loss_scale.dtype == F32


def test_half_losses_and_gradients_are_scaled_into_float32_where_jmp_overflows_and_underflows(jmps_promotion):
    for kind in ("StaticLossScale", "DynamicLossScale"):
        grad, loss = jnp.float16(2.0**-12), jnp.float16(3)
        theirs, ours = (getattr(module, kind)(jnp.float16(2.0**15)) for module in (real, jmp))
        assert theirs.unscale(grad) == 0 and theirs.unscale(grad).dtype == F16
        assert ours.unscale(grad) == 2.0**-27 and ours.unscale(grad).dtype == F32
        assert theirs.scale(loss) == jnp.inf
        assert ours.scale(loss) == 3 * 2.0**15 and ours.scale(loss).dtype == F32
        gradient = jax.grad(ours.scale)(loss)
        assert gradient == 2.0**15 and gradient.dtype == F16


def test_a_period_lowered_below_the_counter_grows_at_once_where_jmp_counts_anew(jmps_promotion):
    theirs, ours = (module.DynamicLossScale(jnp.float32(8), jnp.int32(10), period=20) for module in (real, jmp))
    theirs, ours = (dataclasses.replace(scale, period=5).adjust(TRUE) for scale in (theirs, ours))
    assert (theirs.loss_scale, theirs.counter) == (8, 1)
    assert (ours.loss_scale, ours.counter) == (16, 0)


def test_growth_stops_where_float32_ends_and_unscaling_gives_nan_where_jmp_flushes_to_zero(jmps_promotion):
    theirs, ours = (module.DynamicLossScale(jnp.float32(2.0**126), period=1) for module in (real, jmp))
    for _ in range(3):
        theirs, ours = theirs.adjust(TRUE), ours.adjust(TRUE)
        assert theirs.loss_scale == ours.loss_scale == 2.0**127
    assert theirs.unscale(jnp.float32(2.0**127)) == 0
    assert jnp.isnan(ours.unscale(jnp.float32(2.0**127)))


def test_a_minimum_of_zero_leaves_a_usable_scale_where_jmp_reaches_zero(jmps_promotion):
    theirs, ours = (module.DynamicLossScale(jnp.float32(1), min_loss_scale=np.float32(0)) for module in (real, jmp))
    for _ in range(160):
        theirs, ours = theirs.adjust(FALSE), ours.adjust(FALSE)
    assert theirs.loss_scale == 0
    assert not np.isfinite(theirs.unscale(theirs.scale(jnp.float32(1))))
    assert ours.loss_scale == TINY
    assert ours.unscale(ours.scale(jnp.float32(1))) == 1


def test_a_scale_below_its_minimum_is_refused_where_jmp_grows_it_at_an_overflow(jmps_promotion):
    assert real.DynamicLossScale(jnp.float32(0.25)).adjust(FALSE).loss_scale == 1
    with pytest.raises(ValueError, match=r"loss_scale must lie between min_loss_scale and max_loss_scale, got 0\.25"):
        jmp.DynamicLossScale(jnp.float32(0.25))


def test_keys_and_integers_pass_through_a_scale_where_jmp_raises_or_makes_them_floating(jmps_promotion):
    tree = {"key": jax.random.key(0), "n": jnp.int32(3)}
    assert real.DynamicLossScale(jnp.float32(8)).scale(tree["n"]).dtype == F32
    with pytest.raises(TypeError, match="key"):
        real.DynamicLossScale(jnp.float32(8)).scale(tree["key"])
    scaled = jmp.DynamicLossScale(jnp.float32(8)).scale(tree)
    assert scaled["key"] is tree["key"] and scaled["n"] is tree["n"]


def test_a_static_scale_of_zero_can_be_made_but_not_used():
    for zero in (0, np.float32(0), jnp.float32(0)):
        scale = jmp.StaticLossScale(zero)
        assert not jax.tree.leaves(scale)
        for use in (scale.scale, scale.unscale, jax.jit(scale.scale), as_loss_scale(scale).scale):
            with pytest.raises(ValueError, match=r"loss_scale must be positive and finite.*, got 0"):
                use(concrete.ones(2))
    with pytest.raises(ValueError, match="loss_scale must be positive and finite"):
        as_loss_scale(real.StaticLossScale(0))


def test_a_scale_that_is_not_positive_and_finite_is_refused():
    for bad in (-1, np.inf, np.nan, None, "big", np.zeros(2)):
        with pytest.raises(ValueError, match="loss_scale must be positive and finite"):
            jmp.StaticLossScale(bad)
    with pytest.raises(ValueError, match=r"loss_scale must be positive and finite.*got .*Tracer"):
        jax.jit(lambda x: jmp.StaticLossScale(x).scale(x))(2.0)


def test_integer_arrays_are_warned_about_at_the_callers_line():
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale, got int32") as caught:
        jmp.DynamicLossScale(jnp.int32(2))
    assert caught[0].filename == __file__
