"""Rebinding a program keeps its types, scopes, sources, effects and contexts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

import jaxmp
from jaxmp._internals.jax.rebind import in_place_of
from jaxmp._internals.jax.sources import names_of, source_of
from jaxmp.program import equations as _equations
from jaxmp.program.bodies import bind_equation
from jaxmp.program.equations import Bodies, bodies_of, opened
from jaxmp.program.walk import interpreted

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
        yield eqn.primitive.name, avals, str(eqn.source_info.name_stack), source_of(eqn), effects
        for body in (bodies_of(eqn) or Bodies("", ())).jaxprs:
            yield from described(body)


def bound_again(jaxpr, consts, args):
    def equation(eqn, operands):
        with in_place_of(eqn):
            return bind_equation(eqn, operands, eqn.params)

    return interpreted(jaxpr, consts, args, equation)


def test_a_rebound_program_equals_the_program_of_eval_jaxpr():
    jaxpr, consts = opened(jax.make_jaxpr(program)(*ARGS))

    def traced(evaluate):
        def evaluated(*args):
            with jax.named_scope("around"):
                return evaluate(jaxpr, consts, args)

        return jax.make_jaxpr(evaluated)(*ARGS)

    ours, jaxs = traced(bound_again), traced(_equations.evaluate)
    assert str(ours) == str(jaxs)
    equations = list(described(ours))
    assert equations == list(described(jaxs))
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
