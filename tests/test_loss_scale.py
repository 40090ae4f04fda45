"""Loss scales against torch's recorded GradScaler, a plain model of the rule, jmp, and their own contract."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxmp.loss_scale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    as_loss_scale,
)

HUGE = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
TRACES = json.loads(Path(__file__).with_name("gradscaler_traces.json").read_text())["runs"]
ALL = [
    NoOpLossScale(),
    StaticLossScale(8.0),
    DynamicLossScale(2.0**10, 3, 7, 4, 0.5, backoff=0.25, max_loss_scale=2.0**20),
    DynamicLossScale(2.0**10, hysteresis=3, countdown=2),
    HeadroomLossScale(3, loss_scale=2.0**12, running_max=0.5, period=9, dtype="float8_e5m2"),
]
every_scale = pytest.mark.parametrize("scale", ALL, ids=lambda scale: type(scale).__name__)


@jax.jit
def follow(scale: Any, flags: jax.Array, grad_max: jax.Array) -> tuple[Any, Any]:
    """The scale after each step, and the last one; one compilation per structure and number of steps."""

    def body(scale: Any, step: Any) -> tuple[Any, Any]:
        scale = scale.adjust(*step)
        return scale, scale

    return jax.lax.scan(body, scale, (flags, grad_max))


def run(scale: Any, flags: Any, grad_max: Any = 1.0) -> Any:
    """``follow`` without the last scale, with NumPy leaves."""
    flags = jnp.asarray(flags)
    grad_max = jnp.broadcast_to(jnp.asarray(grad_max, jnp.float32), flags.shape)
    return jax.tree.map(np.asarray, follow(scale, flags, grad_max)[1])


def assert_same(a: Any, b: Any) -> None:
    """Same structure, static fields included, and the same leaves with the same dtypes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# --- the rule --------------------------------------------------------------------------------------------------------


def plain_model(flags: list[bool], scale: float, counter: int, rule: dict[str, Any]) -> list[tuple[float, int]]:
    """The rule in plain Python, on float32 numbers: scale and counter after each step."""
    with np.errstate(over="ignore"):
        result, value, left = [], np.float32(scale), rule.get("hysteresis", 1)
        for finite in flags:
            if finite:
                counter += 1
                if counter >= rule["period"]:
                    counter, left = 0, rule.get("hysteresis", 1)
                    grown = value * np.float32(rule["factor"])
                    value = grown if grown <= np.float32(rule["max_loss_scale"]) else value
            else:
                counter, left = 0, left - 1
                if left <= 0:
                    value = max(value * np.float32(rule["backoff"]), np.float32(rule["min_loss_scale"]))
            result.append((float(value), counter))
    return result


def recorded(name: str) -> tuple[dict[str, float], list[bool], list[float], list[int]]:
    trace = TRACES[name]
    flags = [finite for finite, steps in trace["pattern"] for _ in range(steps)]
    scales = [scale for scale, steps in trace["scales"] for _ in range(steps)]
    trackers = [first + i for first, steps in trace["trackers"] for i in range(steps)]
    assert len(flags) == len(scales) == len(trackers)
    return trace["start"], flags, scales, trackers


EXACT = [name for name in TRACES if name not in ("factors that float32 rounds", "backoff to nothing")]


@pytest.mark.parametrize("name", EXACT)
def test_scales_and_counters_are_those_that_torch_was_recorded_with(name: str) -> None:
    start, flags, scales, trackers = recorded(name)
    states = run(DynamicLossScale.from_torch(start), flags)
    np.testing.assert_array_equal(states.loss_scale, np.float32(scales))
    np.testing.assert_array_equal(states.counter, trackers)


