"""The ablation of autocast's rules, and mixed precision without a graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from experiments.benchmarks.real_libraries import ablation, collect, registry
from experiments.benchmarks.real_libraries.per_operation import autocast_each_operation
from experiments.benchmarks.real_libraries.rule_switches import SWITCHES
from jaxmp.program.walk import equations

W, X = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((0, (8, 8)), (1, (16, 8))))


def distances(w):
    h = 10 + X @ w
    squared = jnp.sum(h**2, -1)[:, None] + jnp.sum(h**2, -1) - 2 * h @ h.T
    return jnp.mean(jnp.exp(-jnp.maximum(squared, 0) / 100))


def test_a_rule_matters_where_the_error_grows_without_it(monkeypatch, tmp_path):
    programs = [
        registry.Program("optax", "distances", lambda: (distances, W)),
        registry.Program("optax", "one product", lambda: (lambda w: jnp.mean(jnp.tanh(X @ w)), W)),
    ]
    monkeypatch.setattr(collect, "FAMILIES", ())
    monkeypatch.setattr(collect, "PROGRAMS", programs)
    result = ablation.main(ablation.Config(run_dir=tmp_path))
    far, simple = result["programs"]
    assert far["all_rules"]["error"] < 0.01 < far["without"]["cancellation"]["error"]
    assert "distances" in far["without"]
    assert "cancellation" not in simple["without"] and simple["each_alone"]["error"] < 0.01
    table = (tmp_path / "ablation.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith("| 11 | cancellation |")]
    assert "optax: distances" in row and "one product" not in row


def test_each_operation_alone_has_half_products_and_float32_carries():
    def loss(w):
        final, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), X, length=3)
        return jnp.mean(jax.nn.relu(final @ w) ** 2)

    half = autocast_each_operation(jax.value_and_grad(loss), jnp.bfloat16)
    program = list(equations(jax.make_jaxpr(half)(W)))
    products = [eqn for eqn in program if eqn.primitive.name == "dot_general"]
    assert products and {var.aval.dtype.name for eqn in products for var in eqn.invars} == {"bfloat16"}
    scans = [eqn for eqn in program if eqn.primitive.name == "scan"]
    assert scans and {eqn.outvars[0].aval.dtype.name for eqn in scans} == {"float32"}
    assert {eqn.outvars[0].aval.dtype.name for eqn in program if eqn.primitive.name == "max"} == {"bfloat16"}
    (value, gradient), (exact_value, exact_gradient) = half(W), jax.value_and_grad(loss)(W)
    np.testing.assert_allclose(value, exact_value, rtol=0.02)
    assert 0 < np.linalg.norm(gradient - exact_gradient) < 0.02 * np.linalg.norm(exact_gradient)


def test_saved_bytes_are_those_of_the_activations():
    def loss(w):
        return jnp.sum(jnp.tanh(X @ w) @ w)

    saved = ablation.saved_bytes(lambda w: jax.vjp(loss, w)[1], W)
    in_half = ablation.saved_bytes(lambda w: jax.vjp(jaxmp.autocast(loss, "mixed_bfloat16"), w)[1], W)
    assert saved >= 2 * X.nbytes and in_half < saved


ALL_SWITCHES = [switch for rule in SWITCHES for switch in (rule, *rule.cases)]


@pytest.mark.parametrize("switch", ALL_SWITCHES, ids=[switch.name for switch in ALL_SWITCHES])
def test_a_switch_replaces_parts_of_the_engine_for_a_while(switch):
    before = [getattr(module, name) for module, name, _ in switch.replacements]
    with switch.off():
        for (module, name, replacement), original in zip(switch.replacements, before, strict=True):
            assert getattr(module, name) is replacement is not original
    assert [getattr(module, name) for module, name, _ in switch.replacements] == before
