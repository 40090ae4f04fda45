"""What loss scales refuse, and in which words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_scale_tools import TRACES, assert_same

from jaxmp import loss_scaling
from jaxmp.loss_scale import (
    DynamicLossScale,
    HeadroomLossScale,
    StaticLossScale,
)

pytestmark = pytest.mark.once


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


def test_the_state_of_a_disabled_gradscaler_has_no_entries() -> None:
    with pytest.raises(KeyError):
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


def test_an_argument_that_there_is_not_is_pythons_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'init_scale'"):
        DynamicLossScale(init_scale=2.0)


@pytest.mark.parametrize("counter", [[1], np.array([1, 2])])
def test_what_a_loss_scale_counts_is_a_scalar(counter: Any) -> None:
    with pytest.raises(ValueError, match=r"counter of a loss scale is a scalar, got the shape \(\d,\)"):
        loss_scaling(optax.sgd(0.1), DynamicLossScale(counter=counter))