@pytest.mark.parametrize("name", EXACT)
def test_the_plain_model_gives_what_torch_was_recorded_with(name: str) -> None:
    start, flags, scales, trackers = recorded(name)
    rule = {
        "period": start["growth_interval"],
        "factor": start["growth_factor"],
        "backoff": start["backoff_factor"],
        "min_loss_scale": TINY,
        "max_loss_scale": HUGE,
    }
    assert plain_model(flags, start["scale"], 0, rule) == list(zip(scales, trackers, strict=True))


def test_factors_that_float32_cannot_hold_give_torchs_scales_up_to_rounding() -> None:
    start, flags, scales, _ = recorded("factors that float32 rounds")
    states = run(DynamicLossScale.from_torch(start), flags)
    np.testing.assert_allclose(states.loss_scale, scales, rtol=1.2e-7 * len(flags))


def test_where_torchs_scale_falls_to_zero_ours_stays_normal_and_grows_again() -> None:
    start, flags, scales, _ = recorded("backoff to nothing")
    states = run(DynamicLossScale.from_torch(start), flags)
    assert scales[-1] == 0
    for ours, torchs, finite in zip(states.loss_scale, scales, flags, strict=True):
        assert finite or ours == max(torchs, TINY)
    assert states.loss_scale[-1] == TINY * 2**5


@pytest.mark.parametrize("step", [0, 17, 120])
def test_a_gradscaler_that_stopped_anywhere_is_continued(step: int) -> None:
    start, flags, scales, trackers = recorded("a short interval")
    state = {**start, "scale": scales[step], "_growth_tracker": trackers[step]}
    as_tensors = {name: np.array(value) for name, value in state.items()}  # as torch's, these convert with float()
    for given_state in (state, as_tensors):
        states = run(DynamicLossScale.from_torch(given_state), flags[step + 1 :])
        np.testing.assert_array_equal(states.loss_scale, np.float32(scales[step + 1 :]))


RULES = [
    {"period": 1, "factor": 2, "backoff": 0.5, "min_loss_scale": 1, "max_loss_scale": 2.0**24},
    {"period": 3, "factor": 2, "backoff": 0.5, "min_loss_scale": 8, "max_loss_scale": 2.0**10},
    {"period": 2, "factor": 1.5, "backoff": 0.75, "min_loss_scale": 1.25, "max_loss_scale": HUGE},
    {"period": 4, "factor": 4, "backoff": 0.125, "min_loss_scale": 1, "max_loss_scale": 1000, "hysteresis": 2},
    {"period": 2, "factor": 2, "backoff": 0.5, "min_loss_scale": 1, "max_loss_scale": 2.0**24, "hysteresis": 3},
]


@given(
    rule=st.sampled_from(RULES),
    scale=st.integers(3, 9).map(lambda n: 2.0**n),
    counter=st.integers(0, 5),
    flags=st.lists(st.booleans(), min_size=48, max_size=48),
)
def test_any_pattern_of_steps_follows_the_plain_model(
    rule: dict[str, Any], scale: float, counter: int, flags: list[bool]
) -> None:
    states = run(DynamicLossScale(scale, counter, **rule), flags)
    model = plain_model(flags, scale, counter, rule)
    assert list(zip(states.loss_scale.tolist(), states.counter.tolist(), strict=True)) == model
    assert states.loss_scale.dtype == np.float32
    assert states.counter.dtype == np.int32


def test_kerass_figures_hold() -> None:
    assert run(DynamicLossScale(400), [False] * 4).loss_scale[-1] == 25
    assert run(DynamicLossScale(2, period=2), [True] * 8).loss_scale[-1] == 32


def test_sequences_are_those_of_real_jmp_from_jmps_defaults() -> None:
    flags = np.random.default_rng(0).random(60) < 0.7
    theirs, scales = jmp.DynamicLossScale(jnp.float32(64), period=3), []
    with jax.numpy_dtype_promotion("standard"):
        for finite in flags:
            theirs = theirs.adjust(jnp.bool_(finite))
            scales.append(float(theirs.loss_scale))
    np.testing.assert_array_equal(run(DynamicLossScale(64, period=3), flags).loss_scale, scales)


