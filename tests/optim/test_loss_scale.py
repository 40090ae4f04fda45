"""Loss scales grow and back off like those of torch, Keras and jmp."""

from __future__ import annotations

import dataclasses
from typing import Any

import concrete
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loss_scale_tools import HUGE, TINY, TRACES, run

from jaxmp.optim.loss_scale import DynamicLossScale, HeadroomLossScale

pytestmark = pytest.mark.once


def plain_model(flags: list[bool], scale: float, counter: int, rule: dict[str, Any]) -> list[tuple[float, int]]:
    """Return the scale and counter after each step, in plain Python."""
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


def test_scales_and_counters_are_those_recorded_from_torch() -> None:
    for name in EXACT:
        start, flags, scales, trackers = recorded(name)
        states = run(DynamicLossScale.from_torch(start), flags)
        np.testing.assert_array_equal(states.loss_scale, np.float32(scales), name)
        np.testing.assert_array_equal(states.counter, trackers, name)


def test_factors_that_float32_cannot_hold_give_torchs_scales_up_to_rounding() -> None:
    start, flags, scales, _ = recorded("factors that float32 rounds")
    states = run(DynamicLossScale.from_torch(start), flags)
    np.testing.assert_allclose(states.loss_scale, scales, rtol=1.2e-7 * len(flags))


def test_the_scale_stays_normal_and_grows_again_although_torchs_falls_to_zero() -> None:
    start, flags, scales, _ = recorded("backoff to nothing")
    states = run(DynamicLossScale.from_torch(start), flags)
    assert scales[-1] == 0
    for ours, torchs, finite in zip(states.loss_scale, scales, flags, strict=True):
        assert finite or ours == max(torchs, TINY)
    assert states.loss_scale[-1] == TINY * 2**5


def test_a_gradscaler_can_be_continued_from_any_step() -> None:
    step = 17
    start, flags, scales, trackers = recorded("a short interval")
    state = {**start, "scale": scales[step], "_growth_tracker": trackers[step]}
    as_tensors = {name: np.array(value) for name, value in state.items()}  # float() reads them, like tensors
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


def test_scales_are_those_of_the_tests_of_keras() -> None:
    assert run(DynamicLossScale(400), [False] * 4).loss_scale[-1] == 25
    assert run(DynamicLossScale(2, period=2), [True] * 8).loss_scale[-1] == 32


def test_no_backoff_means_one_over_factor_also_after_factor_is_replaced() -> None:
    scale = dataclasses.replace(DynamicLossScale(64.0), factor=4)
    assert float(scale.adjust(False).loss_scale) == 16
    assert float(dataclasses.replace(scale, backoff=0.5).adjust(False).loss_scale) == 32


def test_hysteresis_forgives_until_used_up_and_only_growth_refills_it() -> None:
    scale = DynamicLossScale(64.0, period=3, hysteresis=2)
    # The first bad step is forgiven, the next two back off. Only the third finite step in a row grows and refills.
    flags = [False, False, False, True, True, False, True, True, True, False, True, False]
    states = run(scale, flags)
    assert states.loss_scale.tolist() == [64, 32, 16, 16, 16, 8, 8, 8, 16, 16, 16, 8]
    assert states.countdown.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 0]


def test_adjust_takes_python_numpy_and_jax_bools() -> None:
    for flag in (False, np.bool_(False), np.array(False), concrete.array(False)):
        assert float(DynamicLossScale(8.0).adjust(flag).loss_scale) == 4
        assert float(HeadroomLossScale(loss_scale=8.0).adjust(flag, 1.0).loss_scale) == 4
