"""error_budget names the lines of a float64 program that need float64."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.inspect import error_budget


def newton(targets):
    """Return roots of ``x**3 + x = t``, found by Newton's method with a tolerance of 1e-10."""

    def is_unfinished(state):
        count, _, step = state
        return (count < 40) & (jnp.max(jnp.abs(step)) > 1e-10)

    def update(state):
        count, x, _ = state
        residual = x * x * x + x - targets  # wide
        slope = 3 * x * x + 1
        step = residual / slope
        x = x - step  # wide
        return count + 1, x, step

    return jax.lax.while_loop(is_unfinished, update, (0, targets, jnp.ones_like(targets)))[1]


def energy_drift(positions):
    """Return the relative energy drift of pendulums under the leapfrog method."""

    def energy(q, p):
        kinetic = p * p / 2  # wide
        potential = -jnp.cos(q)  # wide
        return kinetic + potential  # wide

    def step(state, _):
        q, p = state
        p = p - 0.005 * jnp.sin(q)  # wide
        q = q + 0.01 * p  # wide
        p = p - 0.005 * jnp.sin(q)  # wide
        return (q, p), None

    start = energy(positions, jnp.zeros_like(positions))
    (q, p), _ = jax.lax.scan(step, (positions, jnp.zeros_like(positions)), None, length=200)
    drift = energy(q, p) - start  # wide
    scale = jnp.abs(start) + 1
    return drift / scale


def gaps(basis, eigenvalues):
    """Return the inverse gaps of eigenvalues, two of which are nearly multiples."""
    orthogonal = jnp.linalg.qr(basis)[0]  # wide
    matrix = (orthogonal * eigenvalues) @ orthogonal.T  # wide
    found = jnp.linalg.eigvalsh(matrix)  # wide
    differences = found[1:] - found[:-1]  # wide
    return 1 / differences


RNG = np.random.default_rng(0)
PROGRAMS = {
    "Newton's method": (newton, (RNG.uniform(1, 3, 16),), 1e-9),
    "the energy drift of a leapfrog integrator": (energy_drift, (RNG.uniform(1, 2, 8),), 1e-5),
    "near multiples": (gaps, (RNG.normal(size=(4, 4)), np.array([1, 1 + 1e-7, 2, 3])), 1e-3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_lines_that_need_float64_are_named(name):
    fun, args, tolerance = PROGRAMS[name]
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(arg, "float64") for arg in args)
        budget = error_budget(fun, "float32", tolerance=tolerance)(*args)
    (sentence,) = budget.sentences
    lines, start = inspect.getsourcelines(fun)
    wide = {start + number for number, line in enumerate(lines) if "# wide" in line}
    named = {int(line) for line in re.findall(r"test_budget_float64\.py:(\d+)", sentence)}
    error = float(re.search(r"in float32 the error is (\S+);", sentence)[1])
    assert error <= tolerance < budget.measured.gradient_error
    assert named == wide


def test_a_tolerance_needs_float64_arguments():
    with pytest.raises(ValueError, match="is for a float64 program under the policy 'float32'"):
        error_budget(jnp.sum, "mixed_bfloat16", tolerance=1e-3)(jnp.ones(3))