def test_no_backoff_means_one_over_factor_also_after_factor_is_replaced() -> None:
    scale = dataclasses.replace(DynamicLossScale(64.0), factor=4)
    assert float(scale.adjust(False).loss_scale) == 16
    assert float(dataclasses.replace(scale, backoff=0.5).adjust(False).loss_scale) == 32


def test_a_period_lowered_below_the_counter_still_grows_at_the_next_finite_step() -> None:
    scale = dataclasses.replace(DynamicLossScale(4.0, counter=100), period=10)
    assert float(scale.adjust(True).loss_scale) == 8


def test_growth_that_would_pass_the_maximum_does_not_happen_and_the_count_starts_again() -> None:
    states = run(DynamicLossScale(600, period=2, max_loss_scale=1000), [True] * 5)
    assert states.loss_scale.tolist() == [600] * 5
    assert states.counter.tolist() == [1, 0, 1, 0, 1]


def test_growth_never_reaches_infinity_and_backoff_never_zero() -> None:
    bounds = {"min_loss_scale": 0, "max_loss_scale": HUGE}
    assert run(DynamicLossScale(2.0**100, period=1, **bounds), [True] * 60).loss_scale[-1] == 2.0**127
    assert run(DynamicLossScale(2.0**-100, period=1, **bounds), [False] * 60).loss_scale[-1] == TINY


def test_hysteresis_forgives_until_used_up_and_only_growth_refills_it() -> None:
    scale = DynamicLossScale(64.0, period=3, hysteresis=2)
    #        forgiven, backs off, backs off; two finite steps refill nothing; the third grows and refills
    flags = [False, False, False, True, True, False, True, True, True, False, True, False]
    states = run(scale, flags)
    assert states.loss_scale.tolist() == [64, 32, 16, 16, 16, 8, 8, 8, 16, 16, 16, 8]
    assert states.countdown.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 0]


def test_hysteresis_is_refilled_when_growth_is_due_even_at_the_maximum() -> None:
    states = run(DynamicLossScale(64.0, period=1, max_loss_scale=64, hysteresis=2), [False, True, False])
    assert states.loss_scale.tolist() == [64, 64, 64]


@pytest.mark.parametrize("flag", [False, np.bool_(False), np.array(False), jnp.array(False)])
def test_adjust_takes_python_numpy_and_jax_bools(flag: Any) -> None:
    assert float(DynamicLossScale(8.0).adjust(flag).loss_scale) == 4
    assert float(HeadroomLossScale(loss_scale=8.0).adjust(flag, 1.0).loss_scale) == 4


# --- scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [StaticLossScale(2.0**15), DynamicLossScale(), HeadroomLossScale()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_scale_keeps_the_dtype_and_unscale_widens_half_to_float32(scale: LossScale, dtype: str) -> None:
    tree = {"x": jnp.array([0.5, -1.5], dtype)}
    scaled = scale.scale(tree)["x"]
    back = scale.unscale({"x": scaled})["x"]
    assert scaled.dtype == dtype
    assert back.dtype == (dtype if dtype == "complex64" else "float32")
    np.testing.assert_array_equal(scaled, np.array([0.5, -1.5], dtype) * np.array(2.0**15, dtype))
    np.testing.assert_array_equal(back, [0.5, -1.5])


def test_half_leaves_are_multiplied_in_float32_by_a_scale_that_half_cannot_hold() -> None:
    assert float(StaticLossScale(2.0**20).scale(jnp.float16(2.0**-10))) == 2.0**10
    assert float(DynamicLossScale(1000.1).scale(jnp.bfloat16(1.0))) == float(jnp.bfloat16(1000.1))


def test_what_is_not_floating_passes_untouched() -> None:
    tree = {
        "int": jnp.arange(2),
        "numpy": np.arange(2),
        "bool": True,
        "count": 3,
        "name": "x",
        "none": None,
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
    }
    for scale in ALL[1:]:
        for result in (scale.scale(tree), scale.unscale(tree)):
            assert all(result[name] is tree[name] for name in tree)


