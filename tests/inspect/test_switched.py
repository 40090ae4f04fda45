"""A switched program has the errors of the program in half precision, for each set of roundings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget_programs import PROGRAMS

from jaxmp.inspect._switched.gradient_program import program_of_function
from jaxmp.inspect._switched.sites import OPERANDS
from jaxmp.inspect._switched.switched import SwitchedProgram, results_under_policy

POLICY = "mixed_bfloat16"


def switched(loss_fn, args, policy=POLICY):
    program = program_of_function(loss_fn, args, policy, None)
    return program, SwitchedProgram(program)


@functools.cache
def measured(name, policy=POLICY, loss_scale=1):
    loss_fn, make_args = PROGRAMS[name]
    return switched(lambda *args: loss_scale * loss_fn(*args), make_args(), policy)


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_roundings_together_have_the_error_of_the_half_program(name):
    program, sites = measured(name)
    reference, half = sites.run(sites.no_rounding), results_under_policy(program)
    everything = sites.run(~sites.no_rounding)
    within = 0.3 if "language" in name else 0.05  # newer compilers round inside of an operation
    assert everything.error(reference) == pytest.approx(half.error(reference), rel=within)
    assert everything.loss == pytest.approx(half.loss, rel=1e-2)


def test_float16_with_a_loss_scale_is_the_same():
    program, sites = measured("distances", "mixed_float16", loss_scale=1024)
    reference, half = sites.run(sites.no_rounding), results_under_policy(program)
    assert sites.run(~sites.no_rounding).error(reference) == pytest.approx(half.error(reference), rel=0.05)


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_roundings_the_results_are_those_of_float32(name):
    loss_fn, make_args = PROGRAMS[name]
    _, sites = measured(name)
    loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(*make_args())
    plain = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)])
    reference = sites.run(sites.no_rounding)
    assert reference.loss == pytest.approx(float(loss), rel=1e-5)
    assert np.linalg.norm(reference.gradients - plain) < 1e-4 * np.linalg.norm(plain)


X = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
W = np.random.default_rng(1).normal(size=(16, 16)).astype("float32") / 4


def flow(x, w):
    for _ in range(5):
        x = x + 0.004 * jnp.tanh(x @ w)
    return x


def steep(x, w):
    return x + 100 * (x * (1 + 0.002 * jnp.tanh(x @ w)) + -x)


def recurrent(x, w):
    def step(carry, _):
        carry = carry + 0.004 * jax.nn.silu(carry @ w)
        return carry, jax.nn.softmax(carry @ w)

    carry, softmaxes = jax.lax.scan(jax.checkpoint(step), x, None, length=4)
    return carry + 0.1 * softmaxes.mean(0)


def plain(x, w):
    return jnp.tanh(x @ w)


traced_once = jax.jit(steep)  # JAX traces one body for all layers


@pytest.mark.parametrize(
    ("layers", "policy"),
    [
        ([flow, plain], "mixed_bfloat16"),
        ([traced_once, plain, traced_once], "mixed_bfloat16"),
        ([jax.checkpoint(flow), jax.checkpoint(flow), plain], "mixed_bfloat16"),
        ([flow, recurrent, plain], "mixed_float16"),
        ([flow, plain, steep, plain], "mixed_bfloat16"),
    ],
)
def test_a_mask_of_overrides_has_the_error_of_the_program_under_them(layers, policy):
    def loss_fn(w, x):
        x = x[np.arange(len(x))]  # a stream that begins with an argument itself is float32
        for number, layer in enumerate(layers):
            with jax.named_scope(f"layer_{number}"):
                x = layer(x, w)
        return jnp.mean(x**2)

    _, sites = switched(loss_fn, (W, X), policy)
    reference = sites.run(sites.no_rounding)
    keys = [f"layer_{number}{name}" for number in range(len(layers)) for name in ("", ":add", ":tanh")]
    for key in keys:
        try:
            variant = program_of_function(loss_fn, (W, X), policy, {key: "float32"})
        except ValueError:  # there is no such operation
            continue
        predicted = sites.run(sites.mask_of(variant)).error(reference)
        within = 0.3 if steep in layers else 0.05  # differences of rounded values
        assert predicted == pytest.approx(results_under_policy(variant).error(reference), rel=within), key


def test_a_value_that_is_half_already_is_not_rounded_again():
    def fun(x):
        y = (x @ x).astype("bfloat16").astype("float32").T
        return jnp.abs(y[:2]) @ x

    _, sites = switched(fun, (X[:16],))
    results = [site for site in sites.sites if site.position != OPERANDS]
    assert len(results) == 5  # x for each product that reads it, and the two results
    assert {site.equation.name for site in sites.sites} <= {"dot_general", "abs"}


def test_constants_are_rounded_too():
    def casts(factor):
        _, sites = switched(lambda x: factor * (x @ x) @ x, (X[:16],))
        return [site for site in sites.sites if site.equation.name == "mul" and site.part.is_operand]

    assert len(casts(0.1)) > len(casts(0.5))  # half has 0.5


def test_underflows_and_overflows_are_counted_also_in_a_scan():
    def loss_fn(w, x):
        y = jax.lax.map(lambda rows: (1e-3 * rows) @ (1e-5 * w), x.reshape(2, 16, 16))  # underflows
        gram = (40 * x).T @ (40 * x)  # overflows
        return jnp.sum((gram / 1e5) @ w) + jnp.sum(y.reshape(x.shape) @ w)

    _, sites = switched(loss_fn, (W, 3 * X), "mixed_float16")
    underflows, overflows = sites.counts()
    lines = {site.equation.source for site, count in zip(sites.sites, overflows, strict=True) if count}
    assert len(lines) == 1 and underflows.sum() > X.size
    products = [n for n, site in enumerate(sites.sites) if site.key[1:] and site.equation.name == "dot_general"]
    assert underflows[products].sum() > 0


def test_the_floor_rounds_the_operands_of_half_products_only():
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    _, sites = switched(loss_fn, (W, X))
    floor = sites.operands_of_products
    assert 0 < floor.sum() < len(sites.sites)
    assert {site.equation.name for site, on in zip(sites.sites, floor, strict=True) if on} == {"dot_general"}
