"""tune finds planted operations and keeps most FLOPs in half."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.inspect import tune
from jaxmp.inspect._tune.candidates import Candidate, modules_of, overrides_of
from jaxmp.inspect._tune.measurement import Measurement
from jaxmp.policy.policy_map import get_policy

pytestmark = pytest.mark.slow("searches a model for each plant; test_tune.py has one plant")

X = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")


def layer(x, w):
    return jnp.tanh(x @ w)


# -- the plants: sums and products in half, between matrix products. Differences are written as sums, so that no rule of
# autocast applies.


def residual_flow(x, w):
    for _ in range(8):
        x = x + 0.002 * jnp.tanh(x @ w)
    return x


def growth_by_factors_near_one(x, w):
    y = z = layer(x, w)
    for _ in range(4):
        z = z * (1 + 0.002 * jnp.tanh(z))
    return x + 100 * (z + -y)


def variance_by_moments(x, w):
    parts = jnp.split(layer(x, w) + 4, 4, axis=1)
    total = parts[0] + parts[1] + parts[2] + parts[3]
    squares = parts[0] * parts[0] + parts[1] * parts[1] + parts[2] * parts[2] + parts[3] * parts[3]
    return jnp.tile(squares / 4 + -(total * total / 16), 4)


def cumulative_sum(x, w):
    y = layer(x, w) + 8
    total, sums = y[:, 0], []
    for n in range(1, 17):
        sums.append(total + -8.0 * n)
        total = total + y[:, n % 16]
    return jnp.stack(sums, 1)


def inverse_by_determinants(x, w):
    a, b, c, d = jnp.split(0.02 * layer(x, w), 4, axis=1)
    a, b, c, d = 1 + a, 0.95 + b, 0.95 + c, 1 + d
    one_over = 0.1 / (a * d + -(b * c))
    return jnp.concatenate([a * one_over, -b * one_over, -c * one_over, d * one_over], 1)


# Each plant is tested in one half dtype, because their rounding errors differ only in size.
PLANTS = (
    (residual_flow, "mixed_float16"),
    (growth_by_factors_near_one, "mixed_bfloat16"),
    (variance_by_moments, "mixed_float16"),
    (cumulative_sum, "mixed_float16"),
    (inverse_by_determinants, "mixed_bfloat16"),
)


def _loss(*layers):
    """Return a loss of layers in scopes."""

    def loss_fn(params, x):
        for n, fun in enumerate(layers):
            with jax.named_scope(f"layer_{n}"):
                x = fun(x, params[n])
        return jnp.mean(x**2)

    return loss_fn


def _params(count):
    return [*np.random.default_rng(1).normal(size=(count, 16, 16)).astype("float32") / 4]


@pytest.mark.parametrize(("plant", "half"), PLANTS)
def test_the_planted_operations_are_found(plant, half):
    tuned = tune(_loss(layer, plant, layer), half)(_params(3), X)
    operations = [row.path for row in tuned.rows if row.path.startswith("layer_1:")]
    planted = set(tuned.overrides).intersection(operations)
    assert planted and len(tuned.overrides) <= 3
    assert len(planted) == len(tuned.overrides) or plant is growth_by_factors_near_one  # which reads a rounded tanh
    assert tuned.met and tuned.error_before > tuned.tolerance and tuned.half_flops == 1
    assert tuned.evaluations <= 4


def test_without_a_plant_nothing_is_found():
    tuned = tune(_loss(layer, layer, layer), "mixed_float16")(_params(3), X)
    assert tuned.overrides == {} and tuned.met and tuned.half_flops == 1
    assert "Nothing needs float32" in str(tuned)


def test_no_choice_of_as_few_modules_has_much_more_in_half():
    half, layers = "mixed_float16", (layer, growth_by_factors_near_one, layer)
    loss_fn, args = _loss(*layers), (_params(3), X)
    module_tuned, operation_tuned = tune(loss_fn, half, operations=False)(*args), tune(loss_fn, half)(*args)
    policy = get_policy(half)
    measurement = Measurement(loss_fn, [args], policy, module_tuned.loss_scale or 1.0)
    modules = modules_of(loss_fn, args, policy)
    candidates = list(map(Candidate, modules))
    best = 0.0
    count_in_float32 = sum(row.is_float32 for row in module_tuned.rows)
    choices = itertools.chain(*(itertools.combinations(candidates, count) for count in range(count_in_float32 + 1)))
    for chosen in choices:
        overrides = overrides_of(modules, chosen, policy)
        share = measurement.half_flops(overrides)
        if share > best and measurement.error(overrides) <= module_tuned.tolerance:
            best = share
    assert module_tuned.met and operation_tuned.met and best > 0
    assert module_tuned.half_flops >= 0.95 * best and operation_tuned.half_flops >= 0.95 * best