def test_no_scaling_returns_the_very_same_objects() -> None:
    scale, tree = NoOpLossScale(), {"x": jnp.ones(2)}
    assert scale.loss_scale == 1
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(False) is scale


@pytest.mark.parametrize("exponent", [-126, -30, -1, 0, 15, 24, 126, 127])
def test_unscaling_by_any_power_of_two_loses_no_bit(exponent: int) -> None:
    rng = np.random.default_rng(exponent + 200)
    # True gradients that are normal, and stay normal and finite when scaled.
    lowest, highest = max(-126, -126 - exponent), min(127, 127 - exponent)
    exponents = rng.integers(lowest, highest, 200)
    grads = np.ldexp(rng.uniform(1, 2, 200).astype(np.float32), exponents)
    scaled = np.ldexp(grads, exponent)
    static = StaticLossScale(2.0**exponent)
    dynamic = DynamicLossScale(2.0**exponent, min_loss_scale=0, max_loss_scale=HUGE)
    np.testing.assert_array_equal(jax.jit(lambda scale, x: scale.unscale(x))(dynamic, scaled), grads)
    np.testing.assert_array_equal(jax.jit(static.unscale)(scaled), grads)
    np.testing.assert_array_equal(jax.jit(dynamic.unscale)(scaled), grads)  # a constant of the program here
    np.testing.assert_array_equal(dynamic.unscale(scaled), grads)


def test_every_float16_gradient_is_unscaled_exactly_subnormals_included() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    unscaled = jax.jit(DynamicLossScale(2.0**24).unscale)(halves)
    np.testing.assert_array_equal(unscaled, halves.astype(np.float32) * np.float32(2.0**-24))


def test_derivatives_pass_through_the_scaled_loss_and_not_into_the_scale() -> None:
    for scale in ALL[1:]:
        factor = float(scale.loss_scale)
        assert jax.grad(scale.scale)(3.0) == factor
        assert jax.grad(scale.unscale)(3.0) == 1 / factor

    def loss(factor: jax.Array, x: jax.Array) -> jax.Array:
        scale = dataclasses.replace(ALL[2], loss_scale=factor)
        return scale.scale(x) + scale.unscale(x)

    assert jax.grad(loss)(2.0, 3.0) == 0


# --- pytrees, transformations, copies --------------------------------------------------------------------------------


def test_leaves_are_the_scale_and_the_counter_and_a_countdown_only_with_hysteresis() -> None:
    names = {
        kind: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(scale)]
        for kind, scale in zip(["none", "static", "plain", "hysteresis", "headroom"], ALL, strict=True)
    }
    assert names == {
        "none": [],
        "static": [],
        "plain": [".loss_scale", ".counter"],
        "hysteresis": [".loss_scale", ".counter", ".countdown"],
        "headroom": [".loss_scale", ".running_max"],
    }


@every_scale
def test_the_structure_is_hashable_and_a_program_keeps_every_field(scale: LossScale) -> None:
    hash(jax.tree.structure(scale))
    assert_same(jax.jit(lambda scale: scale)(scale), scale)
    assert_same(jax.lax.scan(lambda scale, _: (scale, None), scale, None, length=2)[0], scale)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
    back = jax.vmap(lambda _, scale: scale)(jnp.arange(2), stacked)
    assert_same(jax.tree.map(lambda x: x[1], back), scale)


@every_scale
@pytest.mark.parametrize("leaf", [object(), None, True, jax.ShapeDtypeStruct((), jnp.float32), PartitionSpec(), -1.0])
def test_trees_may_be_rebuilt_with_anything_as_leaves(scale: LossScale, leaf: Any) -> None:
    leaves, structure = jax.tree.flatten(scale)
    rebuilt = jax.tree.unflatten(structure, [leaf] * len(leaves))
    assert structure.flatten_up_to(rebuilt) == [leaf] * len(leaves)
    assert_same(jax.tree.unflatten(structure, leaves), scale)


