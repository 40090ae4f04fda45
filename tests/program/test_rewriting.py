"""A Rewriter changes equations in every kind of body, and keeps the rest.

Types, scopes, sources, effects and contexts stay the same.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._internals.jax.sources import names_of, source_of
from jaxmp.program.derivative_rules import RuleEvaluation
from jaxmp.program.equations import Bodies, bodies_of, evaluate, opened, primitive_of
from jaxmp.program.primitives import BODIES
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.walk import equations

ARGS = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.int32(2)


def program(x, w, n):
    """Use equations of many kinds: weakly typed, with bodies, with effects."""
    with jax.named_scope("layer"):
        h = jax.nn.gelu(x @ w) * 2 + w[n] - jnp.arange(8.0).sum()
    h = jax.checkpoint(jnp.sin)(jax.nn.relu(h))
    h = jax.lax.fori_loop(0, 3, lambda i, h: h + w[i].astype(h.dtype), h)
    h = jax.lax.cond(n > 0, jnp.sort, lambda h: h[::-1], h)
    h = jax.lax.while_loop(lambda h: h.sum() < 3.0, lambda h: h + 1, h)
    jax.debug.callback(lambda h: None, h)
    ref = jax.new_ref(h)
    ref[...] += 1.0
    noise = jax.random.normal(jax.random.key(n), h.shape)
    return jax.jit(jnp.tanh)(ref[...]) + noise, h.astype(jnp.bfloat16), jax.lax.optimization_barrier((n, h)), n + 1


def described(jaxpr):
    """Yield the types, scopes, source and effects of each equation, also in bodies."""
    for eqn in opened(jaxpr)[0].eqns:
        avals = [(atom.aval, getattr(atom.aval, "weak_type", None)) for atom in (*eqn.invars, *eqn.outvars)]
        effects = sorted(type(effect).__name__ for effect in eqn.effects)
        yield primitive_of(eqn), avals, str(eqn.source_info.name_stack), source_of(eqn), effects
        for body in (bodies_of(eqn) or Bodies("", ())).jaxprs:
            yield from described(body)


X = jnp.linspace(0.1, 0.9, 4)


class DoubledSines(Rewriter):
    def evaluate_operation(self, eqn, operands):
        results = super().evaluate_operation(eqn, operands)
        return [2 * result for result in results] if eqn.primitive.name == "sin" else results


class DoubledSinesInRules(DoubledSines):
    def make_rule_evaluation(self, eqn):
        return RuleEvaluation(lambda program, args, _: self.evaluate(*program, args), contextlib.nullcontext)


def doubled(x):
    return 2 * jnp.sin(x)


def rewritten(fun, rewriter=None):
    def call(*args):
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = (rewriter or DoubledSines()).evaluate(*opened(closed), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def in_jit(sin, x):
    return jax.jit(lambda x: sin(x) * x)(x)


def in_scan(sin, x):
    def turn(carry, x):
        return carry * sin(x), sin(carry)

    carry, stacked = jax.lax.scan(turn, 1.5, x, reverse=True)
    return carry + stacked


def in_while(sin, x):
    return jax.lax.while_loop(
        lambda carry: jnp.sum(sin(carry[1])) < 6, lambda c: (c[0] + sin(c[1]), c[1] * 1.2), (x, x)
    )[0]


def in_cond(sin, x):
    return jax.lax.cond(x[0] < 0.5, sin, lambda x: sin(x) + 1, x)


def in_remat(sin, x):
    return jax.checkpoint(lambda x: sin(sin(x)))(x)


def in_custom_jvp(sin, x):
    fun = jax.custom_jvp(sin)
    fun.defjvp(lambda primals, tangents: (jnp.sin(*primals), 3 * tangents[0] * jnp.sin(*primals)))
    return fun(x)


def in_custom_vjp(sin, x):
    fun = jax.custom_vjp(sin)
    fun.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (5 * cotangent * jnp.sin(x),))
    return fun(x)


def in_shard_map(sin, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


def nested(sin, x):
    return jax.lax.scan(lambda carry, _: (in_cond(sin, in_remat(sin, in_jit(sin, carry))), None), x, length=2)[0]


CASES = [in_jit, in_scan, in_while, in_cond, in_remat, in_custom_jvp, in_custom_vjp, in_shard_map, nested]
EXAMPLES = jnp.stack([X, X / 2])


@pytest.fixture(scope="module")
def outcomes():
    """Return the results and the derivatives of each case, computed by one program."""

    def results(case):
        plain, by_hand = (lambda x: case(jnp.sin, x)), (lambda x: case(doubled, x))
        ours = [rewritten(plain)(X), rewritten(jax.jit(plain))(X)]
        ours_mapped = [jax.vmap(rewritten(plain))(EXAMPLES), rewritten(jax.vmap(plain))(EXAMPLES)]
        return plain(X), (ours, by_hand(X)), (ours_mapped, jax.vmap(by_hand)(EXAMPLES))

    def derivatives(case, fun):
        tangent = None if case is in_custom_vjp else jax.jvp(fun, (X,), (X + 1,))
        cotangent = None if case is in_while else jax.vjp(fun, X)[1](X + 1)
        return tangent, cotangent

    def of(case):
        ours, by_hand = rewritten(lambda x: case(jnp.sin, x)), (lambda x: case(doubled, x))
        return results(case), (derivatives(case, ours), derivatives(case, by_hand))

    return jax.jit(lambda: {case.__name__: of(case) for case in CASES})()


@pytest.mark.parametrize("case", CASES)
class TestAnOperationIsChangedInEveryKindOfBody:
    def test_inside_and_outside_of_jit_and_vmap(self, case, outcomes):
        (plain, *pairs), _ = outcomes[case.__name__]
        for ours, expected in pairs:
            for result in ours:
                np.testing.assert_allclose(result, expected, rtol=1e-6)
                assert not np.allclose(result, plain)

    def test_under_differentiation(self, case, outcomes):
        _, (ours, expected) = outcomes[case.__name__]
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), ours, expected)


def test_an_operation_is_changed_without_jit(outcomes):
    (_, (_, expected), _), _ = outcomes["nested"]
    np.testing.assert_allclose(rewritten(lambda x: nested(jnp.sin, x))(X), expected, rtol=1e-6)


def test_the_cases_have_every_primitive_with_a_body():
    pairs = [
        (primitive_of(eqn), bodies_of(eqn)) for case in CASES for eqn in equations(jax.make_jaxpr(case, 0)(jnp.sin, X))
    ]
    inlined = {"closed_call", "call", "eval_jaxpr", "remat_opt"}
    assert {name for name, bodies in pairs if bodies} == {*BODIES, "scan", "while", "cond"} - inlined


@pytest.mark.parametrize("case", [in_custom_jvp, in_custom_vjp])
def test_a_rule_is_rewritten_only_on_request(case):
    def slopes(rewriter):
        return jax.grad(lambda x: rewritten(lambda x: case(jnp.sin, x), rewriter)(x).sum())(X)

    np.testing.assert_allclose(slopes(DoubledSinesInRules()), 2 * slopes(DoubledSines()), rtol=1e-6)


class WholeEquations(Rewriter):
    """Bind equations with bodies as they are."""

    def evaluate_bodies(self, eqn, bodies, operands):
        return self.evaluate_operation(eqn, operands)


@pytest.mark.parametrize("rewriter", [Rewriter, WholeEquations])
def test_an_unchanged_rewriter_gives_an_equal_program(rewriter):
    jaxpr, consts = opened(jax.make_jaxpr(program)(*ARGS))

    def traced(evaluate):
        def evaluated(*args):
            with jax.named_scope("around"):
                return evaluate(jaxpr, consts, args)

        return jax.make_jaxpr(evaluated)(*ARGS)

    ours, jaxs = traced(rewriter().evaluate), traced(evaluate)
    if rewriter is WholeEquations:
        assert str(ours) == str(jaxs)
    # `jax.lax.switch` clamps the index of a conditional once more.
    equations, expected = ([row for row in described(jaxpr) if row[0] != "clamp"] for jaxpr in (ours, jaxs))
    assert equations == expected
    assert len(equations) > 60 and equations[0][2] == "around/layer"


def test_autocast_keeps_the_scopes_the_source_and_the_context_of_products():
    def loss(w, x):
        with jax.named_scope("block"), set_xla_metadata(group="first"):
            h = x @ w
        return jnp.sum(jnp.tanh(h) @ w)

    def products(fun):
        """Yield the scopes (without jaxmp's), the source and the metadata of products."""
        for eqn in jax.make_jaxpr(jax.value_and_grad(fun))(ARGS[1], ARGS[0]).eqns:
            if eqn.primitive.name == "dot_general":
                scopes = [name for name in names_of(eqn) if not name.startswith("jaxmp.")]
                yield scopes, source_of(eqn), eqn.ctx.xla_metadata

    plain, ours = list(products(loss)), list(products(jaxmp.autocast(loss, "mixed_bfloat16")))
    assert ours == plain
    assert len(plain) >= 4 and plain[0][0] == ["block"] and plain[0][2] == {"group": "first"}