@every_scale
def test_copies_of_every_kind_are_equal(scale: LossScale) -> None:
    for clone in (
        copy.copy(scale),
        copy.deepcopy(scale),
        pickle.loads(pickle.dumps(scale)),
        dataclasses.replace(scale),
        flax.serialization.from_state_dict(scale, flax.serialization.to_state_dict(scale)),
        flax.serialization.from_bytes(scale, flax.serialization.to_bytes(scale)),
    ):
        assert_same(clone, scale)


@every_scale
def test_restoring_brings_back_every_field_whatever_the_target_has(scale: LossScale) -> None:
    target = StaticLossScale(1.0) if isinstance(scale, StaticLossScale) else type(scale)()
    assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(scale)), scale)
    batched = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
    assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(batched)), batched)


def test_restoring_the_state_of_another_loss_scale_says_so() -> None:
    state = flax.serialization.to_state_dict(StaticLossScale(2.0))
    with pytest.raises(ValueError, match=r"the state of a DynamicLossScale has the entries \['backoff'.*restore it"):
        flax.serialization.from_state_dict(DynamicLossScale(), state)


def test_flax_is_not_imported_yet_serializes_when_imported_last() -> None:
    program = """
import sys
from jaxmp.loss_scale import DynamicLossScale
scale = DynamicLossScale(8.0, counter=3, period=5)
assert "flax" not in sys.modules, "jaxmp.loss_scale imports flax"
import flax.serialization
assert not any(type(finder).__module__.startswith("jaxmp") for finder in sys.meta_path), "the hook stays"
assert type(flax.serialization.__spec__.loader).__name__ == "SourceFileLoader"
back = flax.serialization.from_bytes(DynamicLossScale(), flax.serialization.to_bytes(scale))
assert (float(back.loss_scale), int(back.counter), back.period) == (8.0, 3, 5)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_replace_validates() -> None:
    with pytest.raises(ValueError, match="factor must be a finite number above 1"):
        dataclasses.replace(DynamicLossScale(), factor=0.5)
    assert dataclasses.replace(DynamicLossScale(), hysteresis=2).countdown == 2
    assert dataclasses.replace(DynamicLossScale(hysteresis=2), hysteresis=1).countdown is None


def test_members_of_a_population_have_their_own_scale() -> None:
    flags = jnp.array([True, False, True])
    shared = jax.vmap(DynamicLossScale(8.0, period=1).adjust)(flags)
    assert shared.loss_scale.tolist() == [16, 4, 16]
    own = jax.vmap(lambda scale, flag: scale.adjust(flag))(shared, ~flags)
    assert own.loss_scale.tolist() == [8, 8, 8]
    headroom = jax.vmap(lambda flag, largest: HeadroomLossScale().adjust(flag, largest))(flags, jnp.ones(3))
    assert headroom.loss_scale.tolist() == [2048, 2.0**14, 2048]


@every_scale
def test_a_step_neither_branches_nor_calls_the_host(scale: LossScale) -> None:
    program = str(
        jax.make_jaxpr(lambda scale, finite, x: (scale.adjust(finite, x), scale.unscale(x)))(scale, True, 1.0)
    )
    assert not any(word in program for word in ("cond", "while", "callback"))


@every_scale
def test_a_changing_scale_is_traced_once(scale: LossScale) -> None:
    traces = 0

    @jax.jit
    def step(scale: LossScale, finite: jax.Array, x: jax.Array) -> tuple[LossScale, jax.Array]:
        nonlocal traces
        traces += 1
        return scale.adjust(finite, jnp.float32(1)), scale.unscale(scale.scale(x))

    for i in range(6):
        scale, _ = step(scale, jnp.array(i % 3 == 0), jnp.ones(2))
    assert traces == 1


@every_scale
def test_donating_a_scale_works(scale: LossScale) -> None:
    scale = jax.tree.map(jnp.array, scale)
    step = jax.jit(lambda scale: scale.adjust(True, 1.0), donate_argnums=0)
    for _ in range(2):
        scale = step(scale)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(scale))


def test_a_scale_can_be_made_from_traced_and_abstract_leaves() -> None:
    made = jax.jit(lambda x: DynamicLossScale(x * 2, counter=jnp.int32(1)))(jnp.float16(16))
    assert_same(made, DynamicLossScale(32.0, counter=1))
    abstract = jax.ShapeDtypeStruct((), jnp.float32)
    assert DynamicLossScale(abstract).loss_scale is abstract
    assert jax.eval_shape(DynamicLossScale).counter.dtype == jnp.int32


# --- headroom --------------------------------------------------------------------------------------------------------


def largest_fitting(grad_max: float, headroom: float, largest: float = 65504.0) -> float:
    return 2.0 ** math.floor(math.log2(largest / 2**headroom / grad_max))


@given(
    headroom=st.sampled_from([0, 4]),
    magnitudes=st.lists(st.floats(-30, 10), min_size=40, max_size=40),
    flags=st.lists(st.sampled_from([True] * 9 + [False]), min_size=40, max_size=40),
)
def test_headroom_is_kept_within_bounds_by_powers_of_two(
    headroom: int, magnitudes: list[float], flags: list[bool]
) -> None:
    grad_max = np.exp2(np.float32(magnitudes))
    start = HeadroomLossScale(headroom, min_loss_scale=2.0**-4)
    states = run(start, flags, np.where(flags, grad_max, np.inf))
    before = np.append(np.float32(start.loss_scale), states.loss_scale[:-1])
    for old, new, running, largest, finite in zip(
        before, states.loss_scale, states.running_max, grad_max, flags, strict=True
    ):
        assert np.frexp(new)[0] == 0.5
        assert 2.0**-4 <= new <= min(2.0**24, 2 * old)
        if finite:
            assert largest <= running
            assert new == 2.0**-4 or new * largest <= 65504 / 2**headroom
        else:
            assert new == max(old / 2, 2.0**-4)


def test_headroom_settles_on_the_largest_power_of_two_that_fits_and_never_overflows() -> None:
    rng = np.random.default_rng(0)
    grad_max = np.exp2(rng.normal(-12, 0.7, 400)).astype(np.float32)  # spread over some four binary orders
    states = run(HeadroomLossScale(period=100), np.ones(400, bool), grad_max)
    used = np.append(np.float32(2.0**15), states.loss_scale[:-1])
    assert (used * grad_max < 65504).all()
    assert states.loss_scale[4] == 2.0**20  # from 2**15, one binary order a step
    assert np.log2(states.loss_scale[50:]).std() < 1


def test_headroom_for_a_steady_gradient_is_what_arithmetic_says() -> None:
    for grad_max in (1e-3, 0.7, 3.0):
        states = run(HeadroomLossScale(headroom=2), [True] * 20, grad_max)
        assert states.loss_scale[-1] == largest_fitting(grad_max, 2)


def test_headroom_drops_at_once_and_returns_after_the_running_maximum_decayed() -> None:
    grad_max = np.array([1.0] * 3 + [64.0] + [1.0] * 100, np.float32)
    scales = run(HeadroomLossScale(period=10), [True] * 104, grad_max).loss_scale
    assert scales[2] == 2048
    assert scales[3] == 32
    assert np.argmax(scales[3:] >= 2048) == pytest.approx(50, abs=1)  # five binary orders, so that 2 * 2048 < 4094


def test_a_non_finite_step_backs_headroom_off_for_a_period_though_gradients_look_small() -> None:
    flags = [True] * 3 + [False] + [True] * 30
    scales = run(HeadroomLossScale(period=10), flags, np.where(flags, 1e-3, np.nan)).loss_scale
    assert scales[2] == 2.0**18
    np.testing.assert_array_equal(scales[3:13], 2.0**17)
    np.testing.assert_array_equal(scales[15:22], 2.0**18)


@pytest.mark.parametrize("running_max", [0.0, 0.25])
def test_gradients_that_are_all_zero_or_unknown_change_nothing_while_finite(running_max: float) -> None:
    scale = HeadroomLossScale(loss_scale=2.0**9, running_max=running_max)
    for grad_max in (0.0, math.nan, math.inf):
        assert_same(scale.adjust(True, grad_max), scale)


def test_non_finite_steps_at_the_minimum_leave_a_usable_scale() -> None:
    scale = HeadroomLossScale(loss_scale=2.0, min_loss_scale=1.0)
    states = run(scale, [False] * 5 + [True] * 5, [math.nan] * 5 + [1e-6] * 5)
    assert states.loss_scale.tolist() == [1] * 10
    assert np.isfinite(states.running_max).all()


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("float8_e5m2", 57344.0), (jnp.float16, 65504.0)])
def test_headroom_counts_from_the_largest_number_of_the_dtype(dtype: Any, largest: float) -> None:
    scale = HeadroomLossScale(0, dtype=dtype, loss_scale=2.0**20).adjust(True, 1.0)
    assert float(scale.loss_scale) == largest_fitting(1.0, 0, largest)


def test_only_headroom_needs_the_largest_gradient_and_says_so() -> None:
    assert [scale.needs_grad_max for scale in ALL] == [False, False, False, False, True]
    with pytest.raises(ValueError, match=r"HeadroomLossScale needs grad_max.*got None: call adjust"):
        HeadroomLossScale().adjust(True)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e-40, 1e39, "big", None, object(), jnp.zeros(())]
)
def test_a_scale_must_be_positive_and_finite(scale: Any) -> None:
    for make in (StaticLossScale, DynamicLossScale, lambda x: HeadroomLossScale(loss_scale=x)):
        with pytest.raises(ValueError, match=r"loss_scale must be positive and finite.*, got .*: 2\*\*15 is a usual"):
            make(scale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1}, "factor must be a finite number above 1, got 1: growth multiplies by it"),
        ({"factor": math.nan}, "factor must be a finite number above 1, got nan"),
        ({"factor": math.inf}, "factor must be a finite number above 1, got inf"),
        ({"backoff": 0}, "backoff must be between 0 and 1, both excluded, got 0: None stands for 1/factor"),
        ({"backoff": 1.0}, "backoff must be between 0 and 1, both excluded, got 1.0"),
        ({"period": 0}, "period must be a whole number of steps, from 1 to .*, got 0: 2000 is usual"),
        ({"period": 2.5}, "period must be a whole number"),
        ({"period": 2**31}, "period must be a whole number"),
        ({"hysteresis": 0}, "hysteresis must be a whole number .*, got 0: 1 backs off at every"),
        ({"counter": -1}, "counter must be a whole number of steps, 0 or more, got -1: a new scale starts at 0"),
        ({"countdown": -1, "hysteresis": 2}, "countdown must be a whole number"),
        ({"min_loss_scale": -1}, "min_loss_scale must be finite in float32 and not negative, got -1: 1 is usual"),
        ({"max_loss_scale": math.inf}, "max_loss_scale must be positive and finite in float32, got inf"),
        (
            {"min_loss_scale": 8, "max_loss_scale": 4},
            "min_loss_scale must not be above max_loss_scale, got 8.0 and 4",
        ),
        ({"loss_scale": 0.5}, "loss_scale must lie between .*, got 0.5 outside of 1.0 to 16777216.0: start within"),
        ({"loss_scale": 2.0**30}, "loss_scale must lie between"),
    ],
)
def test_bad_parameters_of_the_dynamic_scale_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"headroom": -1}, "headroom must be from 0 to 128 binary orders, got -1: 4 keeps a factor of 16 free"),
        ({"running_max": math.nan}, "running_max must be finite in float32 and not negative, got nan"),
        ({"loss_scale": 1000.0}, "loss_scale must be a power of two, got 1000.0: HeadroomLossScale has no other"),
        ({"min_loss_scale": 3}, "min_loss_scale must be a power of two, got 3.0"),
        ({"max_loss_scale": 65504.0}, "max_loss_scale must be a power of two"),
        ({"dtype": "flaot16"}, "unknown dtype 'flaot16'.*float16"),
    ],
)
def test_bad_parameters_of_the_headroom_scale_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadroomLossScale(**arguments)


def test_static_numbers_cannot_be_tracers() -> None:
    with pytest.raises(ValueError, match=r"loss_scale must be positive and finite.*got .*Tracer"):
        jax.jit(lambda x: StaticLossScale(x).scale(1.0))(2.0)
    with pytest.raises(ValueError, match=r"factor must be a finite number above 1, got .*Tracer"):
        jax.jit(lambda x: DynamicLossScale(factor=x))(2.0)


@pytest.mark.parametrize("flag", [jnp.array([True]), jnp.float32(1), 1])
def test_the_flag_must_be_a_boolean_scalar(flag: Any) -> None:
    for adjust in (DynamicLossScale().adjust, lambda flag: HeadroomLossScale().adjust(flag, 1.0)):
        with pytest.raises(ValueError, match=r"grads_finite must be a boolean scalar, got \w+ of shape .*all_finite"):
            adjust(flag)


def test_a_gradscaler_state_that_lacks_entries_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without growth_factor, backoff_factor: read an enabled scaler's"):
        DynamicLossScale.from_torch({"scale": 1.0, "_growth_tracker": 0, "growth_interval": 1})
    with pytest.raises(ValueError, match=r"a disabled one's is empty; NoOpLossScale\(\)"):
        DynamicLossScale.from_torch({})


def test_a_dead_gradscaler_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_scale must be positive and finite"):
        DynamicLossScale.from_torch({**TRACES["backoff to nothing"]["start"], "scale": 0.0})


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_an_integer_array_becomes_float32_with_jmps_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=f"Expected floating type for {name}, got int32: it becomes float32") as seen:
        scale = DynamicLossScale(**{name: jnp.int32(2)})
    assert seen[0].filename == __file__
    assert scale.loss_scale.dtype == jnp.float32
    assert float(getattr(scale, name)) == 2


def test_python_numbers_and_half_arrays_become_float32_without_a_warning() -> None:
    for scale in (2**15, 2.0**15, np.float64(2**15), jnp.float16(2**15), np.float32(2**15), True):
        made = DynamicLossScale(scale)
        assert made.loss_scale.dtype == jnp.float32
        assert not made.loss_scale.weak_type
        assert_same(made.adjust(True), dataclasses.replace(made, counter=1))


# --- jmp's objects ---------------------------------------------------------------------------------------------------


def test_jmps_loss_scales_are_read() -> None:
    assert as_loss_scale(jmp.NoOpLossScale()) == NoOpLossScale()
    assert as_loss_scale(jmp.StaticLossScale(jnp.float32(8))) == StaticLossScale(8.0)
    theirs = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(2), 5, 4, np.float32(0.5))
    assert_same(as_loss_scale(theirs), DynamicLossScale(8.0, 2, 5, 4, 0.5, max_loss_scale=HUGE))


def test_a_loss_scale_is_returned_as_it_is_and_anything_else_refused() -> None:
    for scale in ALL:
        assert as_loss_scale(scale) is scale
        assert isinstance(scale, LossScale)
    with pytest.raises(TypeError, match=r"a loss scale must be one of jaxmp's or jmp's, got 32768\.0: pass Dynamic"):
        as_loss_scale(2.0**15)
